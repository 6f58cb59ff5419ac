"""A run on vLLM whose replica is killed, and then one of its two nodes: no sample is lost or used twice."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

sys.path.insert(0, str(Path(__file__).parent))

from temper import ROOT, SMALL, Home, steps, wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]
RUN = (
    *SMALL, "policy=hf", "engine=vllm", "run.name=nodes", "sft.steps=2", "trainer.steps=3",
    "rollout.max_in_flight=16", "checkpoint.every=1", "launcher.replicas=2", "launcher.weights=object_store", 
    "launcher.strategy=spread", "launcher.weights_deadline_s=300", "logger.console=plain",
)  # fmt: skip


def nodes_of(home: Home) -> tuple[Cluster, object]:
    """A cluster of two emulated nodes, either of which has room for everything; and the second node."""
    for _ in range(4):
        made = Cluster()
        try:
            made.add_node(num_cpus=4, object_store_memory=80_000_000, include_dashboard=False)
            return made, made.add_node(num_cpus=4, object_store_memory=80_000_000)
        except Exception as error:
            made.shutdown()
            home.clean_up()
            if "timed out during startup" not in str(error):
                raise
    raise TimeoutError("Ray did not start two nodes in four attempts")


def cores_of(run: Path) -> list[psutil.Process]:
    """The processes of vLLM under the first replica."""
    log = run / "logs" / "attempt-1" / "generator-0.log"
    actor = int(re.findall(r"process (\d+) opens", log.read_text())[-1])
    return [p for p in psutil.Process(actor).children() if "EngineCore" in f"{p.name()} {p.cmdline()}"]


def test_neither_a_killed_replica_nor_a_killed_node_loses_a_sample(home: Home, monkeypatch) -> None:
    for name, value in {**home.env, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cluster, second = nodes_of(home)
    try:
        run = home.run_folder("nodes")
        driver = home.start(*RUN, f"launcher.address={cluster.address}")
        reached = lambda n: lambda: driver.poll() is not None or len(set(steps(run))) >= n  # noqa: E731
        wait_for(reached(1), 500)
        assert driver.poll() is None, home.output()
        (core,) = cores_of(run)
        os.kill(core.pid, signal.SIGKILL)
        wait_for(reached(2), 400)
        assert driver.poll() is None, home.output()
        assert "the generator-0 died" in home.output()
        cluster.remove_node(second, allow_graceful=False)
        assert driver.wait(600) == 0, home.output()
    finally:
        cluster.shutdown()
    used = [
        tuple(json.loads(line)["trajectory"]["key"][3:5])
        for file in sorted(run.glob("rollouts/step-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(used) == len(set(used)) == 3 * 4 * 4
