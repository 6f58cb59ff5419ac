import itertools
from collections import Counter

import pytest

import rewards
from envs import ToolError, load
from envs.calc import factors
from envs.play import play, say, script
from envs.types import Message, Role, StopReason, ToolCall
from sandbox.errors import InfrastructureError
from sandbox.types import ExecResult


async def evaluate(box, expression):
    env = load("calc")
    task = next(env.tasks("train", 0))
    return await env.call_tool(ToolCall("python", {"expression": expression}), task, box)


def test_held_out_tasks_are_disjoint_from_training_up_to_the_order_of_the_factors():
    train = {frozenset(pair) for pair in factors("train")}
    held_out = {frozenset(pair) for pair in factors("eval")}
    assert not train & held_out
    assert len(train | held_out) == 89 * 90 // 2
    assert len(held_out) / len(train | held_out) == pytest.approx(1 / 20, rel=0.01)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_order_of_tasks_is_fixed_by_the_seed_and_covers_the_split(split):
    env = load("calc")
    first, again, other = (list(env.tasks(split, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other and {task.id for task in first} == {task.id for task in other}
    assert len(first) == len(factors(split))


def test_a_task_shows_the_factors_and_keeps_the_product_private():
    for task in load("calc").tasks("eval", 0):
        question = task.prompt[0].content
        a, b = map(int, question.removesuffix("=").split("*"))
        assert task.gold == str(a * b) and task.gold not in question


async def test_the_tool_evaluates_what_the_policy_wrote(box):
    assert await evaluate(box, "47*86") == "4042"
    assert await evaluate(box, "47*86-2000*3") == "-1958"


@pytest.mark.parametrize(
    "expression", ["47*", "1/0", "exit(0)", "", "print(5)", "'x", "__import__('os')", "é"]
)
async def test_a_faulty_expression_is_a_short_observation(box, expression):
    with pytest.raises(ToolError, match=r"^err$"):
        await evaluate(box, expression)


async def test_an_endless_expression_ends_at_its_limit(box):
    with pytest.raises(ToolError, match=r"^err$"):
        await evaluate(box, "9**9**9**9")


async def test_an_expression_is_data_and_never_source(box):
    with pytest.raises(ToolError):
        await evaluate(box, '1\nimport sys\nsys.stdout.write("7")')


async def test_a_long_result_is_cut_to_what_the_policy_can_read(box):
    assert await evaluate(box, "10**30") == "100000"


async def test_an_unknown_ending_of_the_process_is_no_observation():
    class Lost:
        async def python(self, source, **options):
            return ExecResult(None, b"4042", b"")

    env = load("calc")
    with pytest.raises(InfrastructureError, match="sandbox"):
        await env.call_tool(ToolCall("python", {"expression": "1"}), next(env.tasks("train", 0)), Lost())


async def test_an_episode_in_a_sandbox_is_scored_by_its_answer(box):
    env = load("calc")
    task = next(env.tasks("eval", 0))
    expression = task.prompt[0].content.removesuffix("=")
    call = Message("assistant", tool_calls=(ToolCall("python", {"expression": expression}),))
    for answer, value in ((task.gold, 1.0), ("700", 0.0)):
        judge = rewards.load(env.reward_name)
        played = await play(env, task, script(call, say(answer)), judge=judge, sandbox=box)
        assert played.turns[0].observations[0].content == task.gold
        assert played.stop is StopReason.ANSWER and played.score.value == value


def test_demonstrations_imitate_a_mediocre_user_of_the_tool():
    episodes = list(itertools.islice(load("calc").demonstrations("train", 3), 4000))
    kinds = Counter[str]()
    for task, messages in episodes:
        a, b = map(int, task.prompt[0].content.removesuffix("=").split("*"))
        if len(messages) == 1:
            kinds["guess"] += 1
            assert messages[0].content[1:] == "00" and messages[0].content[0] in "123456789"
            continue
        call, observation, answer = messages
        expression = call.tool_calls[0].arguments["expression"]
        x, y = map(int, expression.split("*"))
        assert observation.role == Role.TOOL and observation.content == str(x * y)
        assert (x, y // 10) == (a, b // 10)
        kinds["mistyped"] += (x, y) != (a, b)
        assert answer.content in (observation.content, observation.content[:-1])
        kinds["dropped"] += answer.content != observation.content
    used = len(episodes) - kinds["guess"]
    assert kinds["guess"] / len(episodes) == pytest.approx(0.6, abs=0.03)
    assert kinds["mistyped"] / used == pytest.approx(0.3 * 0.9, abs=0.04)
    assert kinds["dropped"] / used == pytest.approx(0.2, abs=0.04)


def test_demonstrations_show_tasks_of_their_split_only():
    for split in ("train", "eval"):
        ids = {task.id for task in load("calc").tasks(split, 0)}
        shown = itertools.islice(load("calc").demonstrations(split, 0), 500)
        assert all(task.id in ids for task, _ in shown)
