"""The pass on packed tokens, run by the definitions of its operations on a CPU, against the pass on rows."""

from dataclasses import replace

import pytest
import torch

from model.batch import Trace
from model.decode_graphs import graphs_of
from model.ops import dispatch
from model.policy import PackedTokens, Policy
from model.presets import NANO

# With wide selections no choice hangs on a rounding, so that the two passes can be compared closely.
CONFIG = replace(
    NANO,
    dtype="bfloat16",
    num_attention_heads=16,
    head_dim=64,
    index_head_dim=64,
    hc_sinkhorn_iters=20,
    index_topk=64,
    candidate_topk_blocks=32,
    num_experts_per_tok=4,
)


@pytest.fixture(scope="module")
def policy():
    return Policy(CONFIG)


def _documents(lengths=(5, 37, 18, 1, 60)):
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return PackedTokens(ids, torch.tensor([0, *lengths]).cumsum(0))


def _error(got, expected):
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def test_a_training_pass_gives_every_layer_the_same(policy):
    expected, got = Trace(), Trace()
    before = policy(_documents(), trace=expected)
    with dispatch.fused_everywhere():
        after = policy(_documents(), trace=got)
        assert dispatch.paths()["policy"] == "kernels"
    assert _error(after.hidden, before.hidden) < 0.02
    compared = [name for name in got.values if name in expected.values and not name.endswith("ids")]
    assert len(compared) > 15
    for name in compared:
        assert _error(got.values[name], expected.values[name]) < 0.03, name


def test_gradients_agree(policy):
    tokens, grads = _documents((40, 24)), []
    for fused in (False, True):
        policy.zero_grad()
        context = dispatch.fused_everywhere() if fused else dispatch.reference_only()
        with context:
            logits = policy.logits(policy(tokens).hidden)
            torch.nn.functional.cross_entropy(logits[:-1], tokens.token_ids[1:]).backward()
        grads.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    # Gates of the memory have a slope that grows without bound at zero; a few scalars sum up roundings.
    for name, grad in grads[0].items():
        if grad.dim() == 2 and "engram" not in name and grad.norm() > 1e-3:
            assert _error(grads[1][name], grad) < 0.15, name


@pytest.mark.parametrize("recompute", [False, True])
def test_the_indexer_learns_what_it_learns_in_float32(policy, recompute):
    wide = Policy(replace(CONFIG, dtype="float32"))
    wide.load_state_dict(policy.state_dict())
    tokens, losses, grads = _documents((44, 30)), [], []
    policy.set_recompute(recompute)
    for model in (wide, policy):
        model.zero_grad()
        with dispatch.fused_everywhere():
            losses.append(model(tokens, indexer_loss=True).aux.indexer_loss)
            assert (dispatch.paths()["policy"] == "kernels") == (model is policy)
            losses[-1].backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        grads.append({name: grad for name, grad in found.items() if grad.any()})
    policy.set_recompute(False)
    assert grads[0] and grads[0].keys() == grads[1].keys()
    assert all("indexer" in name for name in grads[0])
    assert _error(losses[1], losses[0]) < 0.01
    for name, grad in grads[0].items():
        assert _error(grads[1][name], grad) < 0.15, name
    with torch.no_grad(), dispatch.fused_everywhere():
        assert _error(policy(tokens, indexer_loss=True).aux.indexer_loss, losses[1]) < 1e-4


