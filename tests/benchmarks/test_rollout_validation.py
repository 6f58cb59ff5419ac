"""The comparison of simulated with real engines."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.rollout_sim.schedulers import RULES
from benchmarks.rollout_sim.simulate import Simulation
from benchmarks.rollout_sim.trace import FileTrace, load_trace
from benchmarks.rollout_sim.validate import COSTS, Probe, RealEngine, ShortTrace, contexts, open_engine
from model.config import PolicyConfig
from model.policy import Policy


@pytest.fixture
def policy():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Policy(PolicyConfig.preset("nano"))
    made.reset_parameters(0)
    yield made
    torch.set_num_threads(threads)


def test_costs_are_found_in_measured_steps(policy):
    probe = Probe(open_engine(policy, 0), np.random.default_rng(0))
    probe.measure(3)
    assert {rows for rows, _, _ in probe.rows} <= {1, 2, 3}
    assert any(prefilled for _, prefilled, _ in probe.rows)
    probe.rows = [(rows, int(tokens > 0), tokens) for rows in range(1, 9) for tokens in (0, 10, 30)]
    probe.seconds = [
        0.02 + 0.001 * rows + 0.005 * prefilled + 1e-4 * tokens for rows, prefilled, tokens in probe.rows
    ]
    costs = probe.costs()
    assert costs.decode_base_s == pytest.approx(0.02)
    assert costs.decode_per_request_s == pytest.approx(0.001)
    assert costs.prefill_base_s == pytest.approx(0.005)
    assert costs.prefill_tokens_per_s == pytest.approx(1e4)


def test_a_probe_decodes_at_the_contexts_of_the_trace(tmp_path):
    samples = [
        {"input": [10, 5], "output": [3, 2], "tool_s": [1.0]},
        {"input": [7], "output": [1], "tool_s": []},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"format": 1, "samples": samples}))
    assert contexts(FileTrace(load_trace(path), 0), 2).tolist() == [10, 11, 12, 18, 19, 7]


def test_a_real_engine_samples_every_token_of_the_trace_and_books_its_version(policy):
    costs = replace(COSTS, groups_per_step=1, group_size=2, in_flight=4, staleness=0, trainer_s=0.01)
    probe = Probe(open_engine(policy, 0), np.random.default_rng(0))
    engines = RealEngine(open_engine(policy, costs.in_flight), probe)
    trace = ShortTrace(0)
    simulation = Simulation(costs, trace, RULES["ours"](costs), steps=2, warm_up=0, engines=engines)
    result = simulation.run()
    assert result.samples == 4
    assert result.tokens == sum(sum(trace.work(number, 0).outputs) for number in range(4))
    assert set(result.lags) == {0}
    assert engines.steps >= max(sum(trace.work(number, 0).outputs) for number in range(4))
