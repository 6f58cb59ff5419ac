"""The drafter's ring."""

from dataclasses import replace

import pytest
import torch

from model.cache.draft import DraftWindow
from model.config import PolicyConfig
from model.policy import Policy
from model.quant.blocks import round_window

CONFIG = replace(PolicyConfig.preset("nano_draft"), sliding_window=5)
BLOCKS, WIDTH = 3, CONFIG.head_dim


def window(rows=3, storage="dense"):
    return DraftWindow(CONFIG, rows, torch.float32, torch.device("cpu"), storage)


def keys_at(positions):
    """[blocks, B, L, c], told apart by position and block."""
    block = torch.arange(BLOCKS)[:, None, None, None] * 100
    return (positions[None, :, :, None] + block).float().expand(-1, -1, -1, WIDTH)


def append(made, rows, lengths):
    rows, lengths = torch.tensor(rows), torch.tensor(lengths)
    positions = made.next[rows][:, None] + torch.arange(int(lengths.max()))
    made.append(rows, keys_at(positions), lengths)


def held(made, row):
    """Positions in a window, by what its keys say."""
    rows = torch.tensor([row])
    keys, blocked = made.gather(rows)[:, 0], made.blocked(rows)[0]
    assert torch.equal(
        keys[2, :, 0] - keys[0, :, 0], torch.where(blocked, keys[2, :, 0] - keys[0, :, 0], 200.0)
    )
    return sorted(int(p) for p in keys[0, :, 0][~blocked])


def test_it_holds_the_last_positions():
    made = window()
    assert held(made, 0) == []
    append(made, [0, 2], [3, 7])
    assert held(made, 0) == [0, 1, 2] and held(made, 1) == [] and held(made, 2) == [2, 3, 4, 5, 6]
    append(made, [2, 0], [1, 4])
    assert held(made, 0) == [2, 3, 4, 5, 6] and held(made, 2) == [3, 4, 5, 6, 7]
    append(made, [0, 2], [0, 1])
    assert held(made, 0) == [2, 3, 4, 5, 6] and held(made, 2) == [4, 5, 6, 7, 8]


def test_a_gap_empties_it():
    made = window()
    append(made, [0, 1], [4, 4])
    made.begin(torch.tensor([0, 1]), torch.tensor([4, 6]))
    append(made, [0, 1], [2, 2])
    assert held(made, 0) == [1, 2, 3, 4, 5] and held(made, 1) == [6, 7]


def test_taking_back_loses_what_was_overwritten():
    made = window()
    append(made, [0], [9])
    made.truncate(0, 7)
    assert held(made, 0) == [4, 5, 6]
    made.truncate(0, 8)
    assert held(made, 0) == [4, 5, 6]
    append(made, [0], [1])
    assert held(made, 0) == [4, 5, 6, 7]
    made.truncate(0, 2)
    assert held(made, 0) == []


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_copies_are_the_same_bits(storage):
    made = window(storage=storage)
    rounded = round_window(torch.randn(BLOCKS, 1, 8, WIDTH, generator=torch.Generator().manual_seed(0)))
    made.append(torch.tensor([1]), rounded, torch.tensor([8]))
    made.copy(1, 2)
    made.clear(1)
    assert made.blocked(torch.tensor([1])).all() and not made.blocked(torch.tensor([2])).any()
    places = torch.arange(3, 8) % 5
    assert torch.equal(made.gather(torch.tensor([2]))[:, 0, places], rounded[:, 0, 3:])


def test_packed_keys_take_a_byte_a_channel():
    dense, packed = window(storage="dense"), window(storage="packed")
    assert packed.nbytes * WIDTH * 4 == dense.nbytes * (WIDTH + 1)


def test_a_policys_cache_has_one_a_slot_when_it_has_a_drafter():
    policy = Policy(CONFIG)
    cache = policy.new_cache(2, 16)
    assert cache.draft is not None and cache.draft.next.tolist() == [0, 0]
    assert Policy(PolicyConfig.preset("nano")).new_cache(2, 16).draft is None
