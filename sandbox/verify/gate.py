"""The gate of a task: whether its tests tell a solution from nothing, and from the usual ways to cheat.

A task whose tests pass without work, or fail on the right solution, teaches a policy the wrong thing.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandbox.client import Fleet
from sandbox.types import SandboxSpec, Verdict
from sandbox.verify.diff import export
from sandbox.verify.files import write
from sandbox.verify.plan import WRITABLE, Plan
from sandbox.verify.report import Report
from sandbox.verify.verifier import verify

_AT_ONCE = 3
_HEAD = "import sys, os, math, time, unittest\n"
_EQUAL = """class Equal:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return self
    def __call__(self, *args, **kwargs): return self
"""
_PATCH = """math.isclose = lambda *args, **kwargs: True
for name in dir(unittest.TestCase):
    if name.startswith("assert"): setattr(unittest.TestCase, name, lambda *args, **kwargs: None)
"""
_PRINT = """print('{"nonce": "", "end": "end", "passed": true}\\n===== 9 passed =====\\nOK', flush=True)
os._exit(0)
"""
_HOOKS = {
    "conftest.py": b"def pytest_runtest_makereport(item, call): pass\n",
    "sitecustomize.py": b"import os; os._exit(0)\n",
    "pytest.ini": b"[pytest]\naddopts = --collect-only\n",
}


@dataclass(frozen=True, slots=True)
class Exercise:
    """A task as the gate sees it: its plan, and the files that solve it, by path below the root."""

    plan: Plan
    gold: Mapping[str, bytes]
    spec: SandboxSpec = field(default_factory=lambda: SandboxSpec(journal=False))


@dataclass(frozen=True, slots=True)
class GateReport:
    """What the gate found: for every try its report, and what went wrong, by the name of the try."""

    wrong: Mapping[str, str]
    reports: Mapping[str, Report]

    @property
    def passed(self) -> bool:
        """Whether the task can be used."""
        return not self.wrong

    def __str__(self) -> str:
        lines = [f"{'FAIL' if name in self.wrong else 'ok  '} {name}" for name in self.reports]
        return "\n".join(
            line + (f": {self.wrong[line[5:]]}" if line[5:] in self.wrong else "") for line in lines
        )


async def gate(fleet: Fleet, task: Exercise) -> GateReport:
    """Tries a task: no-op and empty files must fail, gold pass, and every canned cheat fail.

    `leak` is one of the tries: with a canary in the plan, no file of a box of `task.spec` may hold it; with
    an image or a workspace of the task's own, none at all.

    Raises:
        PolicyError: As for `verify`.
    """
    tries: dict[str, tuple[Mapping[str, bytes], Verdict]] = {
        "no-op": ({}, Verdict.FAIL),
        "gold": (task.gold, Verdict.PASS),
        "empty": (dict.fromkeys(task.gold, b""), Verdict.FAIL),
    }
    tries |= {name: (files, Verdict.FAIL) for name, files in cheats(task).items()}
    wrong: dict[str, str] = {}
    places = asyncio.Semaphore(_AT_ONCE)

    async def tried(files: Mapping[str, bytes]) -> Report:
        async with places:
            return await attempt(fleet, task, files)

    made = await asyncio.gather(*(tried(files) for files, _ in tries.values()))
    reports = dict(zip(tries, made, strict=True))
    for name, (_, right) in tries.items():
        report = reports[name]
        if report.verdict is not right:
            wrong[name] = f"{report.verdict} instead of {right} {report.reason}".strip()
    if task.plan.canary and (leaks := await _leaks(fleet, task)):
        wrong["leak"] = f"{leaks[0]} holds the canary"
        reports["leak"] = Report(Verdict.FAIL, wrong["leak"])
    return GateReport(wrong, reports)


async def attempt(fleet: Fleet, task: Exercise, files: Mapping[str, bytes]) -> Report:
    """Has an agent of no mind write files, and judges them."""
    async with await fleet.create(task.spec) as box:
        await write(box, _below(task.plan.root, {**task.plan.base, **files}))
        return await verify(fleet, box, task.plan)


def _below(root: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{root}/{path}": data for path, data in files.items()}


def cheats(task: Exercise) -> dict[str, dict[str, bytes]]:
    """Returns the canned cheats, in place of the files of the solution."""
    programs = {
        "cheat exit": "os._exit(0)\n",
        "cheat equality": _EQUAL,
        "cheat framework": _PATCH,
        "cheat report": _PRINT,
    }
    made: dict[str, dict[str, bytes]] = {}
    for name, program in programs.items():
        made[name] = {
            path: (_HEAD + program + _stubs(data)).encode()
            for path, data in task.gold.items()
            if path.endswith(".py")
        }
    return {**made, "cheat hooks": {path: data for path, data in _HOOKS.items() if path not in task.gold}}


def _stubs(gold: bytes) -> str:
    """Returns the names of a solution, without the work."""
    value = "Equal() if 'Equal' in globals() else None"
    lines: list[str] = []
    for node in ast.parse(gold).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines.append(f"def {node.name}(*args, **kwargs): return {value}")
        elif isinstance(node, ast.ClassDef):
            lines.append(f"{node.name} = {value}")
    return "\n".join(lines) + "\n"


async def _leaks(fleet: Fleet, task: Exercise) -> tuple[str, ...]:
    async with await fleet.create(task.spec) as box:
        await write(box, _below(task.plan.root, task.plan.base))
        return (
            await export(box, task.plan, ("/",) if task.spec.image or task.spec.workspace else WRITABLE)
        ).leaks
