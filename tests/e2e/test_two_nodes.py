"""Two nodes of a cluster that is joined by its address; weights go through the object store."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))

from temper import ROOT, SMALL, Home, steps, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PLACED = ("launcher.replicas=2", "launcher.weights=object_store", "launcher.strategy=spread")


@pytest.fixture
def cluster(monkeypatch, home: Home):
    for name, value in {**home.env, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made = next(made for _ in range(4) if (made := two_nodes(home)) is not None)
    yield made
    made.shutdown()


def two_nodes(home: Home) -> Cluster | None:
    """A cluster, or None when Ray gave up: it waits 30 s for a node, which a busy machine may not keep."""
    options = {"num_cpus": 2, "object_store_memory": 80_000_000}
    made = Cluster()
    try:
        made.add_node(**options, include_dashboard=False)
        made.add_node(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        made.shutdown()
        home.clean_up()
        return None
    return made


def test_generators_on_two_nodes_and_what_has_no_room_is_named(cluster: Cluster, home: Home) -> None:
    joined = f"launcher.address={cluster.address}"
    refused = home.train(*SMALL, *PLACED, joined, "launcher.replica_cpus=3", "run.name=large", timeout=300)
    assert refused.returncode == 1
    assert re.search(r"no room for bundle \d: generator-\d \(3 CPU\)", refused.stdout + refused.stderr)

    run = home.run_folder("two")
    driver = home.start(*SMALL, *PLACED, joined, "run.name=two", "sft.steps=2", "trainer.steps=2")
    log = run / "logs" / "attempt-1" / "generator-1.log"
    wait_for(lambda: driver.poll() is not None or bool(steps(run)), 400)
    assert driver.poll() is None, home.output()
    os.kill(int(re.findall(r"process (\d+) opens", log.read_text())[-1]), signal.SIGKILL)
    assert driver.wait(500) == 0, home.output()
    assert len(list(run.glob("rollouts/step-*.jsonl"))) == 2
