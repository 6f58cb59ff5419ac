"""A sequence known by its compressed keys alone replays tokens, and its compressed keys stay as they are."""

from dataclasses import replace

import pytest
import torch

from model.cache.policy_cache import CacheFull
from model.config import PolicyConfig
from model.policy import Policy
from model.replay import decode_from, resume_from

CACHED, SUFFIX = 120, 21
CONFIG = replace(PolicyConfig.preset("nano"), sliding_window=8)


@pytest.fixture(params=["dense", "packed"])
def storage(request):
    return request.param


@pytest.fixture
def policy(storage):
    made = Policy(CONFIG)
    made.reset_parameters(6)
    made.fake_quant = storage == "packed"
    return made


def feed(policy, cache, slot, ids, decode_from=None, replayed=None):
    optional = [None if value is None else torch.tensor([value]) for value in (decode_from, replayed)]
    with torch.inference_mode():
        return policy.extend(
            cache,
            torch.tensor([slot]),
            ids[None],
            torch.tensor([len(ids)]),
            decode_from=optional[0],
            replayed=optional[1],
        )[0]


def stored(cache, slot, length):
    stores = (*cache.main.items(), *cache.index_keys.items())
    return [store.read_slot(slot, length // cache.ratios[layer]).clone() for layer, store in stores]


def read(cache, slot, length):
    stores = (*cache.main.items(), *cache.index_keys.items())
    return [
        store.gather(torch.tensor([slot]), length // cache.ratios[layer]).dense() for layer, store in stores
    ]


def adopted(policy, cache, source, ids, resume):
    slot = cache.adopt(CACHED, resume, policy.look_back_ids(ids[:resume]))
    for store, keys in zip(
        (*cache.main.values(), *cache.index_keys.values()), stored(cache, source, CACHED), strict=True
    ):
        store.write_slot(slot, keys)
    return slot


def token_ids(seed=1):
    return torch.randint(0, 64, (CACHED + SUFFIX,), generator=torch.Generator().manual_seed(seed))


def replay(policy, cache, source, ids, mode, size=1000):
    """Adopts the first tokens and runs the rest, in chunks of `size`."""
    resume = resume_from(CONFIG, mode, CACHED, len(ids))
    start = decode_from(CONFIG, mode, len(ids))
    slot = adopted(policy, cache, source, ids, resume)
    before = read(cache, slot, CACHED)
    assert (cache.length(slot), cache.floors(slot)[0]) == (CACHED, resume)
    for at in range(resume, len(ids), size):
        chunk = ids[at : at + size]
        counted = min(max(CACHED - at, 0), len(chunk))
        hidden = feed(policy, cache, slot, chunk, start, counted)
    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(read(cache, slot, CACHED), before, strict=True)
    )
    return slot, hidden


def uninterrupted(policy, cache, ids):
    slot = cache.allocate()
    return slot, feed(policy, cache, slot, ids)


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_exact_replay_restores_the_sequence(policy, storage, mode):
    ids, cache = token_ids(), policy.new_cache(3, 160, storage=storage)
    source, expected = uninterrupted(policy, cache, ids)
    assert 0 < resume_from(CONFIG, "exact", CACHED, len(ids)) < CACHED - CONFIG.sliding_window
    slot, hidden = replay(policy, cache, source, ids, mode)
    near = 1e-5 if storage == "dense" else 1e-2
    assert torch.allclose(hidden, expected, atol=near)
    for token in token_ids(3)[:12].split(1):
        assert torch.allclose(feed(policy, cache, slot, token), feed(policy, cache, source, token), atol=near)


@pytest.mark.parametrize("size", [1, 5, 8, 13])
def test_bounded_replay_does_not_depend_on_chunks(policy, storage, size):
    ids, cache = token_ids(2), policy.new_cache(3, 160, storage=storage)
    source, exact = uninterrupted(policy, cache, ids)
    _, whole = replay(policy, cache, source, ids, "bounded")
    slot, chunked = replay(policy, cache, source, ids, "bounded", size)
    assert torch.allclose(whole, chunked, atol=1e-5 if storage == "dense" else 1e-2)
    assert (whole - exact).abs().max() > 1e-3
    floors = cache.floors(slot)
    assert floors == (CACHED - CONFIG.sliding_window, len(ids) - CONFIG.sliding_window)


def test_n_grams_look_back_to_the_true_ids(policy, storage):
    ids, cache = token_ids(), policy.new_cache(3, 160, storage=storage)
    source, _ = uninterrupted(policy, cache, ids)
    other = ids.clone()
    resume = resume_from(CONFIG, "bounded", CACHED, len(ids))
    other[resume - 1] = (other[resume - 1] + 1) % 64
    right = feed(policy, cache, adopted(policy, cache, source, ids, resume), ids[resume : resume + 1])
    wrong = feed(policy, cache, adopted(policy, cache, source, other, resume), ids[resume : resume + 1])
    assert (right - wrong).abs().max() > 1e-4


def test_what_does_not_fit_is_refused(policy, storage):
    cache, ids = policy.new_cache(2, 160, storage=storage), token_ids()
    for length, resume, tail in ((7, 4, ids[:4]), (0, 0, None), (8, 9, ids[:9]), (8, -1, None)):
        with pytest.raises(ValueError, match="multiple of 2"):
            cache.adopt(length, resume, tail)
    with pytest.raises(ValueError, match="look back 3 tokens"):
        cache.adopt(8, 8, ids[:2])
    with pytest.raises(CacheFull, match="room for 160"):
        cache.adopt(162, 162, ids)
    assert cache.free_slots == 2
    slot = cache.adopt(8, 4, policy.look_back_ids(ids[:4]))
    with pytest.raises(ValueError, match=r"\[4\] are counted in the cache already, not \[2\]"):
        feed(policy, cache, slot, ids[4:12], replayed=2)
    feed(policy, cache, slot, ids[4:12], replayed=4)
    assert cache.length(slot) == 12
    with pytest.raises(ValueError, match=r"can be cut to 8 \.\. 12"):
        cache.truncate(slot, 7)
