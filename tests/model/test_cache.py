import pytest
import torch

from model.cache.policy_cache import CacheFull


def extend(policy, cache, slot, ids):
    with torch.inference_mode():
        return policy.extend(cache, torch.tensor([slot]), torch.tensor([ids]), torch.tensor([len(ids)]))[0]


def test_a_fork_continues_like_its_origin_and_leaves_it_alone(nano):
    cache = nano.new_cache(4, 64)
    slot = cache.allocate()
    history = torch.arange(23).tolist()
    extend(nano, cache, slot, history)
    fork = cache.fork(slot)
    assert cache.length(fork) == cache.length(slot) == 23
    extend(nano, cache, fork, [9, 8, 7])
    ours = extend(nano, cache, slot, [1, 2])
    fresh = cache.allocate()
    assert torch.allclose(ours, extend(nano, cache, fresh, [*history, 1, 2]), atol=1e-5)
    same = _filled(nano, cache, [*history, 9, 8, 7])
    assert torch.allclose(extend(nano, cache, fork, [6]), extend(nano, cache, same, [6]), atol=1e-5)


def _filled(policy, cache, ids):
    slot = cache.allocate()
    extend(policy, cache, slot, ids)
    return slot


def test_a_slot_used_again_remembers_nothing(nano):
    cache = nano.new_cache(1, 64)
    first = cache.allocate()
    fresh = extend(nano, cache, first, [3, 4, 5])
    extend(nano, cache, first, list(range(40)))
    cache.free(first)
    again = cache.allocate()
    assert again == first and cache.length(again) == 0
    assert torch.equal(extend(nano, cache, again, [3, 4, 5]), fresh)


def test_rows_of_a_batch_do_not_disturb_each_other(nano):
    cache = nano.new_cache(3, 64)
    slots = torch.tensor([cache.allocate() for _ in range(3)])
    ids = torch.randint(0, 64, (3, 9))
    with torch.inference_mode():
        together = nano.extend(cache, slots.flip(0), ids, torch.tensor([9, 1, 4]))
    other = nano.new_cache(3, 64)
    for row, length in enumerate([9, 1, 4]):
        assert torch.allclose(
            extend(nano, other, other.allocate(), ids[row, :length].tolist()), together[row], atol=1e-5
        )


def test_refusals_say_what_to_do_and_write_nothing(nano):
    cache = nano.new_cache(2, 8)
    slot = cache.allocate()
    extend(nano, cache, slot, [1, 2, 3])
    with pytest.raises(CacheFull, match="room for 8"):
        extend(nano, cache, slot, [1] * 6)
    assert cache.length(slot) == 3
    with pytest.raises(ValueError, match="not allocated"):
        extend(nano, cache, 1 - slot, [1])
    with pytest.raises(ValueError, match="twice"):
        nano.extend(
            cache, torch.tensor([slot, slot]), torch.ones(2, 1, dtype=torch.int64), torch.ones(2).long()
        )
    with pytest.raises(ValueError, match="lengths"):
        nano.extend(cache, torch.tensor([slot]), torch.ones(1, 2, dtype=torch.int64), torch.tensor([3]))
    cache.allocate()
    with pytest.raises(CacheFull, match="all 2 slots"):
        cache.allocate()
    cache.free(slot)
    with pytest.raises(ValueError, match="not allocated"):
        cache.free(slot)
    with pytest.raises(ValueError, match="needs room"):
        nano.new_cache(0, 8)
