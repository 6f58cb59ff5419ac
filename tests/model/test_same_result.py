"""The same tokens give the same logits however they are fed: packed, chunked, decoded, dense or gathered."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import PolicyConfig
from model.policy import PackedTokens, Policy

POLICIES = ["nano", "three_sources"]


def documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (sum(lengths),), generator=generator)
    return PackedTokens(ids, torch.tensor([0, *lengths]).cumsum(0))


def run(policy, tokens):
    with torch.inference_mode():
        return policy.logits(policy(tokens).hidden)


def fed_in_chunks(policy, ids, draw):
    """Logits of the last token of every chunk, with the position they belong to."""
    rows, length = ids.shape
    cache = policy.new_cache(rows + 2, length)
    cache.allocate()
    slots = [cache.allocate() for _ in range(rows)]
    done, found = [0] * rows, []
    while min(done) < length:
        active = [row for row in range(rows) if done[row] < length]
        sizes = [min(draw(), length - done[row]) for row in active]
        chunk = torch.zeros(len(active), max(sizes), dtype=torch.int64)
        for place, (row, size) in enumerate(zip(active, sizes, strict=True)):
            chunk[place, :size] = ids[row, done[row] : done[row] + size]
        targets = torch.tensor([slots[row] for row in active])
        logits = policy.logits(policy.extend(cache, targets, chunk, torch.tensor(sizes)))
        for place, (row, size) in enumerate(zip(active, sizes, strict=True)):
            done[row] += size
            found.append((row, done[row] - 1, logits[place]))
    return found


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("fake_quant", [False, True])
@pytest.mark.parametrize("dense_limit", [1024, 0])
def test_chunks_of_any_size_equal_one_forward(request, name, fake_quant, dense_limit):
    policy = request.getfixturevalue(name)
    policy.fake_quant, policy.dense_limit = fake_quant, dense_limit
    rows, length = 5, 43
    tokens = documents([length] * rows)
    whole = run(policy, tokens).view(rows, length, -1)
    generator = random.Random(7)
    with torch.inference_mode():
        found = fed_in_chunks(
            policy, tokens.token_ids.view(rows, length), lambda: generator.choice([1, 1, 2, 3, 8, 21])
        )
    errors = torch.stack([(logits - whole[row, at]).abs().max() for row, at, logits in found])
    if not fake_quant:
        assert errors.max() <= 1e-4
    assert errors.median() <= 1e-4
    assert errors.quantile(0.95) <= 1e-2


@pytest.mark.parametrize("prefill", [16, 17])
@pytest.mark.parametrize("fake_quant", [False, True])
def test_prefill_then_single_tokens_equal_one_forward(nano, prefill, fake_quant):
    nano.fake_quant = fake_quant
    rows, length = 8, 40
    tokens = documents([length] * rows, seed=prefill)
    whole = run(nano, tokens).view(rows, length, -1)
    steps = iter([prefill] * rows + [1] * rows * length)
    with torch.inference_mode():
        found = fed_in_chunks(nano, tokens.token_ids.view(rows, length), lambda: next(steps))
    errors = torch.stack([(logits - whole[row, at]).abs().max() for row, at, logits in found])
    assert errors.median() <= 1e-4
    assert errors.quantile(0.95) <= (1e-2 if fake_quant else 1e-4)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("fake_quant", [False, True])
def test_packed_documents_equal_single_ones(request, name, fake_quant):
    policy = request.getfixturevalue(name)
    policy.fake_quant = fake_quant
    lengths = [3, 150, 1, 45, 90, 2, 28, 28]
    tokens = documents(lengths)
    packed = run(policy, tokens).split(lengths)
    alone = [
        run(policy, PackedTokens(part, torch.tensor([0, len(part)])))
        for part in tokens.token_ids.split(lengths)
    ]
    errors = torch.cat([(ours - theirs).abs().amax(-1) for ours, theirs in zip(packed, alone, strict=True)])
    assert errors.quantile(0.95) <= (1e-2 if fake_quant else 1e-4)
    assert errors.median() <= 1e-4


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_any_packing_equals_single_documents(lengths, seed):
    policy = Policy(PolicyConfig.preset("nano"))
    tokens = documents(lengths, seed)
    packed = run(policy, tokens).split(lengths)
    for part, ours in zip(tokens.token_ids.split(lengths), packed, strict=True):
        assert (run(policy, PackedTokens(part, torch.tensor([0, len(part)]))) - ours).abs().max() <= 1e-4


@pytest.mark.parametrize("name", POLICIES)
def test_a_token_moves_nothing_before_it_nor_in_other_documents(request, name):
    policy = request.getfixturevalue(name)
    lengths = [20, 45, 17]
    tokens = documents(lengths)
    before = run(policy, tokens)
    for at in (20, 33, 48, 64):
        changed = tokens.token_ids.clone()
        changed[at] = (changed[at] + 1) % 64
        moved = (run(policy, PackedTokens(changed, tokens.cu_seqlens)) - before).abs().amax(-1)
        assert moved[:at].max() <= 1e-5
        assert moved[65:].max() <= 1e-5
        assert moved[at] > 1e-3


@pytest.mark.parametrize("fake_quant", [False, True])
def test_long_documents_agree_between_both_attention_paths(nano, fake_quant):
    nano.fake_quant = fake_quant
    tokens = documents([700, 333])
    nano.dense_limit = 10**9
    dense = run(nano, tokens)
    nano.dense_limit = 64
    gathered = run(nano, tokens)
    errors = (dense - gathered).abs().amax(-1)
    assert errors.median() <= 1e-4
    assert errors.quantile(0.95) <= (1e-2 if fake_quant else 1e-4)


def test_chunked_scoring_and_gathering_change_nothing(nano, monkeypatch):
    tokens = documents([150, 70])
    nano.dense_limit = 0
    whole = run(nano, tokens)
    monkeypatch.setattr("model.layers.indexer._CHUNK_ELEMENTS", 30_000)
    monkeypatch.setattr("model.layers.attention._CHUNK_ELEMENTS", 30_000)
    assert (run(nano, tokens) - whole).abs().max() <= 1e-4


@pytest.mark.slow
def test_a_long_document_needs_no_quadratic_memory(nano):
    """4k tokens: probabilities over all pairs would take 0.5 GB a layer with main keys."""
    import resource

    tokens = documents([4096])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    output = nano(tokens)
    nano.logits(output.hidden).square().mean().backward()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 3 << 29
    assert all(p.grad.to_dense().isfinite().all() for p in nano.parameters() if p.grad is not None)
