import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import envs
import rewards
from envs.check import answered as answered_by
from envs.check import check_environment
from envs.killable import VerifierError
from envs.types import Boundary, Missing, Score, Task
from rewards.unit_tests import code_of, failed_tries, judge_in, plan_of, score
from sandbox.client import Fleet
from sandbox.node import SOCKET
from sandbox.types import Verdict
from sandbox.verify import CaseResult, Flag, Report

TESTS = {
    "cases": [{"id": "small", "function": "add", "args": [1, 2], "expected": 3}],
    "checker": "def test_random(call, draw):\n    a = draw.random()\n    assert call('add', a, 1) == a + 1\n",
    "checks": ["test_random"],
}
TASK = Task.ask("add", "write add(a, b)", gold="def add(a, b): return a + b", tests=TESTS)


@pytest.fixture(scope="module")
def home():
    """A home with a node that serves the file's tests; its path is short, for the socket's sake."""
    with tempfile.TemporaryDirectory(prefix="tmpr") as folder:
        node = Path(folder) / "node"
        with subprocess.Popen([sys.executable, "-m", "sandbox.node", str(node)]) as process:
            while not (node / SOCKET).exists() and process.poll() is None:
                time.sleep(0.02)
            yield folder
            process.terminate()


def test_a_verdict_becomes_a_score_or_none():
    tests = (CaseResult("a", "pass"), CaseResult("b", "fail"))
    failed = Report(Verdict.FAIL, "b", tests, flags=(Flag("exit", "x"),))
    assert score(failed) == Score(0.0, {"passed": 0.5, "flags": 1.0})
    assert score(Report(Verdict.PASS, tests=tests[:1])) == Score(1.0, {"passed": 1.0, "flags": 0.0})
    assert score(Report(Verdict.INFRASTRUCTURE, "no room")) == Missing(
        "no verdict: no room", Boundary.SANDBOX
    )


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```\nno, better:\n```py\nx = 2\n```\ndone", "x = 2\n"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("", ""),
    ],
)
def test_the_code_of_an_answer(answer, code):
    assert code_of(answer) == code


def test_tests_are_plain_values():
    plan = plan_of(Task.ask("a", "?", tests=json.loads(json.dumps(TESTS))))
    assert plan.tests.ids == ("small", "test_random")
    assert plan.tests.cases[0].args == (1, 2)


@pytest.mark.parametrize(
    "tests", [None, {}, {"cases": [{"id": "a"}]}, {"cases": TESTS["cases"], "no_such": 1}, {"checks": ["a"]}]
)
def test_a_task_without_good_tests_is_an_error_of_the_verifier(tests):
    with pytest.raises(VerifierError, match="task 'a'"):
        plan_of(Task.ask("a", "?", tests=tests))


async def test_answers_are_judged_in_a_sandbox(home, monkeypatch):
    monkeypatch.setenv("TEMPERING_HOME", home)
    judge = rewards.load("unit_tests", backend="bubblewrap")
    right, wrong, nothing = await asyncio.gather(
        *(judge(TASK, answered_by(TASK, text)) for text in (TASK.gold, "def add(a, b): return 3", " "))
    )
    assert (right.value, right.parts["unit_tests.passed"]) == (1.0, 1.0)
    assert (wrong.value, wrong.parts["unit_tests.passed"]) == (0.0, 0.5)
    assert nothing.value == 0.0


async def test_a_fleet_can_be_given_and_its_lack_is_no_zero(home, monkeypatch):
    monkeypatch.setattr("rewards.unit_tests._fleets", [])
    async with await Fleet.connect(
        state_dir=Path(home) / "node", owner="judge", backend="bubblewrap"
    ) as fleet:
        judge_in(fleet)
        judge = rewards.load("unit_tests")
        assert (await judge(TASK, answered_by(TASK, TASK.gold))).value == 1.0
    verdict = await judge(TASK, answered_by(TASK, TASK.gold))
    assert isinstance(verdict, Missing)


@pytest.mark.slow
async def test_a_task_that_can_be_passed_without_work_is_named(home):
    async with await Fleet.connect(
        state_dir=Path(home) / "node", owner="gate", backend="bubblewrap"
    ) as fleet:
        assert await failed_tries(fleet, TASK) == []
        nothing = {"cases": [{"id": "none", "function": "add", "args": [1, 2], "expected": None}]}
        weak = Task.ask("weak", "?", gold="def add(a, b): return None", tests=nothing)
        lines = await failed_tries(fleet, weak)
        assert [line.split(":")[0] for line in lines] == ["FAIL weak, cheat framework"]


@pytest.mark.slow
async def test_the_example_is_sound(home, monkeypatch):
    monkeypatch.setenv("TEMPERING_HOME", home)
    env = envs.load(str(Path(__file__).parents[2] / "examples/code.py"))
    report = await check_environment(env, 2, judge=rewards.load("unit_tests", backend="bubblewrap"))
    assert report.passed, str(report)
