"""Choices recorded while sampling are those of the training forward, whatever its own router would choose."""

import pytest
import torch

from model.choices import FREE, Capture, Choices
from model.policy import PackedTokens

LENGTHS = [45, 7, 30]


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS]


def pack(documents, choices=None):
    bounds = torch.tensor([0, *map(len, documents)]).cumsum(0)
    return PackedTokens(torch.cat(documents), bounds, choices=choices)


def captured(policy, documents, sizes=(16, 1, 5)):
    """Choices of every document, recorded while it is fed to a cache in chunks."""
    found = []
    with torch.no_grad():
        for document in documents:
            cache, parts, begin = policy.new_cache(1, 80), [], 0
            slots = torch.tensor([cache.allocate()])
            while begin < len(document):
                chunk = document[begin : begin + sizes[len(parts) % len(sizes)]]
                capture = Capture(selections_too=True)
                policy.extend(cache, slots, chunk[None], torch.tensor([len(chunk)]), capture=capture)
                parts.append(capture)
                begin += len(chunk)
            found += parts
    layers = found[0].selections
    return Choices(
        torch.cat([part.expert_ids for part in found]),
        {layer: torch.cat([part.selections[layer] for part in found]) for layer in layers},
    )


def perturb(policy, scale=3.0):
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for block in policy.blocks:
            noise = torch.randn(block.ffn.gate.weight.shape, generator=generator)
            block.ffn.gate.weight.add_(noise * scale * block.ffn.gate.weight.std())
            if hasattr(block.attn, "indexer"):
                weight = block.attn.indexer.wq_b.weight
                weight.add_(torch.randn(weight.shape, generator=generator) * scale * weight.std())


def chosen(policy, tokens):
    capture = Capture(selections_too=True)
    output = policy(tokens, capture=capture)
    return output, capture


@pytest.mark.parametrize("name", ["nano", "three_sources"])
def test_the_training_forward_takes_the_sampler_s_choices(request, name, documents):
    policy = request.getfixturevalue(name)
    recorded = captured(policy, documents)
    perturb(policy)
    _, free = chosen(policy, pack(documents))
    _, forced = chosen(policy, pack(documents, recorded))
    assert (free.expert_ids != recorded.expert_ids).any()
    assert torch.equal(forced.expert_ids, recorded.expert_ids)
    assert forced.selections.keys() == set(policy.config.index_source_layer_ids)
    assert any((free.selections[layer] != index).any() for layer, index in recorded.selections.items())
    for layer, index in recorded.selections.items():
        assert torch.equal(forced.selections[layer], index)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["nano", "three_sources"])
def test_own_choices_change_nothing(request, name, exact, documents):
    policy = request.getfixturevalue(name)
    policy.exact = exact
    free, capture = chosen(policy, pack(documents))
    forced, again = chosen(policy, pack(documents, capture.choices()))
    assert torch.equal(free.hidden, forced.hidden)
    assert torch.equal(free.aux.expert_load, forced.aux.expert_load)
    assert torch.equal(capture.expert_ids, again.expert_ids)


def test_capture_in_a_cache_sees_the_choices_of_the_training_forward(nano, documents):
    nano.exact = True
    recorded = captured(nano, documents)
    _, capture = chosen(nano, pack(documents))
    assert torch.equal(capture.expert_ids, recorded.expert_ids)
    for layer, index in recorded.selections.items():
        assert torch.equal(capture.selections[layer], index)


def test_a_layer_that_a_token_did_not_run_through_chose_nothing(nano, documents):
    document, start = documents[0], nano.config.decoder_start
    _, whole = chosen(nano, pack([document]))
    cache, parts = nano.new_cache(1, 80), []
    slots = torch.tensor([cache.allocate()])
    with torch.no_grad():
        for begin, end in ((0, 20), (20, 45)):
            capture = Capture(selections_too=True)
            ids, lengths = document[None, begin:end], torch.tensor([end - begin])
            nano.extend(cache, slots, ids, lengths, decode_from=torch.tensor([30]), capture=capture)
            parts.append(capture)
    experts = torch.cat([part.expert_ids for part in parts])
    assert torch.equal(experts[:, :start], whole.expert_ids[:, :start])
    assert (experts[:30, start:] == FREE).all() and (experts[30:, start:] != FREE).all()
    for layer in nano.config.index_source_layer_ids:
        index = torch.cat([part.selections[layer] for part in parts])
        assert index.shape == whole.selections[layer].shape
        assert (index[:30] == FREE).all() == (layer >= start)
    nano(pack([document], Choices(experts)))


def test_choices_can_be_forced_in_a_cache_too(nano, documents):
    document = documents[0]
    _, own = chosen(nano, pack([document]))
    wanted = Choices((own.expert_ids + 1) % 4, own.selections)
    cache, capture = nano.new_cache(1, 80), Capture(selections_too=True)
    ids, lengths = document[None], torch.tensor([45])
    with torch.no_grad():
        slots = torch.tensor([cache.allocate()])
        hidden = nano.extend(cache, slots, ids, lengths, choices=wanted, capture=capture)
        expected = nano(pack([document], wanted)).hidden[-1]
    assert torch.equal(capture.expert_ids, wanted.expert_ids)
    torch.testing.assert_close(hidden[0], expected, rtol=1e-4, atol=1e-5)


def test_forced_experts_are_weighted_by_their_affinities_and_pass_gradients(nano, documents):
    router, x = nano.blocks[2].ffn.gate, torch.randn(6, 64)
    forced = torch.tensor([[3, 0], [1, 2], [FREE, FREE], [0, 1], [2, 3], [FREE, FREE]])
    routing = router(x, None, forced)
    own = router(x, None)
    affinity = torch.nn.functional.softplus(x @ router.weight.T).sqrt()
    for token in range(6):
        ids = own.expert_ids[token] if forced[token, 0] == FREE else forced[token]
        assert torch.equal(routing.expert_ids[token], ids)
        expected = affinity[token, ids] / affinity[token, ids].sum() * router.factor
        torch.testing.assert_close(routing.weights[token], expected)
    routing.weights[:2, 0].sum().backward()
    assert router.weight.grad[[3, 0, 1, 2]].abs().sum(-1).min() > 0


def test_free_rows_choose_for_themselves(nano, documents):
    _, own = chosen(nano, pack(documents))
    ids = torch.full_like(own.expert_ids, FREE)
    ids[:10] = (own.expert_ids[:10] + 1) % 4
    _, mixed = chosen(nano, pack(documents, Choices(ids)))
    assert torch.equal(mixed.expert_ids[:10], ids[:10])
    assert torch.equal(mixed.expert_ids[45:], own.expert_ids[45:])


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (Choices(torch.zeros(3, 6, 2, dtype=torch.int64)), "same configuration and tokens"),
        (Choices(torch.full((82, 6, 2), 4)), "outside 0..3"),
        (Choices(torch.tensor([0, FREE]).expand(82, 6, 2)), "all of a layer's or none"),
        (Choices(None, {1: torch.zeros(80, 8, dtype=torch.int64)}), "same tokens"),
        (Choices(None, {1: torch.zeros(82, 8, dtype=torch.int64)}), "cannot see"),
        (Choices(None, {3: torch.full((82, 9), FREE)}), "more than 8 keys"),
    ],
)
def test_choices_of_another_pass_are_refused(nano, documents, choices, message):
    with pytest.raises(ValueError, match=message):
        nano(pack(documents, choices))
