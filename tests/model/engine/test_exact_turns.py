"""Exact mode over turns, tool results, lost caches and moves: the benchmark for a card, on a CPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks.model_gpu_turns import DISTURBANCES, play
from model.config import PolicyConfig
from model.policy import Policy

WINDOW = 16


@pytest.fixture
def policy():
    policy = Policy(replace(PolicyConfig.preset("pico"), sliding_window=WINDOW))
    policy.reset_parameters(5)
    with torch.no_grad():
        policy.head.weight *= 8  # pyright: ignore
    policy.fake_quant = True
    return policy


@pytest.mark.parametrize(
    ("replay", "disturbance"), [*(("bounded", name) for name in DISTURBANCES), ("exact", "caches lost")]
)
def test_a_trainer_computes_the_bits_of_every_turn(policy, replay, disturbance):
    outcome = play(policy, replay, disturbance, (0, 1, WINDOW, WINDOW + 1), sessions=3)
    assert outcome.largest == 0.0 and outcome.claimed == outcome.tokens > 0
    assert (outcome.replays > 0) == (replay == "bounded")


def test_other_weights_than_the_samplers_are_seen(policy, monkeypatch):
    import benchmarks.model_gpu_turns as turns

    compare = turns._compare

    def changed(policy, played):
        with torch.no_grad():
            policy.head.weight[0] += 1e-3
        return compare(policy, played)

    monkeypatch.setattr(turns, "_compare", changed)
    assert play(policy, "bounded", "nothing", (0,), sessions=2).largest > 0


def test_an_unknown_disturbance_is_named(policy):
    with pytest.raises(ValueError, match="'storm' is none of nothing, caches lost"):
        play(policy, "bounded", "storm", (0,))
