"""One run of trusted tests on a candidate, in a fresh box: a trusted parent and the candidate beside it.

Two commands run in the box as two users. The parent writes the report, which only it can do: its output is a
pipe that the candidate's user cannot open, and carries the nonce that it got on its input. The candidate's
exit code and output decide nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from sandbox.errors import InfrastructureError, SandboxOomError
from sandbox.remote import RemoteBox
from sandbox.types import ExecResult, Verdict
from sandbox.verify.decoys import Decoys, make
from sandbox.verify.files import write
from sandbox.verify.plan import FunctionTests, Plan, SuiteTests
from sandbox.verify.report import CaseResult

INSIDE = Path(__file__).parent / "inside"
CANDIDATE = 58999
"""The user of the candidate: neither the agent's nor the parent's."""

_LATE_S, _REPORT = 15.0, 8 << 20
_MAIN = "import sys; sys.path.insert(0, {folder!r}); from inside.{name} import main; main()"


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run ended."""

    verdict: Verdict
    reason: str = ""
    tests: tuple[CaseResult, ...] = ()
    output: str = ""


@dataclass(slots=True)
class _Heard:
    """The parent's output as it comes: whether the candidate was there, and the report."""

    nonce: str
    data: bytearray = field(default_factory=bytearray)

    def lines(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for line in bytes(self.data).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                value: object = json.loads(line)
                if isinstance(value, dict):
                    found.append(cast("dict[str, Any]", value))
        return [line for line in found if line.get("nonce") == self.nonce]

    @property
    def started(self) -> bool:
        return any(line.get("started") is True for line in self.lines())


async def run(box: RemoteBox, plan: Plan, files: Mapping[str, bytes]) -> Ran:
    """Puts files into a fresh box and runs the plan's tests on them.

    Raises:
        SandboxError: The box was lost, has no room, or did not start the programs.
    """
    folder = f"/tmp/verify-{secrets.token_hex(8)}"
    decoys = make(time.time()) if isinstance(plan.tests, SuiteTests) else None
    added = {decoys.path: decoys.source} if decoys else {}
    await write(box, _files(plan, {**files, **added}, folder))
    heard = _Heard(secrets.token_hex(16))
    address = f"verify-{secrets.token_hex(16)}"
    job = {**_job(plan, decoys), "nonce": heard.nonce, "address": address}
    candidate = asyncio.create_task(_candidate(box, plan, folder, address))
    try:
        ended = await _parent(box, plan, folder, job, heard)
    except SandboxOomError:
        if not heard.started:
            raise
        ended = None
    finally:
        output, oom = await _end(candidate)
    return _judge(plan, decoys, heard, ended, output, oom)


async def _parent(
    box: RemoteBox, plan: Plan, folder: str, job: Mapping[str, Any], heard: _Heard
) -> ExecResult:
    stream = box.stream(
        [plan.python, "-I", "-S", "-B", "-c", _MAIN.format(folder=folder, name="parent")],
        stdin=json.dumps(job).encode(),
        timeout_s=2 * plan.start_s + plan.timeout_s + _LATE_S,
        cwd="/",
        output_limit=_REPORT,
    )
    async with stream:
        async for piece in stream:
            if not piece.stderr:
                heard.data += piece.data
    return stream.result


async def _candidate(box: RemoteBox, plan: Plan, folder: str, address: str) -> ExecResult:
    return await box.exec(
        [plan.python, "-I", "-S", "-B", "-c", _MAIN.format(folder=folder, name="candidate")],
        stdin=json.dumps({"address": address, "start_s": plan.start_s}).encode(),
        timeout_s=2 * plan.start_s + plan.timeout_s + 2 * _LATE_S,
        cwd="/",
        user=CANDIDATE,
        output_limit=1 << 15,
    )


async def _end(candidate: asyncio.Task[ExecResult]) -> tuple[str, bool]:
    """Ends the candidate's command; returns what it had printed if it had ended by itself, and of memory."""
    await asyncio.wait([candidate], timeout=0.5)
    candidate.cancel()
    (ended,) = await asyncio.gather(candidate, return_exceptions=True)
    if not isinstance(ended, ExecResult):
        return "", False
    return (ended.stdout + ended.stderr).decode(errors="replace"), ended.oom


def _judge(
    plan: Plan, decoys: Decoys | None, heard: _Heard, ended: ExecResult | None, output: str, oom: bool
) -> Ran:
    """Makes a verdict of the report alone."""
    if not heard.started:
        why = (
            "ran out of start_s"
            if heard.lines()
            else f"ended early ({ended.stderr[-300:]!r})"
            if ended
            else ""
        )
        raise InfrastructureError(f"the programs of the verification did not start: {why}")
    reports = [line for line in heard.lines() if "end" in line]
    if len(reports) != 1:
        why = "resources" if ended is None or ended.oom else "timeout"
        return Ran(Verdict.FAIL, f"the tests came to no end ({why})", (CaseResult("", why),), output)
    if reports[0]["end"] == "no framework":
        last = output.strip().splitlines()[-1:] or ["it says nothing"]
        raise InfrastructureError(
            f"the test framework does not start: {last[0][:200]} (is it in python_path?)"
        )
    events = [CaseResult(e["id"], e["outcome"], e["detail"]) for e in reports[0]["events"]]
    problems = check(plan, decoys, events, reports[0]["end"])
    if oom:
        problems.append(CaseResult("", "resources", "a process of the candidate was ended for its memory"))
    problems += [CaseResult("", "resources", f"{path} is full") for path in reports[0]["full"]]
    shown = (*(e for e in events if not _is_decoy(e, plan, decoys)), *problems)
    wrong = [test for test in shown if test.outcome != "pass"]
    if not wrong:
        return Ran(Verdict.PASS, "", shown, output)
    first = f"{wrong[0].id}: {wrong[0].outcome} {wrong[0].detail}".strip(": ")
    return Ran(Verdict.FAIL, f"{len(wrong)} of {len(shown)} not passed, first {first}"[:500], shown, output)


def check(plan: Plan, decoys: Decoys | None, events: list[CaseResult], end: str) -> list[CaseResult]:
    """Returns what is wrong with a report beyond outcomes: its end, its ids and their number, its decoys."""
    ends = _decoy_ends(plan, decoys)
    counts = Counter(event.id for event in events)
    early = "the candidate's process ended before its tests"
    problems = [] if end == "end" else [CaseResult("", end, early)]
    for name in (*plan.tests.ids, *ends):
        if counts[name] != 1:
            what = "duplicate" if counts[name] else "missing"
            decoy = name in ends and end == "end"
            problems.append(CaseResult("a decoy", "decoy", what) if decoy else CaseResult(name, what))
    problems += [CaseResult(name, "unknown") for name in counts if name not in {*plan.tests.ids, *ends}]
    for event in events:
        if ends.get(event.id, event.outcome) != event.outcome:
            should = f"it should {ends[event.id]}, and is {event.outcome}"
            problems.append(CaseResult("a decoy", "decoy", should))
    return problems


def _decoy_ends(plan: Plan, decoys: Decoys | None) -> Mapping[str, str]:
    if decoys is None or not isinstance(plan.tests, SuiteTests):
        return {}
    return decoys.expected[plan.tests.framework]


def _is_decoy(event: CaseResult, plan: Plan, decoys: Decoys | None) -> bool:
    return event.id in _decoy_ends(plan, decoys)


def _job(plan: Plan, decoys: Decoys | None) -> dict[str, Any]:
    tests = plan.tests
    load: dict[str, Any] = {"libraries": plan.python_path, "root": plan.root}
    job: dict[str, Any] = {"start_s": plan.start_s, "timeout_s": plan.timeout_s}
    if isinstance(tests, FunctionTests):
        load["module"] = f"{plan.root}/{tests.module}"
        calls = {
            "cases": [asdict(case) for case in tests.cases],
            "checker": tests.checker,
            "checks": tests.checks,
        }
        return {**job, "kind": "functions", "load": load, "case_timeout_s": tests.case_timeout_s, **calls}
    assert decoys is not None
    load |= {"framework": tests.framework, "files": [*tests.files, decoys.path]}
    return {**job, "kind": "suite", "load": load, "case_timeout_s": plan.timeout_s}


def _files(plan: Plan, files: Mapping[str, bytes], folder: str) -> dict[str, bytes]:
    """Returns the candidate's files and our programs, by absolute path."""
    programs = {f"{folder}/inside/{path.name}": path.read_bytes() for path in sorted(INSIDE.glob("*.py"))}
    return {f"{plan.root}/{path}": data for path, data in files.items()} | programs
