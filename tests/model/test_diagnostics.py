"""Each diagnosis on a case whose answer is known."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_weights
from model.checkpoint_files import ShardReader
from model.config import PolicyConfig
from model.diagnostics import cache_bytes, replay_cost
from model.diagnostics.cache_error import cache_error, logit_error
from model.diagnostics.drafter import draft_acceptance
from model.diagnostics.experts import expert_load, load_of
from model.diagnostics.recall import distance_edges, recall
from model.diagnostics.replay_error import replay_errors
from model.diagnostics.scales import RANGES, ScaleCounter, ScaleMonitor
from model.policy import PackedTokens, Policy
from model.quant import blocks
from model.quant.blocks import Rounded, probing

ORACLE = Path(__file__).parents[1] / "data/oracle"


def documents(*lengths, vocab=64):
    ids = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return PackedTokens(ids, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]))


def test_a_selection_of_everything_misses_nothing():
    config = replace(PolicyConfig.preset("nano"), index_topk=64, candidate_topk_blocks=16)
    layers = recall(Policy(config), documents(64, 30, 7))
    assert [layer.layer for layer in layers] == [1, 2, 3, 4, 5]
    for layer in layers:
        assert layer.selected == pytest.approx(1, abs=1e-12) and layer.missed == pytest.approx(0, abs=1e-12)
        assert layer.best == pytest.approx(1) and layer.pool in (None, pytest.approx(1))
        assert 0 < layer.mass < 1


def even_attention(policy):
    """Queries of zeros look at every key alike."""
    with torch.no_grad():
        for block in policy.blocks:
            block.attn.wq_b.weight.zero_()
            block.attn.attn_sink.zero_()
    return policy


@pytest.mark.parametrize("fake_quant", [False, True])
def test_even_attention_is_kept_in_proportion_to_the_keys(nano, fake_quant):
    policy, length = even_attention(nano), 70
    policy.fake_quant = fake_quant
    config, position = policy.config, torch.arange(70).double()
    for layer in recall(policy, documents(length, length)):
        ratio = config.ratio(layer.layer)
        keys = ((position + 1) / ratio).floor()
        window = (position + 1).clamp_max(config.sliding_window)
        mass = keys / (keys + window + 1)
        chosen = (keys.clamp_max(config.index_topk) / keys.clamp_min(1)) * mass
        assert layer.mass == pytest.approx(float(mass.mean()), rel=1e-5)
        assert layer.selected == pytest.approx(float(chosen.sum() / mass.sum()), rel=1e-5)
        assert layer.best == pytest.approx(layer.selected, rel=1e-5)
        if layer.layer < 3:
            assert layer.pool is None
            continue
        # Three whole blocks of four keys, and of the newest block what is visible.
        pool = torch.where(keys <= 16, keys, 12 + (keys - 1) % 4 + 1)
        assert layer.pool == pytest.approx(float((pool / keys * mass).sum() / mass.sum()), rel=1e-5)
        assert (layer.choices_in_pool is None) == (layer.layer != 4)


def test_distances_divide_the_mass(nano):
    layers = recall(nano, documents(100, 40))
    assert distance_edges(16, 100) == [0, 16, 32, 64] and distance_edges(16, 16) == [0]
    for layer in layers:
        assert [part.begin for part in layer.by_distance] == [0, 16, 32, 64]
        assert sum(part.mass for part in layer.by_distance) == pytest.approx(layer.mass)
        kept = sum(part.mass * part.selected for part in layer.by_distance)
        assert kept == pytest.approx(layer.mass * layer.selected)
        assert layer.selected <= layer.best + 1e-9
        assert layer.pool is None or layer.mode == "full" or layer.selected <= layer.pool + 1e-9


def test_keys_beyond_a_distance_that_nothing_selects(nano):
    """With one place and index scores that prefer the first key, only the farthest bucket is kept."""
    policy = even_attention(Policy(replace(nano.config, index_topk=1, candidate_topk_blocks=32)))
    with torch.no_grad():
        for block in policy.blocks:
            if hasattr(block.attn, "indexer"):
                block.attn.indexer.weights_proj.weight.zero_()
    last = recall(policy, documents(64))[-1].by_distance
    # Equal scores: the lowest index wins, which is 32 tokens back or more for half of the tokens.
    assert last[-1].begin == 32 and last[-1].selected > 0
    position = torch.arange(32, 64).double()
    mass = 1 / (position + 1 + 16 + 1)
    expected = float(mass.sum() / ((position - 31) * mass).sum())
    assert last[-1].selected == pytest.approx(expected, rel=1e-5)


def test_recall_leaves_the_policy_as_it_was(nano):
    tokens = documents(50)
    before = nano(tokens).hidden
    recall(nano, tokens)
    assert torch.equal(before, nano(tokens).hidden)
    assert not any(block.attn._forward_hooks for block in nano.blocks)


@pytest.mark.parametrize(
    ("kind", "rounding", "block", "low", "high"),
    [
        (Rounded.MAIN, blocks.round_main, 16, 6 * 2.0**-9, 6 * 448.0),
        (Rounded.WINDOW, blocks.round_window, 32, 1e-4, 448 * 2.0**127),
        (Rounded.ACTIVATION, blocks.round_activation, 32, 1e-4, 448 * 2.0**127),
        (Rounded.INDEX, blocks.round_index, 32, 6 * 2.0**-126, 6 * 2.0**127),
    ],
)
def test_planted_scales_are_counted(kind, rounding, block, low, high):
    x = torch.ones(5, 4 * block)
    x[0, :block] = 0
    x[1, block] = low
    x[1, block + 1 : 2 * block] = 0
    x[2, :] = min(high, 3e38)
    x[3, 3] = torch.nan
    counter = ScaleCounter()
    with probing(counter):
        rounding(x)
    (count,) = counter.counts()
    assert (count.kind, count.blocks, count.values) == (kind, 20, 20 * block)
    assert (count.floor, count.nonfinite) == (2, 1)
    assert count.ceiling == (4 if high < 3e38 else 0)
    assert count.clipped == 0


def test_values_beyond_a_scale_at_its_ceiling_are_clipped():
    x = torch.full((2, 16), 96.0)
    x[0, 5:8] = 6 * 448 + 1.0
    counter = ScaleCounter()
    with probing(counter):
        blocks.round_main(x)
    (count,) = counter.counts()
    assert (count.ceiling, count.clipped) == (1, 3)
    assert RANGES[Rounded.MAIN].floor == 2.0**-9 and RANGES[Rounded.WINDOW].floor == 2.0**-22


def test_the_monitor_says_which_layer(nano):
    nano.fake_quant = True
    with torch.no_grad():
        nano.blocks[2].attn.kv_norm.weight.zero_()
        nano.blocks[1].attn.compressor.norm.weight.mul_(1e6)
    tokens = documents(40, 9)
    plain = nano(tokens).hidden
    with ScaleMonitor(nano) as monitor:
        assert torch.equal(plain, nano(tokens).hidden)
        counts = {(count.layer, count.kind): count for count in monitor.counter.counts()}
    assert counts["2", Rounded.WINDOW].floor == counts["2", Rounded.WINDOW].blocks == 49
    assert counts["1", Rounded.MAIN].ceiling > 0.9 * counts["1", Rounded.MAIN].blocks
    assert counts["1", Rounded.MAIN].clipped > 0
    rest = [count for key, count in counts.items() if key not in {("2", "window"), ("1", "main")}]
    assert {(c.floor, c.ceiling, c.nonfinite) for c in rest} == {(0, 0, 0)}
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in nano.blocks)
    assert not any("add_keys" in vars(block.attn) for block in nano.blocks)


def test_the_monitor_looks_at_every_nth_pass_and_names_its_metrics(nano):
    nano.fake_quant = True
    tokens = documents(20)
    with ScaleMonitor(nano, every=3) as monitor:
        seen = []
        for _ in range(5):
            nano(tokens)
            seen.append(len(monitor.metrics("train")) > 0)
        assert seen == [True, False, False, True, False]
        nano(tokens)
        nano(tokens)
        metrics = monitor.metrics("rollout")
    assert metrics["quant/rollout/window.floor"] == 0
    assert 0 < metrics["quant/rollout/main.clipped"] < 0.2
    assert {"quant/rollout/layer.3.index.ceiling", "quant/rollout/layer.0.window.nonfinite"} <= metrics.keys()


def test_unrounded_caches_have_no_error(nano):
    tokens = documents(60, 20)
    errors = cache_error(nano, tokens)
    assert (errors["off"].rms, errors["off"].largest, errors["off"].kl, errors["off"].top) == (0, 0, 0, 1)
    assert not nano.fake_quant
    with torch.no_grad():
        exact = nano.logits(nano(tokens).hidden)
        nano.fake_quant = True
        rounded = nano.logits(nano(tokens).hidden)
    assert errors["all"] == logit_error(rounded, exact)
    assert all(errors[name].rms > 1e-3 for name in ("main", "window", "index"))


def test_logit_error_by_hand():
    exact = torch.tensor([[3.0, 1.0, 2.0], [0.0, 4.0, 2.0]])
    shifted = logit_error(exact + 2, exact)
    assert shifted.largest == 2 and shifted.kl == pytest.approx(0) and shifted.top == 1
    assert shifted.rms == pytest.approx(2 / (10 / 6) ** 0.5)
    swapped = logit_error(exact[:, [1, 0, 2]], exact)
    assert swapped.top == 0 and swapped.kl > 0.5


def test_expert_load_by_hand():
    even, one = load_of(torch.tensor([[5.0, 5, 5, 5], [0, 20, 0, 0]]))
    assert even.entropy == pytest.approx(1) and (even.largest, even.dead) == (1, 0)
    assert one.entropy == 0 and (one.largest, one.dead, one.experts) == (4, 3, 4)


def test_a_router_bias_makes_dead_experts(nano):
    nano.blocks[3].ffn.gate.bias.copy_(torch.tensor([100.0, 100, 0, 0]))
    load = expert_load(nano, documents(50))
    assert load[3].dead == 2 and load[3].largest == pytest.approx(2)
    assert load[3].entropy == pytest.approx(0.5) and load[0].dead == 0


def drafting():
    config = PolicyConfig.from_published(json.loads((ORACLE / "clean_fp32.json").read_text()))
    policy = Policy(config)
    load_weights(policy, ShardReader([ORACLE / "clean_fp32.safetensors"]))
    return policy


def flat_drafts(favourite):
    """The policy finds all tokens alike; the drafter's Markov head is sure of `favourite`."""
    policy = drafting()
    assert policy.mtp is not None
    head = policy.mtp.blocks[-1]
    with torch.no_grad():
        policy.head.weight.zero_()
        head.markov_head.embed.weight.fill_(1)
        head.markov_head.head.weight.zero_()
        head.confidence_head.proj.weight.zero_()
        if favourite is not None:
            head.markov_head.head.weight[favourite] = 10
    return draft_acceptance(policy, torch.zeros(2, 20, dtype=torch.int64))


