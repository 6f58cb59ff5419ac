import asyncio
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import rewards
from envs import killable
from envs.plugins import BrokenPluginError, UnknownNameError, UnknownOptionError
from envs.scoring import Part, judge
from envs.types import Boundary, FinishReason, Message, Missing, Score, ToolCall
from rewards import PartConfig, compose, load
from sandbox.errors import LostError


@pytest.fixture(scope="module")
def verifiers():
    path = Path(__file__).with_name("verifiers.py")
    spec = importlib.util.spec_from_file_location("verifiers", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["verifiers"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["verifiers"]


async def one(function, task, trajectory, **options):
    return await judge([Part("part", function, **{"retries": 0, **options})], task, trajectory)


async def test_parts_are_summed_by_weight_and_named(verifiers, task, answered):
    parts = [
        Part("tests", verifiers.right, 0.5),
        Part("style", verifiers.noisy, 0.5),
        Part("log", verifiers.noisy, 0),
    ]
    score = await judge(parts, task, answered("42"))
    assert score == Score(0.75, {"tests": 1.0, "style": 0.5, "log": 0.5})


async def test_a_part_that_fails_makes_the_whole_missing(verifiers, task, answered):
    parts = [Part("tests", verifiers.right, 0.5), Part("judge", verifiers.broken, 0.5)]
    verdict = await judge(parts, task, answered("42"))
    assert isinstance(verdict, Missing) and verdict.boundary is Boundary.REWARD
    assert verdict.reason == "judge: VerifierError: KeyError: 'answer'"


async def test_a_part_that_fails_once_is_tried_again(task, answered):
    calls = []

    async def flaky(task, trajectory):
        calls.append(1)
        if len(calls) < 2:
            raise ConnectionError("busy")
        return 0.25

    assert await one(flaky, task, answered("42"), retries=1) == Score(0.25, {"part": 0.25})
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("not_a_number", "not finite"),
        ("nothing", "NoneType"),
        ("dying", "exit code 3"),
        ("greedy", "MemoryError"),
    ],
)
async def test_a_verifier_without_a_number_gives_no_verdict(verifiers, task, answered, name, reason):
    verdict = await one(getattr(verifiers, name), task, answered("42"))
    assert isinstance(verdict, Missing) and reason in verdict.reason
    assert await one(verifiers.right, task, answered("42")) == Score(1.0, {"part": 1.0})


@pytest.mark.parametrize("name", ["endless", "tower", "sleepy"])
async def test_a_verifier_that_never_returns_is_killed_at_its_limit(verifiers, task, answered, name):
    pid = (await one(verifiers.process_id, task, answered(""))).value
    begin = time.monotonic()
    verdict = await one(getattr(verifiers, name), task, answered("42"), timeout_s=0.3)
    assert verdict == Missing("part: timeout after 0.3 s") and time.monotonic() - begin < 3
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


async def test_one_verifier_that_never_returns_does_not_hold_up_its_group(verifiers, task, answered):
    group = [answered("42")] * 7 + [answered("41")]
    part = Part("part", verifiers.endless_if_wrong, timeout_s=2.0, retries=0)
    verdicts = await asyncio.gather(*(judge([part], task, trajectory) for trajectory in group))
    assert verdicts[:7] == [Score(1.0, {"part": 1.0})] * 7
    assert isinstance(verdicts[7], Missing) and "timeout" in verdicts[7].reason


async def test_a_coroutine_that_never_returns_is_ended_at_its_limit(task, answered):
    async def waiting(task, trajectory):
        await asyncio.sleep(60)
        return 1.0

    assert await one(waiting, task, answered("42"), timeout_s=0.05) == Missing("part: timeout after 0.05 s")


async def test_a_function_that_no_other_process_can_import_is_bounded_too(task, answered):
    assert await one(lambda task, trajectory: 0.5, task, answered("42")) == Score(0.5, {"part": 0.5})
    verdict = await one(lambda task, trajectory: time.sleep(0.5) or 1.0, task, answered("42"), timeout_s=0.05)
    assert verdict == Missing("part: timeout after 0.05 s")
    failed = await one(lambda task, trajectory: 1 / 0, task, answered("42"))
    assert isinstance(failed, Missing) and "ZeroDivisionError" in failed.reason
    await asyncio.sleep(0.6)


async def test_a_sandbox_at_fault_is_named_as_the_boundary(task, answered):
    async def lost(task, trajectory):
        raise LostError("the node is gone")

    verdict = await one(lost, task, answered("42"))
    assert verdict == Missing("part: LostError: the node is gone", Boundary.SANDBOX)


