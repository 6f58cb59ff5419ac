"""Exact mode: the same bits for a token, however many rows, chunks or documents it is computed among."""

import random
from dataclasses import replace

import pytest
import torch

from model.batch import floors_from_starts
from model.policy import PackedTokens, Policy
from model.rows import Rows

LENGTHS = [41, 1, 33, 7, 2, 19]
"""Lengths that fall into several buckets and fill no block."""


def make(name, request, dtype="float32", fake_quant=False):
    policy = request.getfixturevalue(name)
    if dtype != "float32":
        policy = Policy(replace(policy.config, dtype=dtype))
        policy.reset_parameters(3)
    policy.exact, policy.fake_quant = True, fake_quant
    return policy


def draw_documents(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def pack(documents):
    return PackedTokens(torch.cat(documents), torch.tensor([0, *map(len, documents)]).cumsum(0))


def trained(policy, documents):
    """Hidden states of each document from one training forward over all."""
    with torch.no_grad():
        hidden = policy(pack(documents)).hidden
    return list(hidden.split([len(document) for document in documents]))


def logprobs_of(policy, hidden):
    with torch.no_grad():
        return policy.logits(hidden).log_softmax(-1)


def extend(policy, cache, slots, chunks, padding=0, decode_from=None):
    ids = torch.nn.utils.rnn.pad_sequence(chunks, batch_first=True, padding_value=5)
    ids = torch.nn.functional.pad(ids, (0, padding), value=9)
    lengths = torch.tensor([len(chunk) for chunk in chunks])
    with torch.no_grad():
        return policy.extend(cache, torch.tensor(slots), ids, lengths, decode_from=decode_from)


def new_cache(policy, storage="dense"):
    with torch.no_grad():
        return policy.new_cache(40, 80, storage=storage)


def contents(policy, cache, slot):
    """Everything the cache holds of a sequence that later tokens can read, as floats."""
    slots, config, length = torch.tensor([slot]), policy.config, cache.length(slot)
    window, device = config.sliding_window, torch.device("cpu")
    rows = Rows([length], [1], [0], 1, window, device, cache.target(slots))
    reached = min(length, window - 1)
    kept = [cache.windows.gather(layer, rows)[0, -reached:] for layer in range(config.num_hidden_layers)]
    for layer, main in cache.main.items():
        groups = length // config.ratio(layer)
        kept += [main.gather(slots, groups).dense()[0]] if groups else []
        kept += [cache.index_keys[layer].gather(slots, groups).dense()[0]] if groups else []
    for layer, pending in cache.pending.items():
        still_open = torch.arange(length - length % config.ratio(layer), length)
        kept.append(pending[slot, still_open % pending.shape[1]])
    looked_back = torch.arange(max(0, length - cache.reach), length)
    return [*kept, cache.tail[slot, looked_back % cache.tail.shape[1]]]


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


VARIANTS = pytest.mark.parametrize(
    ("name", "dtype", "fake_quant"),
    [
        ("nano", "float32", False),
        ("nano", "float32", True),
        ("nano", "bfloat16", True),
        ("three_sources", "float32", False),
        ("three_sources", "bfloat16", False),
    ],
)


@VARIANTS
def test_documents_in_any_order_and_number(request, name, dtype, fake_quant):
    policy = make(name, request, dtype, fake_quant)
    documents = draw_documents(LENGTHS)
    alone = [trained(policy, [document])[0] for document in documents]
    assert_same(trained(policy, documents), alone)
    assert_same(trained(policy, documents[::-1]), alone[::-1])
    assert_same(trained(policy, documents * 5)[-6:], alone)
    assert torch.equal(logprobs_of(policy, torch.cat(alone))[41:42], logprobs_of(policy, alone[1]))


@VARIANTS
def test_single_tokens_beside_others_equal_one_training_forward(request, name, dtype, fake_quant):
    policy = make(name, request, dtype, fake_quant)
    documents = draw_documents(LENGTHS)
    expected = trained(policy, documents[::-1])[::-1]
    cache = new_cache(policy, "packed" if fake_quant else "dense")
    slots = [cache.allocate() for _ in documents]
    for at in range(max(LENGTHS)):
        active = [i for i, length in enumerate(LENGTHS) if length > at]
        chunks = [documents[i][at : at + 1] for i in active]
        hidden = extend(policy, cache, [slots[i] for i in active], chunks, padding=at % 3)
        for i, row in zip(active, hidden, strict=True):
            assert torch.equal(row, expected[i][at]), f"document {i}, position {at}"


@pytest.mark.parametrize("fake_quant", [False, True])
@pytest.mark.parametrize("name", ["nano", "three_sources"])
def test_chunks_of_any_size_leave_the_same_cache(request, name, fake_quant):
    policy = make(name, request, fake_quant=fake_quant)
    document = draw_documents([40], seed=2)[0]
    expected = trained(policy, [document])[0]
    runs = [(size, "dense") for size in (40, 1, 3, 7, 33)]
    kept = []
    for size, storage in [*runs, (7, "packed")] if fake_quant else runs:
        cache = new_cache(policy, storage)
        slot = cache.allocate()
        for begin in range(0, 40, size):
            hidden = extend(policy, cache, [slot], [document[begin : begin + size]])
            assert torch.equal(hidden[0], expected[min(begin + size, 40) - 1])
        kept.append(contents(policy, cache, slot))
    for other in kept[1:]:
        assert_same(other, kept[0])


@pytest.mark.parametrize("rows", [2, 7, 33])
def test_a_sequence_alone_and_among_others_of_other_lengths(nano, rows):
    nano.exact = nano.fake_quant = True
    draw = random.Random(rows)
    documents = draw_documents([draw.randint(2, 60) for _ in range(rows)], seed=rows)
    together = new_cache(nano, "packed")
    slots = [together.allocate() for _ in documents]
    cuts = [draw.randint(1, len(document) - 1) for document in documents]
    extend(nano, together, slots, [d[:cut] for d, cut in zip(documents, cuts, strict=True)], padding=3)
    hidden = extend(nano, together, slots, [d[cut:] for d, cut in zip(documents, cuts, strict=True)])
    logprobs = logprobs_of(nano, hidden)
    for i in range(0, rows, 4):
        single = new_cache(nano)
        slot = single.allocate()
        alone = extend(nano, single, [slot], [documents[i]])
        assert torch.equal(alone[0], hidden[i])
        assert torch.equal(logprobs_of(nano, alone)[0], logprobs[i])
        assert_same(contents(nano, single, slot), contents(nano, together, slots[i]))


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_a_fork_and_a_recomputed_sequence_go_on_alike(nano, storage):
    nano.exact = nano.fake_quant = True
    prompt, first, second = draw_documents([37, 9, 21], seed=4)
    cache = new_cache(nano, storage)
    original = cache.allocate()
    extend(nano, cache, [original], [prompt])
    copy = cache.fork(original)
    together = extend(nano, cache, [copy, original], [second, first])
    again = cache.allocate()
    recomputed = extend(nano, cache, [again], [torch.cat([prompt, second])])
    assert torch.equal(together[0], recomputed[0])
    assert_same(contents(nano, cache, copy), contents(nano, cache, again))
    expected = trained(nano, [torch.cat([prompt, first])])[0]
    assert torch.equal(together[1], expected[-1])


@pytest.mark.parametrize(("name", "fake_quant"), [("nano", True), ("three_sources", False)])
def test_a_decoder_that_skips_tokens_equals_a_training_forward_with_its_floors(request, name, fake_quant):
    policy = make(name, request, fake_quant=fake_quant)
    documents = draw_documents([37, 60, 12], seed=6)
    skipped, prefilled = [21, 44, 0], [30, 50, 12]
    floors = [floors_from_starts(len(d), [(0, s)]) for d, s in zip(documents, skipped, strict=True)]
    with torch.no_grad():
        tokens = replace(pack(documents), window_floors=torch.cat(floors))
        expected = policy(tokens).hidden.split([len(document) for document in documents])
    kept = []
    for size in (64, 7, 3):
        cache = new_cache(policy)
        slots = [cache.allocate() for _ in documents]
        done = [0] * 3
        while active := [i for i in range(3) if done[i] < prefilled[i]]:
            ends = {i: min(done[i] + size + i, prefilled[i]) for i in active}
            chunks = [documents[i][done[i] : ends[i]] for i in active]
            start = torch.tensor([skipped[i] for i in active])
            hidden = extend(policy, cache, [slots[i] for i in active], chunks, decode_from=start)
            for i, row in zip(active, hidden, strict=True):
                done[i] = ends[i]
                assert torch.equal(row, expected[i][ends[i] - 1] if ends[i] > skipped[i] else row * 0)
        rest = [document[end:] for document, end in zip(documents[:2], prefilled, strict=False)]
        hidden = extend(policy, cache, slots[:2], rest)
        assert_same(list(hidden), [expected[0][-1], expected[1][-1]])
        kept.append([each for slot in slots for each in contents(policy, cache, slot)])
    assert_same(kept[1], kept[0])
    assert_same(kept[2], kept[0])


@pytest.mark.parametrize("name", ["nano", "three_sources"])
def test_sparse_experts_and_gathered_scores_are_exact_too(request, name, monkeypatch):
    policy = make(name, request)
    monkeypatch.setattr("model.layers.moe._DENSE_UP_TO", 0)
    documents = draw_documents([70, 9, 40])
    alone = [trained(policy, [document])[0] for document in documents]
    monkeypatch.setattr("model.layers.indexer._CHUNK_ELEMENTS", 3000)
    monkeypatch.setattr("model.layers.attention._CHUNK_ELEMENTS", 3000)
    assert_same(trained(policy, documents), alone)


@pytest.mark.parametrize("name", ["nano", "three_sources"])
def test_exact_mode_agrees_with_the_fast_one_in_values_and_gradients(request, name):
    policy = request.getfixturevalue(name)
    documents = draw_documents([45, 20])
    results = []
    for exact in (False, True):
        policy.exact = exact
        policy.zero_grad()
        output = policy(pack(documents), indexer_loss=True)
        loss = policy.logits(output.hidden).log_softmax(-1)[:, 7].sum() + output.aux.indexer_loss
        (loss + output.aux.balance_loss).backward()
        gradients = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
        results.append((output.hidden.detach(), output.aux.expert_load, gradients))
    (fast, fast_load, fast_grads), (exact, exact_load, exact_grads) = results
    torch.testing.assert_close(exact, fast, rtol=1e-4, atol=1e-5)
    assert torch.equal(fast_load, exact_load)
    assert fast_grads.keys() == exact_grads.keys()
    for parameter, gradient in fast_grads.items():
        error = (exact_grads[parameter] - gradient).norm() / gradient.norm().clamp_min(1e-3)
        assert error < 1e-3, parameter


def test_gradients_do_not_switch_exactness_off(nano):
    nano.exact = True
    documents = draw_documents([30, 9, 41])
    with_gradients = nano(pack(documents)).hidden
    assert torch.equal(with_gradients.detach(), torch.cat(trained(nano, documents)))


def test_without_exact_mode_bits_do_depend_on_the_batch(nano):
    documents = draw_documents(LENGTHS)
    alone = torch.cat([trained(nano, [document])[0] for document in documents])
    assert not torch.equal(torch.cat(trained(nano, documents)), alone)