@pytest.mark.gpu
def test_a_card_teaches_the_indexer_what_float32_does(policy):
    wide = Policy(replace(CONFIG, dtype="float32"))
    wide.load_state_dict(policy.state_dict())
    expected = wide(_documents((44, 30)), indexer_loss=True).aux.indexer_loss
    expected.backward()
    ours, tokens = Policy(CONFIG).cuda(), _documents((44, 30))
    ours.load_state_dict(policy.state_dict())
    tokens = PackedTokens(tokens.token_ids.cuda(), tokens.cu_seqlens.cuda())
    loss = ours(tokens, indexer_loss=True).aux.indexer_loss
    loss.backward()
    taken = dispatch.paths()
    assert taken["policy"] == "kernels" and taken["index_loss"] == taken["engram_gate"] == "triton"
    assert _error(loss.cpu(), expected) < 0.01
    grads = dict(ours.named_parameters())
    learning = {n: p.grad for n, p in wide.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning and all("indexer" in name for name in learning)
    for name, grad in learning.items():
        assert _error(grads[name].grad.cpu(), grad) < 0.15, name


@torch.no_grad()
@pytest.mark.parametrize("top_k", [8, 64])
def test_prefill_pieces_and_decoding_repeat_a_training_pass_bit_for_bit(top_k):
    policy = Policy(replace(CONFIG, index_topk=top_k, candidate_topk_blocks=3))
    policy.fake_quant = True
    ids = torch.randint(0, 64, (3, 60), generator=torch.Generator().manual_seed(0))
    with dispatch.fused_everywhere():
        whole = policy(PackedTokens(ids.flatten(), torch.arange(4) * 60)).hidden.view(3, 60, -1)
        cache = policy.new_cache(3, 128, storage="packed")
        slots = torch.tensor([cache.allocate() for _ in range(3)])
        at = torch.zeros(3, dtype=torch.int64)
        for lengths in ([37, 20, 37], [13, 13, 2], [1, 1, 1], [1, 1, 1], [3, 1, 2]):
            count = torch.tensor(lengths)
            columns = at[:, None] + torch.arange(max(lengths))
            hidden = policy.extend(cache, slots, ids.gather(1, columns.clamp_max(59)), count)
            at += count
            assert torch.equal(hidden, whole[torch.arange(3), at - 1])


@torch.no_grad()
def test_the_decoder_may_skip_a_prompt(policy):
    policy.fake_quant = True
    ids = torch.randint(0, 64, (2, 56), generator=torch.Generator().manual_seed(0))
    with dispatch.fused_everywhere():
        states = []
        for start in (None, torch.tensor([39, 39])):
            cache = policy.new_cache(2, 128, storage="packed")
            slots = torch.tensor([cache.allocate(), cache.allocate()])
            states.append(policy.extend(cache, slots, ids, torch.tensor([56, 50]), decode_from=start))
    policy.fake_quant = False
    assert 0 < _error(states[1], states[0]) < 0.05


def test_what_kernels_do_not_serve_is_named(policy):
    with dispatch.fused_everywhere():
        policy(_documents((20, 12)), indexer_loss="dense")
        assert dispatch.paths()["policy"] == "reference for the indexer's loss over all keys"
    policy(_documents((8,)))
    assert dispatch.paths()["policy"] == "reference (bfloat16 on cpu)"


@torch.no_grad()
def test_a_dense_cache_is_refused_by_kernels(policy):
    with dispatch.fused_everywhere(), pytest.raises(ValueError, match="storage='packed'"):
        cache = policy.new_cache(1, 64)
        slots = torch.tensor([cache.allocate()])
        policy.extend(cache, slots, torch.zeros(1, 40, dtype=torch.int64), torch.tensor([40]))


@torch.no_grad()
def test_warming_up_covers_every_bucket_and_leaves_the_cache_empty(policy, caplog):
    caplog.set_level("INFO")
    policy.fake_quant = True
    with dispatch.fused_everywhere():
        cache = policy.new_cache(3, 20000, storage="packed", pages=2)
        graphs_of(policy, cache).warm_up(3)
    policy.fake_quant = False
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("decode graph")]
    assert [line.split(" after")[0] for line in lines] == [
        f"decode graph {n} of 9 (batch {batch}, context {width})"
        for n, (width, batch) in enumerate(((w, b) for w in (4096, 16384, 20000) for b in (1, 2, 4)), 1)
    ]
    assert cache.free_slots == 3
    assert cache.pages.free_pages == 2
