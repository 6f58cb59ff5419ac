"""Three ways back to the state of a sandbox: `python -m benchmarks.sandbox_recovery`.

One sandbox runs 10, 100 or 1000 commands that change files, cheap ones or such of 50 ms, with a snapshot
after nine tenths of them. Then the same state is come back to by

- *pause*: it was paused and is resumed, on a node that lives; what it takes is memory;
- *snapshot*: its node gets SIGKILL, and the next one makes it anew from the snapshot and the journal's tail;
- *replay*: the same without the snapshot, all commands of the journal run again.

Times are from the request to a sandbox that answers, without the start of a node. Bytes are the memory that a
paused sandbox holds for itself, the snapshot with the records after it, or the journal. After each the files
must be those from before, by digest. The last line is of the longest history with the slowest commands. The
exit status is 1 when files differ, when other commands than expected ran again, or when pause < snapshot <
replay does not hold for the longest histories.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from sandbox.client import Fleet
from sandbox.journal_file import scan
from sandbox.remote import RemoteBox
from sandbox.types import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20))
WAYS = ("pause", "snapshot", "replay")
_TAIL, _PAUSES, _QUICK = 10, 5, 100
_OWNER = "recovery"


@dataclass(frozen=True, slots=True)
class Way:
    """One way back: median milliseconds, bytes that had to be kept, and whether the files are the same."""

    ms: float
    size: int
    equal: bool


@dataclass(slots=True)
class Case:
    """A history: how many commands, how long each takes, and the ways back."""

    commands: int
    sleep_ms: int
    ways: dict[str, Way] = field(default_factory=dict[str, Way])

    @property
    def ordered(self) -> bool:
        """Whether each way is faster than the next."""
        times = [self.ways[name].ms for name in WAYS]
        return times == sorted(times) and len(set(times)) == len(times)


class Bench:
    """A sandbox with a history, on a node that dies and is started again."""

    def __init__(self, state: Path, backend: str, case: Case):
        self._state, self._backend, self._case = state, backend, case
        self._fleet: Fleet | None = None
        self._id, self._digest = "", ""

    async def run(self) -> None:
        """Makes the history and goes each way back."""
        case, repeats = self._case, 3 if self._case.commands <= _QUICK else 1
        fleet = await self._connect()
        try:
            box = await self._live(await fleet.create(SPEC))
            case.ways["pause"] = await self._pause(box)
            kept = self._snapshot_bytes()
            tail = case.commands - _before_snapshot(case.commands)
            case.ways["snapshot"] = await self._anew(repeats, kept, tail)
            fleet = await self._connect()
            for name in await fleet.snapshots():
                await fleet.forget(name)
            journal = (self._state / "journals" / self._id).stat().st_size
            case.ways["replay"] = await self._anew(repeats, journal, case.commands)
        finally:
            if self._fleet is not None:
                await self._fleet.close()

    async def _connect(self) -> Fleet:
        if self._fleet is None:
            self._fleet = await Fleet.connect(state_dir=self._state, owner=_OWNER, backend=self._backend)
        return self._fleet

    async def _live(self, box: RemoteBox) -> RemoteBox:
        self._id = box.id
        for number in range(self._case.commands):
            if number == _before_snapshot(self._case.commands):
                await box.snapshot()
            (await box.exec(_command(number, self._case.sleep_ms))).check()
        self._digest = await self._digest_of(box)
        return box

    async def _pause(self, box: RemoteBox) -> Way:
        assert self._fleet is not None
        if not self._fleet.capabilities.pause:
            raise SystemExit("this machine cannot pause sandboxes (no freezer): there is nothing to compare")
        tree = psutil.Process(self._fleet.node_pid).children(recursive=True)
        size = sum(process.memory_full_info().uss for process in tree)
        times: list[float] = []
        for _ in range(_PAUSES):
            await box.pause()
            start = time.perf_counter()
            await box.resume()
            times.append(1e3 * (time.perf_counter() - start))
        return Way(statistics.median(times), size, await self._digest_of(box) == self._digest)

    async def _anew(self, repeats: int, size: int, commands: int) -> Way:
        times, equal = list[float](), True
        for _ in range(repeats):
            await self._crash()
            fleet = await self._connect()
            start = time.perf_counter()
            box = await fleet.attach(self._id, replay=True)
            times.append(1e3 * (time.perf_counter() - start))
            equal = equal and box.replayed == commands and await self._digest_of(box) == self._digest
        return Way(statistics.median(times), size, equal)

    async def _crash(self) -> None:
        fleet = await self._connect()
        os.kill(fleet.node_pid, signal.SIGKILL)
        self._fleet = None
        await fleet.close(release=False)

    def _snapshot_bytes(self) -> int:
        trees = sum(path.stat().st_size for path in (self._state / "snapshots").iterdir())
        before = _before_snapshot(self._case.commands)
        records = scan(self._state / "journals" / self._id)
        return trees + sum(r.end - r.offset for r in records if r.record.get("seq", 0) > before)

    async def _digest_of(self, box: RemoteBox) -> str:
        folder = Path(tempfile.mkdtemp())
        try:
            await box.download("/workspace", folder / "files")
            return await asyncio.to_thread(_digest, folder)
        finally:
            shutil.rmtree(folder)


def _digest(folder: Path) -> str:
    """Returns the SHA-256 of names, modes and contents of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_mode:o}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _before_snapshot(commands: int) -> int:
    return commands - commands // _TAIL