def test_drafts_that_agree_are_all_accepted():
    result = flat_drafts(None)
    assert result.drafts == 2 * (20 - 3 - 1) and result.accepted_greedy == 3
    assert result.accepted_sampling == pytest.approx(3)
    assert [slot.reached for slot in result.slots] == [result.drafts] * 3
    (only,) = result.bins
    assert (only.low, only.count, only.confidence) == (0.5, 3 * result.drafts, 0.5)
    assert result.calibration_error == pytest.approx(0.5)


def test_drafts_that_are_sure_of_one_token():
    right, wrong = flat_drafts(0), flat_drafts(7)
    assert right.accepted_greedy == 3
    assert [slot.expected for slot in right.slots] == pytest.approx([1 / 256] * 3, rel=1e-4)
    assert wrong.accepted_greedy == 0
    assert [slot.reached for slot in wrong.slots] == [wrong.drafts, 0, 0]


def test_drafting_needs_a_drafter_and_room(nano):
    with pytest.raises(ValueError, match="no drafter"):
        draft_acceptance(nano, torch.zeros(1, 20, dtype=torch.int64))
    with pytest.raises(ValueError, match="longer"):
        draft_acceptance(drafting(), torch.zeros(1, 4, dtype=torch.int64))


def test_cache_bytes_of_the_generations():
    official = PolicyConfig.preset("official")
    table = {row.name: row.bytes_per_token for row in cache_bytes.generations(official)}
    assert (table["V1 67B"], table["V4.1-Flash"], table["this policy"]) == (389_120, 890, 890)
    assert 3.5 < table["V4-Flash"] / 890 < 4.5
    assert cache_bytes.policy_bytes(replace(official, kv_source_layer_ids=(2, 8, 20))) == 712


