import itertools
import sys
from collections import Counter

import pytest

from envs import ToolError, load
from envs.calc import factors
from envs.types import Role, ToolCall
from sandbox.types import ExecResult


class LocalPython:
    """Runs the tool's source in a plain subprocess: what a sandbox does, without its walls."""

    id = "local"

    async def python(self, source, *, stdin=b"", timeout_s=10.0, output_limit=1 << 16):
        import asyncio

        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", source, stdin=-1, stdout=-1, stderr=-1, close_fds=True
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), timeout_s)
        except TimeoutError:
            process.kill()
            await process.communicate()
            return ExecResult(None, b"", b"", timed_out=True)
        return ExecResult(process.returncode, out[:output_limit], err)


async def evaluate(expression):
    env = load("calc")
    task = next(env.tasks("train", 0))
    return await env.call_tool(ToolCall("python", {"expression": expression}), task, LocalPython())


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


async def test_the_tool_evaluates_what_the_policy_wrote():
    assert await evaluate("47*86") == "4042"
    assert await evaluate("47*86-2000*3") == "-1958"


@pytest.mark.parametrize(
    "expression", ["47*", "1/0", "exit(0)", "", "print(5)", "'x", "__import__('os')", "é"]
)
async def test_a_faulty_expression_is_a_short_observation(expression):
    with pytest.raises(ToolError, match=r"^err$"):
        await evaluate(expression)


async def test_an_endless_expression_ends_at_its_limit():
    with pytest.raises(ToolError, match=r"^err$"):
        await evaluate("9**9**9**9")


async def test_an_expression_is_data_and_never_source():
    with pytest.raises(ToolError):
        await evaluate('1\nimport sys\nsys.stdout.write("7")')


async def test_a_long_result_is_cut_to_what_the_policy_can_read():
    assert await evaluate("10**30") == "100000"


async def test_an_unknown_ending_of_the_process_is_no_observation():
    class Lost:
        async def python(self, source, **options):
            return ExecResult(None, b"4042", b"")

    env = load("calc")
    with pytest.raises(RuntimeError, match="sandbox"):
        await env.call_tool(ToolCall("python", {"expression": "1"}), next(env.tasks("train", 0)), Lost())


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
