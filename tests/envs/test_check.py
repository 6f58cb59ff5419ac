from dataclasses import replace

import pytest

import envs
import rewards
from envs.check import check_environment
from envs.registry import ENVIRONMENTS
from envs.types import Message, ToolCall


@pytest.fixture(autouse=True)
def _forget():
    known = dict(ENVIRONMENTS.registered)
    yield
    ENVIRONMENTS.registered.clear()
    ENVIRONMENTS.registered.update(known)


def task(i, **changes):
    return replace(envs.Task.ask(f"t{i}", f"{i}+1=", gold=str(i + 1)), **changes)


def define(tasks=lambda split, seed: map(task, range(10)), reward=None, demonstrations=None):
    """Makes an environment of one split with one property of a faulty kind."""

    async def exact(task, trajectory):
        return float(trajectory.answer == task.gold)

    @envs.env("test/faulty", splits=("train",))
    def faulty(split, seed):
        yield from tasks(split, seed)

    faulty.reward(reward or exact)
    if demonstrations:
        faulty.demonstrations(demonstrations)
    return faulty()


async def failures(env, **options):
    report = await check_environment(env, 5, **options)
    assert report.passed == (not [c for c in report.checks if not c.passed])
    return {
        check.name: check.detail for check in report.checks if not check.passed and check.name != "picklable"
    }


@pytest.mark.parametrize("name", ["calc", "recall", "sort", "probe"])
async def test_the_builtin_environments_are_sound(name):
    env = envs.load(name)
    report = await check_environment(env, 20, judge=rewards.load(env.reward_name))
    assert report.passed and report.tasks == 40, str(report)
    assert str(report).endswith("checks on 40 tasks")


async def test_a_sound_environment_has_no_failures():
    assert await failures(define()) == {}


async def test_an_environment_that_cannot_go_to_another_process_is_found():
    report = await check_environment(define(), 3)
    assert [c.name for c in report.checks if not c.passed] == ["picklable"]
    assert "FAIL picklable: the environment cannot be sent" in str(report)


async def test_a_missing_judge_is_named():
    assert "rewards.load" in (await failures(envs.load("calc")))["verifier"]


async def test_a_verifier_that_refuses_gold_or_takes_anything_is_found():
    async def never(task, trajectory):
        return 0.0

    async def always(task, trajectory):
        return 1.0

    assert "scores 0 for '1', not 1" in (await failures(define(reward=never)))["gold scores full marks"]
    assert "scores 1 for ''" in (await failures(define(reward=always)))["garbage scores nothing"]


async def test_a_verifier_that_fails_or_wavers_is_found():
    async def broken(task, trajectory):
        raise KeyError("answer")

    state = []

    async def wavering(task, trajectory):
        state.append(1)
        return float(len(state) % 2)

    assert "no verdict" in (await failures(define(reward=broken)))["gold scores full marks"]
    assert "then" in (await failures(define(reward=wavering)))["verifier is deterministic"]


async def test_tasks_without_gold_are_found():
    env = define(lambda split, seed: (task(i, gold=" ") for i in range(3)))
    assert "t0 has no gold answer" in (await failures(env))["gold"]


async def test_a_gold_answer_that_the_verifier_cannot_read_is_found():
    env = define(lambda split, seed: (task(i, gold="see solution") for i in range(3)))
    found = await failures(env, judge=rewards.load("math"))
    assert "no verdict on 'see solution'" in found["gold scores full marks"]


async def test_tasks_that_fail_are_reported_with_their_error():
    def broken(split, seed):
        yield 1 / 0

    assert (await failures(define(broken)))["tasks"] == "ZeroDivisionError: division by zero"
    assert "no task" in (await failures(define(lambda split, seed: iter(()))))["tasks"]


async def test_tasks_that_change_from_call_to_call_are_found():
    count = iter(range(100))
    env = define(lambda split, seed: (task(next(count)) for _ in range(3)))
    assert "random.Random(seed)" in (await failures(env))["determinism"]


async def test_two_tasks_with_one_id_are_found():
    env = define(lambda split, seed: (task(i, id="same") for i in range(3)))
    assert "two different tasks" in (await failures(env))["ids"]


async def test_a_task_in_two_splits_is_found():
    @envs.env("test/overlap", splits=("train", "eval"), reward="exact")
    def overlap(split, seed):
        yield task(1)

    found = await failures(overlap(), judge=rewards.load("exact"))
    assert found == {"splits": "task 't1' is in 'train' and in 'eval'"}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "end with a turn"),
        ([Message("tool", "4")], "end with a turn"),
        ([Message("assistant", "1")] * 2, "max_turns = 1"),
        ([Message("assistant", tool_calls=(ToolCall("f", {}),))], "unknown tool 'f'"),
    ],
)
async def test_demonstrations_that_no_policy_could_give_are_found(messages, problem):
    env = define(demonstrations=lambda split, seed: iter([(task(1), messages)]))
    assert problem in (await failures(env))["demonstrations"]


async def test_a_check_of_no_task_is_refused():
    with pytest.raises(ValueError, match="at least one task"):
        await check_environment(define(), 0)
