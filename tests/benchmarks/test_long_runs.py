"""The benchmarks that take minutes; `make bench` runs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(7200)]


ROLLOUTS = ["rollout_sim", "rollout_sim.validate", "rollout_sim.million", "async_calc"]
FLEET = ["sandbox_fleet", "sandbox_kills", "sandbox_recovery", "sandbox_soak"]


@pytest.mark.parametrize(
    "module",
    [
        "calc",
        "sort",
        "opd",
        "trainer_speed",
        "kills",
        "engine",
        "policy_speed",
        *ROLLOUTS,
        "wal",
        "weight_updates",
        "roles",
        *FLEET,
    ],
)
def test_benchmark_shows_what_it_claims(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{module}"], check=False)
    assert done.returncode == 0