def _command(number: int, sleep_ms: int) -> str:
    """Returns a command that depends on what those before it did."""
    wait = f"; sleep {sleep_ms / 1000}" if sleep_ms else ""
    return f"echo {number} >> log; cksum < log > sum-{number % 32}; seq {number} > list-{number % 8}{wait}"


def report(cases: Sequence[Case]) -> None:
    """Prints times and sizes."""
    print(
        f"\n{'commands':>8s} {'each':>6s}  " + "  ".join(f"{way + ' ms':>12s} {'bytes':>9s}" for way in WAYS)
    )
    for case in cases:
        row = "  ".join(f"{case.ways[way].ms:12.1f} {case.ways[way].size:9d}" for way in WAYS)
        wrong = [way for way in WAYS if not case.ways[way].equal]
        print(
            f"{case.commands:8d} {f'{case.sleep_ms} ms' if case.sleep_ms else 'cheap':>6s}  {row}"
            f"{'  FILES DIFFER: ' + ' '.join(wrong) if wrong else ''}"
        )


def draw(cases: Sequence[Case], path: Path) -> None:
    """Draws times and sizes over the number of commands to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    kinds = sorted({case.sleep_ms for case in cases})
    panels = figure.subplots(1, len(kinds) + 1)
    for axes, kind in zip(panels, (*kinds, None), strict=True):
        mine = [case for case in cases if case.sleep_ms == (kinds[0] if kind is None else kind)]
        for way in WAYS:
            values = [case.ways[way].size if kind is None else case.ways[way].ms for case in mine]
            axes.plot([case.commands for case in mine], values, "o-", label=way)
        title = f"ms back, commands of {kind} ms" if kind else "ms back, cheap commands"
        axes.set(title="bytes kept" if kind is None else title, xlabel="commands", xscale="log", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


async def measure(counts: Sequence[int], sleeps: Sequence[int], backend: str, folder: Path) -> list[Case]:
    """Goes all ways back for all histories."""
    cases: list[Case] = []
    for sleep_ms in sleeps:
        for commands in counts:
            case = Case(commands, sleep_ms)
            await Bench(folder / f"{sleep_ms}-{commands}", backend, case).run()
            cases.append(case)
            print(f"{commands} commands, {sleep_ms} ms each: done", flush=True)
    return cases


def main() -> None:
    """Measures, draws and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox_recovery", description=__doc__)
    parser.add_argument("--commands", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--sleep-ms", type=int, nargs="+", default=[0, 50])
    parser.add_argument("--backend", default="bubblewrap", choices=("bubblewrap", "docker"))
    parser.add_argument("--picture", type=Path, default=Path("sandbox_recovery.png"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = asyncio.run(
            measure(sorted(arguments.commands), sorted(arguments.sleep_ms), arguments.backend, Path(folder))
        )
    draw(cases, arguments.picture)
    report(cases)
    longest = [case for case in cases if case.commands == max(arguments.commands)]
    holds = all(way.equal for case in cases for way in case.ways.values())
    ordered = all(case.ordered for case in longest)
    if not ordered:
        print("pause < snapshot < replay does not hold for the longest histories")
    figures = " ".join(f"{name} {longest[-1].ways[name].ms:.1f} ms" for name in WAYS)
    print(f"recovery {figures} commands {longest[-1].commands} equal {'yes' if holds else 'no'}")
    raise SystemExit(0 if holds and ordered else 1)


if __name__ == "__main__":
    main()
