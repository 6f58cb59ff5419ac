"""A slot leaves one cache and goes on in another with the same bits."""

import random
from dataclasses import replace

import pytest
import torch

from model.cache.policy_cache import CacheFull
from model.config import PolicyConfig
from model.policy import Policy

CONFIG = replace(PolicyConfig.preset("nano"), sliding_window=8)


@pytest.fixture(params=["dense", "packed"])
def storage(request):
    return request.param


@pytest.fixture
def policy():
    made = Policy(CONFIG)
    made.reset_parameters(7)
    made.fake_quant = True
    return made


def feed(policy, cache, slot, ids, decode_from=None):
    start = None if decode_from is None else torch.tensor([decode_from])
    with torch.inference_mode():
        return policy.extend(
            cache, torch.tensor([slot]), torch.tensor([ids]), torch.tensor([len(ids)]), decode_from=start
        )[0]


def drawn(draw, count):
    return [draw.randrange(64) for _ in range(count)]


@pytest.mark.parametrize("seed", range(8))
def test_a_moved_sequence_goes_on_bit_for_bit(policy, storage, seed):
    draw = random.Random(seed)
    here, there = (policy.new_cache(3, 160, storage=storage) for _ in range(2))
    there.allocate()
    slot = here.allocate()
    for _ in range(draw.randint(1, 4)):
        end = here.length(slot) + (count := draw.choice([1, 2, 9, 30]))
        feed(policy, here, slot, drawn(draw, count), draw.choice([None, end - 4, end + 1]))
    if draw.random() < 0.5:
        feed(policy, here, slot, drawn(draw, 5))
        here.truncate(slot, here.length(slot) - 4)
    moved = there.import_slot(here.export_slot(slot))
    assert there.progress(moved) == here.progress(slot)
    for step in range(12):
        ids = drawn(draw, draw.choice([1, 1, 3]))
        assert torch.equal(feed(policy, here, slot, ids), feed(policy, there, moved, ids))
        if step == 6:
            for cache, which in ((here, slot), (there, moved)):
                cache.truncate(which, cache.length(which) - 1)


def test_a_state_is_a_copy(policy, storage):
    cache = policy.new_cache(2, 64, storage=storage)
    slot = cache.allocate()
    feed(policy, cache, slot, list(range(20)))
    state = cache.export_slot(slot)
    kept = {name: value.clone() for name, value in state.items()}
    feed(policy, cache, slot, list(range(20)))
    assert all(torch.equal(kept[name], value) for name, value in state.items())


def test_what_does_not_fit_is_refused(policy, storage):
    cache = policy.new_cache(2, 64, storage=storage)
    slot = cache.allocate()
    feed(policy, cache, slot, list(range(40)))
    state = cache.export_slot(slot)
    with pytest.raises(ValueError, match=r"missing \['v1.tail'\], unexpected \['v2.tail'\]"):
        cache.import_slot({name.replace("v1.tail", "v2.tail"): value for name, value in state.items()})
    with pytest.raises(ValueError, match=r"v1\.main\.3 is"):
        cache.import_slot(state | {"v1.main.3": state["v1.main.3"][:-1]})
    with pytest.raises(ValueError, match=r"v1\.pending\.1 is .*float64"):
        cache.import_slot(state | {"v1.pending.1": state["v1.pending.1"].double()})
    other = "dense" if storage == "packed" else "packed"
    with pytest.raises(ValueError, match="same configuration, storage"):
        policy.new_cache(2, 64, storage=other).import_slot(state)
    broken = state["v1.progress"].clone()
    broken[2] = 41
    with pytest.raises(ValueError, match="contradicts itself"):
        cache.import_slot(state | {"v1.progress": broken})
    with pytest.raises(CacheFull, match="room for 32"):
        policy.new_cache(2, 32, storage=storage).import_slot(state)
    assert cache.free_slots == 1
