"""An environment whose tool keeps state in its own sandbox: a fact is written to a file, then asked for.

The tool is not declared stateless, so every trajectory has a sandbox of its own. `setup` puts the file there
before the first turn. The reward has two parts: the answer, and a metric of weight 0 that is only logged.
"""

import random
import shlex

from envs import Message, Task, ToolCall, ToolError, env

NAMES = ("ada", "bob", "cleo", "dan", "eve", "finn", "gus", "hana")


@env("examples/notes", splits=("train", "eval"), max_turns=4)
def notes(split, seed):
    draw = random.Random(f"notes/{split}/{seed}")
    while True:
        name, age = draw.choice(NAMES), draw.randint(10, 99)
        if (age % 10 == 0) == (split == "eval"):
            yield Task.ask(f"notes/{name}/{age}", f"how old is {name}?", gold=str(age), name=name)


@notes.setup
async def write(task, sandbox):
    await sandbox.write_file(f"/workspace/{task.private['name']}", f"{task.gold}\n".encode())


@notes.tool
async def shell(command: str, sandbox) -> str:
    """Runs a shell command in the folder of notes."""
    result = await sandbox.exec(command, timeout_s=5.0, output_limit=2000)
    if result.exit_code != 0:
        raise ToolError(f"failed: {result.stderr.decode(errors='replace')[:200]}")
    return result.stdout.decode(errors="replace").strip()


@notes.reward
def right(task, trajectory):
    return float(trajectory.answer == task.gold)


@notes.reward(weight=0.0)
def used_tool(task, trajectory):
    return float(any(turn.message.tool_calls for turn in trajectory.turns))


@notes.demonstrations
def demonstrations(split, seed):
    for task in notes().tasks(split, seed):
        command = f"cat {shlex.quote(task.private['name'])}"
        call = ToolCall("shell", {"command": command}, "call_0", 0)
        yield (
            task,
            [
                Message("assistant", tool_calls=(call,)),
                Message("tool", task.gold, tool_call_id="call_0"),
                Message("assistant", task.gold),
            ],
        )
