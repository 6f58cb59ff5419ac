"""Packed and dense caches give the same bits, also through forks, padding and both attention paths."""

import random
from dataclasses import replace

import pytest
import torch

from model.cache.main_kv import PackedGroupCache
from model.cache.policy_cache import CacheFull, PolicyCache
from model.config import PolicyConfig
from model.policy import Policy


def extend(policy, cache, slots, rows):
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    with torch.inference_mode():
        return policy.extend(cache, torch.tensor(slots), ids, torch.tensor([len(row) for row in rows]))


def both(policy, sequences, tokens, **options):
    policy.fake_quant = True
    return policy.new_cache(sequences, tokens), policy.new_cache(
        sequences, tokens, storage="packed", **options
    )


@pytest.mark.parametrize("name", ["nano", "three_sources"])
@pytest.mark.parametrize("dense_limit", [1024, 0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_equals_dense_bit_for_bit(request, name, dense_limit, dtype):
    policy = Policy(replace(request.getfixturevalue(name).config, dtype=dtype))
    policy.reset_parameters(8)
    policy.dense_limit = dense_limit
    dense, packed = both(policy, 4, 150)
    draw = random.Random(3)
    slots = [dense.allocate() for _ in range(3)]
    assert [packed.allocate() for _ in range(3)] == slots
    for step in range(9):
        rows = [[draw.randrange(64) for _ in range(draw.choice([1, 1, 2, 5, 19]))] for _ in slots]
        ours, theirs = extend(policy, packed, slots, rows), extend(policy, dense, slots, rows)
        assert torch.isfinite(ours).all() and torch.equal(ours, theirs)
        if step in (2, 5):
            for cache in (dense, packed):
                cache.free(slots[0])
            copies = {cache.fork(slots[1]) for cache in (dense, packed)}
            slots = [*slots[1:], copies.pop()]
            assert not copies


def test_a_packed_cache_is_refused_without_rounding(nano):
    cache = nano.new_cache(1, 8, storage="packed")
    cache.allocate()
    with pytest.raises(ValueError, match="fake_quant"):
        extend(nano, cache, [0], [[1]])
    assert cache.length(0) == 0


def test_forks_share_pages_until_they_write(nano):
    dense, cache = both(nano, 4, 256)
    slot = cache.allocate()
    assert dense.allocate() == slot
    prompt = [index % 64 for index in range(100)]
    assert torch.equal(extend(nano, dense, [slot], [prompt]), extend(nano, cache, [slot], [prompt]))
    free = cache.pages.free_pages
    forks = [cache.fork(slot) for _ in range(3)]
    assert forks == [dense.fork(slot) for _ in range(3)]
    assert cache.pages.free_pages == free
    for step in range(3):
        tokens = [[token + step] for token in range(4)]
        ours, theirs = (extend(nano, each, [slot, *forks], tokens) for each in (cache, dense))
        assert torch.equal(ours, theirs)
    # The page they write into: one keeps it, three copy it. The full page before it stays shared by all.
    assert cache.pages.free_pages == free - 3
    assert cache.pages.references(cache.pages.owned(slot)[0]) == 4
    again = cache.pages.owned(slot)
    for fork in forks:
        cache.free(fork)
    assert cache.pages.free_pages == free and cache.pages.owned(slot) == again


def test_running_out_of_pages_changes_nothing(nano):
    _, cache = both(nano, 3, 256, pages=3)
    first, second = cache.allocate(), cache.allocate()
    extend(nano, cache, [first, second], [[1] * 60, [2] * 70])
    before = [store.storage.clone() for store in cache.main.values()]
    with pytest.raises(CacheFull, match="2 pages are needed and 0 are free"):
        extend(nano, cache, [first, second], [[1] * 5, [1] * 59])
    assert (cache.length(first), cache.length(second)) == (60, 70)
    assert all(torch.equal(a, store.storage) for a, store in zip(before, cache.main.values(), strict=True))
    cache.free(second)
    extend(nano, cache, [first], [[1] * 100])
    assert cache.pages.free_pages == 0


def test_a_copy_on_write_needs_a_page_too(nano):
    _, cache = both(nano, 2, 64, pages=1)
    slot = cache.allocate()
    extend(nano, cache, [slot], [[1] * 10])
    fork = cache.fork(slot)
    with pytest.raises(CacheFull, match="1 pages are needed"):
        extend(nano, cache, [fork], [[1]])
    cache.free(slot)
    extend(nano, cache, [fork], [[1]])


def test_a_slot_used_again_reads_no_earlier_pages(nano):
    _, cache = both(nano, 2, 128)
    slot = cache.allocate()
    fresh = extend(nano, cache, [slot], [[3, 4, 5]])
    extend(nano, cache, [slot], [[7] * 100])
    cache.free(slot)
    assert cache.allocate() == slot
    assert torch.equal(extend(nano, cache, [slot], [[3, 4, 5]]), fresh)


def test_token_by_token_from_the_first_on(three_sources):
    """The first token closes no group: there is no compressed key to read yet."""
    dense, packed = both(three_sources, 2, 70)
    slots = [dense.allocate(), dense.allocate()]
    assert slots == [packed.allocate(), packed.allocate()]
    for token in range(70):
        rows = [[token % 64], [(3 * token) % 64]]
        assert torch.equal(*(extend(three_sources, cache, slots, rows) for cache in (dense, packed)))


@pytest.mark.parametrize("options", [{"storage": "fp8"}, {"pages": 4}, {"storage": "packed", "pages": 0}])
def test_unusable_storage_is_refused(nano, options):
    with pytest.raises(ValueError, match=r"storage|pages"):
        nano.new_cache(2, 8, **options)


def test_bytes_follow_the_widths():
    config = PolicyConfig.preset("nano")
    cache = PolicyCache(config, 2, 64, torch.float32, torch.device("cpu"), "packed")
    assert all(isinstance(store, PackedGroupCache) for store in cache.main.values())
    # Two pages and the null page; ratios 2 and 1; 32 channels: 16 + 2 bytes a main key, 16 + 1 an index key.
    assert {layer: store.nbytes for layer, store in cache.main.items()} == {1: 3 * 32 * 18, 3: 3 * 64 * 18}
    assert {layer: store.nbytes for layer, store in cache.index_keys.items()} == {
        1: 3 * 32 * 17,
        3: 3 * 64 * 17,
    }
    assert cache.windows.nbytes == 6 * 2 * (16 + 8) * 33
    assert isinstance(Policy(config).new_cache(2, 64), PolicyCache)
