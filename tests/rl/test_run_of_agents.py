"""A whole run whose samples are driven by an agent program, over an engine with a prefix store."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from rl.driver import drive
from rl.engines.prefixes import MEMORY
from rl.launch.compose import load_config
from rl.launch.run import RunState, open_run
from rl.watch.watch import open_watch

EXAMPLE = Path(__file__).parents[2] / "examples/agent.py"
SMALL = [
    "experiment=calc",
    f"env.name={EXAMPLE}",
    "scaffold=external",
    "sft.steps=4",
    "sft.batch_size=8",
    "trainer.steps=2",
    "trainer.fake_quant=true",
    "engine.storage=packed",
    "engine.prefix_store=memory",
    "engine.prefix.memory_mb=8",
    "rollout.groups_per_step=2",
    "rollout.max_in_flight=8",
    "algorithm.group_size=4",
    "eval.tasks=2",
    "eval.samples=1",
    "launcher.sft_threads=1",
    "logger.wandb=disabled",
    "logger.console=plain",
    "run.name=agents",
]


@pytest.mark.slow
def test_an_agent_program_is_trained_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPERING_HOME", str(tmp_path / "home"))
    config = load_config([*SMALL, f"run.root={tmp_path}"])
    folder = open_run(config)
    with open_watch(folder, config) as watch:
        outcome = asyncio.run(drive(config, folder, watch, ray_actors=False))
    folder.close(RunState.FINISHED)
    assert outcome.steps == 2
    rows = [
        json.loads(line)["trajectory"]
        for file in (tmp_path / "agents").glob("rollouts/step-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    assert len(rows) == 16
    assert {row["key"][2] for row in rows} == {"external"}
    assert all(row["error"] is None for row in rows)
    metrics = (tmp_path / "agents" / "metrics.jsonl").read_text()
    assert "sys/engine.prefix_lookups" in metrics
    assert not list(MEMORY.glob(f"temper-prefix-{os.getpid()}-*"))
