"""The examples and the documentation are run as a reader would run them."""

import itertools
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import envs
from envs.check import check_environment
from envs.play import play, say, script
from envs.registry import ENVIRONMENTS
from envs.types import ToolCall

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/environments.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _forget():
    known = dict(ENVIRONMENTS.registered)
    yield
    ENVIRONMENTS.registered.clear()
    ENVIRONMENTS.registered.update(known)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_documentation_runs(number, tmp_path):
    path = tmp_path / "block.py"
    path.write_text(BLOCKS[number])
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_shortest_environment_of_the_documentation_is_at_most_15_lines():
    code = BLOCKS[0].partition("\n\n\nenvironment =")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15


async def test_the_shortest_example_is_sound():
    report = await check_environment(envs.load(str(ROOT / "examples/add.py")), 10)
    assert report.passed, str(report)


async def test_the_example_with_a_stateful_tool_is_sound():
    env = envs.load(str(ROOT / "examples/notes.py"))
    assert env.sandbox is not None and not env.tools[0].stateless
    report = await check_environment(env, 10)
    assert report.passed, str(report)
    shown = itertools.islice(env.demonstrations("train", 0), 5)
    assert all(messages[-1].content == task.gold for task, messages in shown)


async def test_the_stateful_example_is_played_in_a_sandbox(box):
    env = envs.load(str(ROOT / "examples/notes.py"))
    task, (call, _, answer) = next(env.demonstrations("train", 0))
    played = await play(env, task, script(call, answer), sandbox=box)
    assert played.turns[0].observations[0].content == task.gold
    assert played.score.value == 1.0 and played.score.parts == {"right": 1.0, "used_tool": 1.0}
    lost = replace(call, tool_calls=(ToolCall("shell", {"command": "cat nobody"}),))
    played = await play(env, task, script(lost, say("7")), sandbox=box)
    assert "failed" in played.turns[0].observations[0].content and played.score.value == 0.0


async def test_an_example_is_played_by_a_script():
    env = envs.load(str(ROOT / "examples/add.py"))
    task = next(env.tasks("eval", 0))
    for answer, value in ((task.gold, 1.0), ("0", 0.0)):
        assert (await play(env, task, script(say(answer)))).score.value == value
