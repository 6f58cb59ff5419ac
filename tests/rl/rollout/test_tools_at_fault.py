"""Tools that hang, fork or flood in a real sandbox: they are cut short, and the sample goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import envs.scaffolds
from envs.registry import build, env
from envs.types import Score, Status, Task
from rl.rollout.config import RolloutConfig
from rl.rollout.sandboxes import FleetSandboxes, lasting
from rl.rollout.worker import Worker
from sandbox.base import Sandbox
from sandbox.client import Fleet
from tests.rl.rollout.scripted import CHAT, ScriptedEngine, calc_assignment, turns_of

SOURCES = {
    "hang": "while True: pass",
    "fork": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "flood": "import sys\nfor _ in range(1000): sys.stdout.write('x' * 1_000_000)",
    "quiet": "import sys; sys.stdout.write('4042')",
}


@env("faulty", splits=("train",), max_turns=2)
def faulty(split: str, seed: int) -> Iterator[Task]:
    yield Task.ask("faulty", "x=", gold="1")


@faulty.tool(stateless=True)
async def run(what: str, sandbox: Sandbox) -> str:
    """Runs one of the sources."""
    result = await sandbox.python(SOURCES[what], timeout_s=20.0 if what == "flood" else 1.0, output_limit=64)
    if result.timed_out:
        return "late"
    return "cut" if result.truncated else result.stdout.decode()


@faulty.reward
def exact(task: Task, trajectory: object) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("what", "seen"),
    [("hang", "late"), ("fork", "late"), pytest.param("flood", "cut", marks=pytest.mark.slow)],
)
async def test_a_tool_at_fault_is_cut_short_and_the_sample_goes_on(
    tmp_path: Path, what: str, seen: str
) -> None:
    engine = ScriptedEngine(turns_of(f"<call>{what}</call>", "<answer>1<end>"))
    async with await Fleet.connect("local", backend="bubblewrap", state_dir=tmp_path, owner="test") as fleet:
        environment = build("faulty", faulty, {})
        assert environment.sandbox is not None
        boxes = FleetSandboxes(lasting(fleet), environment.sandbox, pool_size=1, lease_s=600.0)
        scaffold = envs.scaffolds.load("tools")
        worker = Worker(environment, scaffold, engine, CHAT, boxes, None, None, RolloutConfig())
        trajectory = await worker.run(calc_assignment(environment="faulty"))
        assert [message.content for message in trajectory.turns[0].observations] == [seen]
        assert trajectory.status is Status.FINISHED
        assert isinstance(trajectory.score, Score)
        async with boxes.shared() as box:
            assert (await box.python(SOURCES["quiet"])).stdout == b"4042"
