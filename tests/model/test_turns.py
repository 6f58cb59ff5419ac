"""A session of many turns: what the sampler computed is what the training forward computes, choice by choice.

Tool results are as long as the window, one shorter, one longer, one token, and many windows.
Weights are such that no selection among thousands of keys is a tie to the last bit, which rounding decides.
"""

from dataclasses import replace

import pytest
import torch

from model.batch import PackedTokens, Trace, floors_from_starts
from model.config import PolicyConfig
from model.policy import Policy
from model.replay import decode_from

WINDOW = 128
CONFIG = replace(
    PolicyConfig.preset("pico"),
    sliding_window=WINDOW,
    max_position_embeddings=8192,
    index_topk=32,
    candidate_topk_blocks=16,
    candidate_block_size=8,
    hc_sinkhorn_iters=4,
)
PROMPT, SAMPLED = 300, 3
SHORT = (1, WINDOW - 1, WINDOW, WINDOW + 1, 40, 1, WINDOW)
LONG = (1, WINDOW - 1, WINDOW, WINDOW + 1, 5000, 1, WINDOW + 1)


def sample(policy, replay, results, ids):
    """Play the turns. Returns hidden states and choices by position, and where windows started anew."""
    cache = policy.new_cache(1, len(ids))
    slot, at = cache.allocate(), 0
    hidden, choices, starts = {}, {}, []

    def feed(count, start=None):
        nonlocal at
        trace = Trace() if count <= 2 * WINDOW else None
        out = policy.extend(
            cache,
            torch.tensor([slot]),
            ids[None, at : at + count],
            torch.tensor([count]),
            decode_from=None if start is None else torch.tensor([start]),
            trace=trace,
        )
        at += count
        hidden[at - 1] = out[0]
        if trace is not None:
            choices[at - 1] = chosen(policy.config, trace, -1, at - 1)

    for new in (PROMPT, *results):
        decoded = cache.decoded(slot)
        feed(new, decode_from(policy.config, replay, at + new))
        assert cache.decoded(slot) == at
        if replay == "bounded" and decoded and new <= WINDOW:
            assert cache.floors(slot) == starts[-1], "the living ring goes on"
        starts.append(cache.floors(slot))
        for _ in range(SAMPLED):
            feed(1)
    return hidden, choices, starts


def chosen(config, trace, token, position):
    """Every discrete choice of one token: experts, selected keys, and candidates among what it can see."""
    found = {}
    for layer in range(config.num_hidden_layers):
        name = f"layers.{layer}."
        found[name + "router_ids"] = trace.values[name + "router_ids"][token].sort().values.tolist()
        if (index := trace.values.get(name + "index_topk")) is not None:
            found[name + "index_topk"] = index[0, token].tolist()
    for layer in filter(config.uses_candidates, range(config.num_hidden_layers)):
        mask = trace.values.get(f"layers.{layer}.candidate_mask")
        allowed = torch.arange(position + 1) if mask is None else mask[0, token].nonzero()[:, 0]
        found[f"layers.{layer}.candidates"] = allowed[allowed <= position].tolist()
    return found


def compare(policy, replay, results, *, floored=True):
    length = PROMPT + sum(results) + SAMPLED * (len(results) + 1)
    ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(11))
    with torch.inference_mode():
        hidden, choices, starts = sample(policy, replay, results, ids)
        floors = floors_from_starts(length, starts) if floored else None
        trace = Trace()
        tokens = PackedTokens(ids, torch.tensor([0, length]), window_floors=floors)
        expected = policy(tokens, trace=trace).hidden
        at = torch.tensor(list(hidden))
        ours = torch.stack(list(hidden.values()))
        errors = (ours - expected[at]).abs().amax(-1)
        logits = (policy.logits(ours) - policy.logits(expected[at])).abs().amax(-1)
    differing = [
        position
        for position, found in choices.items()
        if found != chosen(policy.config, trace, position, position)
    ]
    return torch.maximum(errors, logits), differing, starts


@pytest.fixture
def policy():
    made = Policy(CONFIG)
    made.reset_parameters(4)
    return made


@pytest.mark.parametrize("replay", ["bounded", "exact", "off"])
def test_short_sessions_agree(policy, replay):
    errors, differing, starts = compare(policy, replay, SHORT)
    assert errors.max() < 1e-4 and not differing
    assert (len(set(starts)) > 1) == (replay == "bounded")


def test_in_exact_mode_not_a_bit_differs(policy):
    policy.exact = True
    errors, differing, _ = compare(policy, "bounded", SHORT)
    assert errors.max() == 0 and not differing


def test_bounded_replay_is_not_the_full_forward(policy):
    errors, _, _ = compare(policy, "bounded", SHORT, floored=False)
    assert errors.max() > 1e-3


@pytest.mark.parametrize("replay", ["exact", "off"])
def test_exact_replay_equals_a_run_of_all_layers(policy, replay):
    errors, differing, _ = compare(policy, replay, (1, 1200, WINDOW + 1), floored=False)
    assert errors.max() < 1e-4 and not differing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replay", "exact"), [("bounded", False), ("bounded", True), ("exact", False), ("off", False)]
)
def test_eight_turns_with_a_result_of_5000_tokens_agree(policy, replay, exact):
    policy.exact = exact
    errors, differing, _ = compare(policy, replay, LONG)
    assert errors.max() <= (0 if exact else 1e-4) and not differing