def test_environments_and_rewards_need_nothing_but_the_standard_library():
    heavy = [
        "numpy",
        "torch",
        "ray",
        "triton",
        "pydantic",
        "aiohttp",
        "docker",
        "sympy",
        "reasoning_gym",
        "rl",
        "model",
    ]
    source = (
        "import sys, envs, rewards, envs.check, envs.template, rewards.length\n"
        "[envs.load(name) for name in ('calc', 'recall', 'sort', 'probe')]; rewards.load('math')\n"
        f"found = [name for name in {heavy} if name in sys.modules]; assert not found, found\n"
    )
    environment = {"PYTHONPATH": str(Path(killable.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", source], env=environment, check=True)


async def test_cancelling_is_not_taken_for_a_failed_part(task, answered):
    async def waiting(task, trajectory):
        await asyncio.sleep(60)

    running = asyncio.create_task(one(waiting, task, answered("42")))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_helper_process_stays_for_the_next_call(verifiers, task, answered):
    first, second = [await one(verifiers.process_id, task, answered("")) for _ in range(2)]
    assert first == second and first.value != os.getpid()


def test_a_busy_helper_ends_by_itself_when_its_parent_was_killed(tmp_path):
    source = (
        "import os\n\ndef hang(path):\n    open(path, 'w').write(str(os.getpid()))\n    while True: pass\n"
    )
    (tmp_path / "hang.py").write_text(source)
    parent = (
        "import sys\nfrom envs.killable import Reference, call_blocking\n"
        f"call_blocking(Reference('hang', {str(tmp_path / 'hang.py')!r}, 'hang'), [sys.argv[1]], 0.5)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(killable.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", parent, str(tmp_path / "pid")], env=environment)
    pid_file = tmp_path / "pid"
    while not (pid_file.exists() and pid_file.read_text()):
        time.sleep(0.005)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid_file.read_text()}/cmdline").exists() and time.monotonic() < deadline:
        if "Z" in Path(f"/proc/{pid_file.read_text()}/stat").read_text().split(")")[1]:
            break
        time.sleep(0.05)
    assert time.monotonic() < deadline


def test_parts_that_make_no_sense_are_refused():
    for options in ({"weight": float("nan")}, {"timeout_s": 0.0}, {"retries": -1}):
        with pytest.raises(ValueError, match="reward part 'x'"):
            Part("x", lambda task, trajectory: 0.0, **options)


async def test_rewards_compose_by_name(task, answered):
    reward = compose(
        "both", {"form": PartConfig(reward="normalized", weight=0.25), "value": PartConfig(reward="numeric")}
    )
    assert await reward(task, answered("42.0")) == Score(1.0, {"form": 0.0, "value": 1.0})
    with pytest.raises(ValueError, match="a weight other than 0"):
        compose("none", {"form": PartConfig(reward="exact", weight=0.0)})


async def test_a_reward_is_found_by_import_path(task, answered):
    assert await load("rewards.answers:exact")(task, answered("42")) == Score(
        1.0, {"rewards.answers:exact": 1.0}
    )


def test_unknown_and_broken_rewards_say_what_there_is():
    assert {"exact", "normalized", "numeric", "math"} <= set(rewards.list_rewards())
    with pytest.raises(UnknownNameError, match=r"Did you mean 'exact'.*tempering\.rewards"):
        load("exakt")
    with pytest.raises(UnknownOptionError, match="Did you mean 'relative'"):
        load("numeric", relativ=0.1)
    with pytest.raises(UnknownOptionError, match="Its options: none"):
        load("exact", relative=0.1)
    with pytest.raises(BrokenPluginError, match="no_such_package"):
        load("no_such_package:reward")


@pytest.mark.parametrize("name", ["exact", "normalized", "numeric", "math"])
async def test_a_task_without_reference_gives_no_verdict(name, task, answered):
    for blank in (None, "", "  "):
        verdict = await load(name)(replace(task, gold=blank), answered(""))
        assert isinstance(verdict, Missing) and "no reference answer" in verdict.reason


@pytest.mark.parametrize(
    ("name", "gold", "answer", "value"),
    [
        ("exact", "42", " 42\n", 1.0),
        ("exact", "42", "042", 0.0),
        ("normalized", "New York", "new  york.", 1.0),
        ("normalized", "New York", "York", 0.0),
        ("numeric", "1000", "1,000", 1.0),
        ("numeric", "0.5", "1/2", 1.0),
        ("numeric", "1e3", "1000.0", 1.0),
        ("numeric", "0.1", "0.1000000000000000055", 0.0),
        ("numeric", "1", "one", 0.0),
        ("numeric", "1", "1/0", 0.0),
        ("numeric", "1", "nan", 0.0),
        ("numeric", "-3", "−3", 1.0),
    ],
)
async def test_answers_are_compared_by_the_rule_of_the_reward(name, gold, answer, value, task, answered):
    assert (await load(name)(replace(task, gold=gold), answered(answer))).value == value


async def test_numeric_answers_may_be_given_a_tolerance(task, answered):
    for options, answer, value in (
        ({"relative": 0.1}, "46", 1.0),
        ({"relative": 0.1}, "47", 0.0),
        ({"absolute": 2.0}, "40", 1.0),
    ):
        assert (await load("numeric", **options)(task, answered(answer))).value == value
    with pytest.raises(ValueError, match="tolerances"):
        load("numeric", relative=-1.0)
    verdict = await load("numeric")(replace(task, gold="many"), answered("42"))
    assert isinstance(verdict, Missing) and "no number" in verdict.reason


async def test_private_answers_come_before_gold(task, answered):
    task = replace(task, private={"answer": "forty-two"})
    assert (await load("exact")(task, answered("forty-two"))).value == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"finish": FinishReason.LENGTH},
        {"parse_error": "answer not closed"},
        {"message": Message("assistant", "42", tool_calls=(ToolCall("f", {}),))},
    ],
)
async def test_a_turn_that_was_cut_or_calls_a_tool_is_no_answer(change, task, answered):
    trajectory = answered("42")
    cut = replace(trajectory, branches=((replace(trajectory.turns[0], **change),),))
    assert cut.answer == "" and (await load("exact")(task, cut)).value == 0.0
    assert replace(trajectory, branches=()).answer == ""
