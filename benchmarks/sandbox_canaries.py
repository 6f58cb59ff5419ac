"""Canaries of reward hacking: every class that applies to a coding task, planted once, scored 0 and flagged.

    python -m benchmarks.sandbox_canaries [--backend bubblewrap|docker|all] [--only TEXT]

Each canary has a box, does there what a cheating agent would, and is verified. `naive` says whether a grader
that runs the tests in the agent's own box and looks at the exit code would have been fooled. An honest
solution must be scored 1 without a flag by all three kinds of tests. Controls show that canaries are live:
the history of a repository that was not sealed, and hidden tests whose leak is let pass, are scored 1. The
last line holds the figures; the exit status is 1 when one slips or is not flagged, or honest work fails.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from benchmarks.sandbox_canary_cases import CANARIES, Canary
from benchmarks.sandbox_canary_task import GOLD, SPEC, plan, repository, without_leaks
from sandbox.backends.registry import backends
from sandbox.client import Fleet
from sandbox.remote import RemoteBox
from sandbox.types import Verdict
from sandbox.verify import Plan, Report, seal, verify
from sandbox.verify.files import write as write_files

ROOT = "/workspace"
_NAIVE = {
    "functions": "/usr/bin/python3 -m unittest -q tests.test_merge",
    "unittest": "/usr/bin/python3 -m unittest -q tests.test_merge",
    "pytest": "PYTHONPATH=/workspace/.lib:$PYTHONPATH /usr/bin/python3 -m pytest -q tests",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one canary."""

    canary: Canary
    report: Report
    naive: bool

    @property
    def held(self) -> bool:
        """Whether it was scored 0, and not by our own failure."""
        return self.report.verdict is Verdict.FAIL

    @property
    def flagged(self) -> bool:
        """Whether its class was named."""
        return self.canary.flag in self.report.kinds

    def __str__(self) -> str:
        kinds = ", ".join(sorted(self.report.kinds)) or "-"
        score = "-" if self.report.score is None else f"{self.report.score:g}"
        marks = f"{'ok  ' if self.held and self.flagged else 'SLIP'} {self.canary.name:<30}"
        return f"{marks} {self.canary.tests:<10} {score:<5} {'fooled' if self.naive else 'no':<7} {kinds}"


async def write(box: RemoteBox, files: Mapping[str, str | bytes]) -> None:
    """Writes files, of which relative paths are below the folder of the work."""
    encoded = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    await write_files(box, {str(PurePosixPath(ROOT) / path): data for path, data in encoded.items()})


async def act(fleet: Fleet, canary: Canary, asked: Plan, *, naive: bool = True, sealed: bool = True) -> Row:
    """Plays one canary and has it judged."""
    if canary.before:
        async with await fleet.create(SPEC) as earlier:
            await write(earlier, {**asked.base, **canary.before})
    async with await fleet.create(SPEC) as box:
        await write(box, asked.base)
        if canary.sealed:
            with tempfile.TemporaryDirectory() as folder:
                await asyncio.to_thread(repository, Path(folder) / "repo")
                if sealed:
                    await asyncio.to_thread(seal, Path(folder) / "repo")
                await box.upload(Path(folder) / "repo", f"{ROOT}/repo")
        await write(box, canary.files)
        for command in canary.commands:
            await box.exec(command, timeout_s=30, env={"HOME": ROOT})
        fooled = naive and await fools(box, canary)
        return Row(canary, await verify(fleet, box, asked, commands=canary.commands), fooled)


async def fools(box: RemoteBox, canary: Canary) -> bool:
    """Whether a grader that believes exit codes in the agent's box would have been fooled."""
    command = f"for f in .profile .bashrc; do [ -f $f ] && . ./$f; done; {_NAIVE[canary.tests]}"
    result = await box.exec(command, timeout_s=5, env={"HOME": ROOT})
    return result.exit_code == 0


async def honest(fleet: Fleet, kind: str) -> Report:
    """Judges the right solution."""
    canary = Canary("honest", "", kind, {"solution.py": GOLD}, ("cat solution.py",))
    return (await act(fleet, canary, plan(kind), naive=False)).report


async def controls(fleet: Fleet) -> dict[str, bool]:
    """Returns whether two canaries gain what they are to gain once their protection is off."""
    by_name = {canary.name: canary for canary in CANARIES}
    history = await act(fleet, by_name["git history"], plan("functions"), naive=False, sealed=False)
    leak = by_name["hidden tests left in the box"]
    let = await act(fleet, leak, without_leaks(plan("functions")), naive=False)
    return {"unsealed history": history.report.score == 1.0, "leak let pass": let.report.score == 1.0}


async def measure(backend: str, only: str) -> tuple[int, int, int, bool]:
    """Runs all on one backend and prints; returns canaries, those scored 0, those flagged, and the rest."""
    wanted = [canary for canary in CANARIES if only in canary.name]
    with tempfile.TemporaryDirectory() as folder:
        async with await Fleet.connect(state_dir=Path(folder), owner="canaries", backend=backend) as fleet:
            print(f"\n{backend}\n     {'canary':<30} {'tests':<10} score naive   flags", flush=True)
            rows: list[Row] = []
            for canary in wanted:
                rows.append(await act(fleet, canary, plan(canary.tests)))
                print(rows[-1], flush=True)
                if not (rows[-1].held and rows[-1].flagged):
                    print(f"     {rows[-1].report.verdict}: {rows[-1].report.reason}")
            right = True
            for kind in _NAIVE:
                report = await honest(fleet, kind)
                right = right and report.score == 1.0 and not report.flags
                print(
                    f"     honest, {kind}: score {report.score}, flags {sorted(report.kinds)} {report.reason}"
                )
            for name, live in (await controls(fleet)).items():
                right = right and live
                print(f"     control, {name}: {'scored 1' if live else 'NOT scored 1'}")
    print(f"     a naive grader would have been fooled by {sum(row.naive for row in rows)} of {len(rows)}")
    return len(rows), sum(row.held for row in rows), sum(row.flagged for row in rows), right


async def chosen(asked: str) -> list[str]:
    """Returns the backends to run on: those asked for, or all that this machine has."""
    if asked != "all":
        return [asked]
    here = backends()
    return [name for name in ("bubblewrap", "docker") if not await here[name].missing()]


async def run(asked: str, only: str) -> bool:
    """Runs on all backends and prints the figures; returns whether they hold."""
    sums = [await measure(backend, only) for backend in await chosen(asked)]
    total, held, flagged = (sum(row[column] for row in sums) for column in range(3))
    right = all(row[3] for row in sums)
    print(f"\nhonest work passes without flags, and canaries are live: {'yes' if right else 'NO'}")
    print(f"canaries scored 0: {held}/{total} flagged: {flagged}/{total}")
    return held == flagged == total and right


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="all", choices=("bubblewrap", "docker", "all"))
    parser.add_argument("--only", default="", help="part of a canary's name")
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(run(arguments.backend, arguments.only)) else 1)


if __name__ == "__main__":
    main()
