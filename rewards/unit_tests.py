"""The reward for code: hidden tests on the function that the policy wrote, in a fresh sandbox.

A task says how it is tested in `private["tests"]`, in plain values, so that tasks can be written down:

    Task.ask("add/1", "Write add(a, b).", gold="def add(a, b): return a + b", tests={
        "cases": [{"id": "small", "function": "add", "args": [1, 2], "expected": 3}],
        "visible": [...], "checker": "def test_random(call, draw): ...", "checks": ["test_random"],
    })

These are the fields of `sandbox.verify.FunctionTests` and `Case`. The policy answers with code, in the last
block of its message that is fenced as such or, without one, with all of it. What it did in a sandbox of its
own is judged by `sandbox.verify.verify` and `score`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from envs.killable import VerifierError
from envs.types import Boundary, Missing, Score, Task, Trajectory
from sandbox.client import Fleet
from sandbox.types import Verdict
from sandbox.verify import Case, Exercise, FunctionTests, Plan, Report, gate, verify_files

MODULE = "solution.py"
_BLOCK = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_fleets: list[tuple[Fleet, int]] = []


def judge_in(fleet: Fleet) -> None:
    """Has this process's code judged in a fleet, instead of on the node of this machine."""
    _fleets[:] = [(fleet, os.getpid())]


@dataclass(frozen=True, slots=True)
class UnitTests:
    """1 when all hidden tests pass, 0 when not, no score when the infrastructure failed.

    Parts of the score: `passed`, the share of tests that passed, and `flags`, the number of traces of
    cheating; neither counts. Without `judge_in` it uses the node of this user and machine, which it starts.
    """

    backend: str = "auto"
    tests_s: float = 30.0
    timeout_s: float = 120.0

    async def __call__(self, task: Task, trajectory: Trajectory) -> Score | Missing:
        """Judges one trajectory.

        Raises:
            VerifierError: The task does not say how it is tested, or in a wrong way.
            SandboxError: The fleet does not offer what this needs.
        """
        plan = plan_of(task, self.tests_s)
        code = code_of(trajectory.answer)
        if not code.strip():
            return Score(0.0, {"passed": 0.0, "flags": 0.0})
        files = {MODULE: code.encode(errors="replace")}
        if _fleets and _fleets[0][1] == os.getpid():
            return score(await verify_files(_fleets[0][0], files, plan))
        owner = f"unit-tests-{secrets.token_hex(8)}"
        async with await Fleet.connect(
            "local", state_dir=_node_folder(), owner=owner, backend=self.backend
        ) as fleet:
            return score(await verify_files(fleet, files, plan))


def score(report: Report) -> Score | Missing:
    """Returns the score of a verification: none for a failure of the infrastructure."""
    if report.verdict is Verdict.INFRASTRUCTURE:
        return Missing(f"no verdict: {report.reason}", Boundary.SANDBOX)
    passed = sum(test.outcome == "pass" for test in report.tests)
    parts = {"passed": passed / max(len(report.tests), 1), "flags": float(len(report.flags))}
    return Score(float(report.verdict is Verdict.PASS), parts)


async def failed_tries(fleet: Fleet, task: Task) -> list[str]:
    """Returns a line for each try of `sandbox.verify.gate` that went wrong on a task.

    Raises:
        VerifierError: The task does not say how it is tested, or in a wrong way.
    """
    gold = {MODULE: code_of(task.gold or "").encode()}
    report = await gate(fleet, Exercise(plan_of(task), gold))
    return [f"FAIL {task.id}, {name}: {why}" for name, why in report.wrong.items()]


def code_of(answer: str) -> str:
    """Returns the code of an answer: its last fenced block, else all of it."""
    blocks = _BLOCK.findall(answer if answer.endswith("\n") else f"{answer}\n")
    return blocks[-1] if blocks else answer


def plan_of(task: Task, tests_s: float = 30.0) -> Plan:
    """Returns how a task is tested.

    Raises:
        VerifierError: It does not say so, or in a wrong way.
    """
    told = task.private.get("tests")
    if not isinstance(told, Mapping):
        raise VerifierError(f"task {task.id!r} has no tests; set private['tests'] (see rewards.unit_tests)")
    fields = dict(cast("Mapping[str, Any]", told))
    try:
        for name in ("cases", "visible"):
            fields[name] = tuple(Case(**_case(case)) for case in fields.get(name, ()))
        fields["checks"] = tuple(fields.get("checks", ()))
        tests = FunctionTests(module=MODULE, **fields)
        return Plan(tests=tests, allow=(MODULE,), timeout_s=tests_s)
    except (TypeError, ValueError) as error:
        raise VerifierError(f"the tests of task {task.id!r} cannot be used: {error}") from error


def _case(told: Mapping[str, Any]) -> dict[str, Any]:
    return {**told, "args": tuple(told.get("args", ()))}


def _node_folder() -> Path:
    """Returns where a run has its node too: `$TEMPERING_HOME/node`, else in the home folder."""
    return Path(os.environ.get("TEMPERING_HOME") or "~/.tempering").expanduser() / "node"