def test_replay_by_hand():
    costs = replay_cost.TokenCosts(encoder=1, decoder=1, step=2)
    turn = replay_cost.turn_cost(costs, window=128, new=128, generated=64, miss_rate=1)
    assert (turn.turn, turn.replay, turn.share) == (512, 128, 0.25)
    assert replay_cost.turn_cost(costs, 128, 28, 0, 0.5).replay == 0.5 * (128 + 100)
    assert replay_cost.turn_cost(costs, 128, 28, 10, 0).share == 0


def test_costs_of_the_released_model_are_its_active_parameters():
    costs = replay_cost.parameter_costs(PolicyConfig.preset("official"))
    assert costs.encoder == pytest.approx(7.5e9, rel=0.03)
    assert costs.step == pytest.approx(15.7e9, rel=0.03)


def test_a_replay_that_covers_everything_has_no_error(nano):
    """A policy whose window is one token has nothing to lose in its windows."""
    policy = Policy(replace(nano.config, sliding_window=1))
    errors = replay_errors(policy, documents(40).token_ids[None], 20)
    for error in errors.values():
        assert max(error.keys) < 1e-5 and error.first.largest < 1e-4 and error.later.largest < 1e-4


def test_replay_errors_begin_where_windows_meet(nano):
    """The decoder's first layer reads exact states; later ones read what saw too few keys."""
    token_ids = documents(60, 60).token_ids.view(2, 60)
    errors = replay_errors(nano, token_ids, 50)
    start = nano.config.decoder_start
    assert max(errors["decoder"].keys[: start + 1]) < 1e-5
    assert min(errors["decoder"].keys[start + 1 :]) > 1e-3
    both = errors["encoder and decoder"]
    assert both.keys[0] < 1e-5 < 1e-3 < both.keys[1] and both.first.kl > 0
    assert 0 < errors["decoder"].first.rms < 0.5


def test_a_replay_needs_a_prompt_and_more(nano):
    token_ids = documents(40).token_ids[None]
    for prompt in (16, 40):
        with pytest.raises(ValueError, match="longer than the window"):
            replay_errors(nano, token_ids, prompt)


def test_measured_costs_are_positive(nano):
    costs = replay_cost.measured_costs(nano, 64)
    assert 0 < costs.encoder < costs.step and 0 < costs.decoder < costs.step
