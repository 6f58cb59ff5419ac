"""`temper train` with engines of roles: prompts are computed by one process, tokens drawn by another."""

from __future__ import annotations

import json

import pytest
from temper import SMALL, Home, steps

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def test_a_run_whose_prompts_are_computed_elsewhere_trains_with_its_experts(home: Home) -> None:
    done = home.train(*SMALL, "run.name=roles", "launcher.prefill_replicas=1", "trainer.steps=2", timeout=480)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = home.run_folder("roles")
    assert steps(run) == [1, 2]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert not any(row["metrics"].get("rollout/all/error", 0.0) for row in rows)
