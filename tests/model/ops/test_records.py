import pytest
import torch

from model.ops.records import pack, record_bytes, unpack


def test_record_sizes_give_the_published_bytes_a_token():
    assert record_bytes("main", 512) == 288
    assert record_bytes("window", 512) == 528
    assert record_bytes("index", 128) == 68
    assert 2.5 * (record_bytes("main", 512) + record_bytes("index", 128)) == 890


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (0.25, 0),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (3.5, 4),
        (5.0, 4),
        (5.1, 6),
        (-2.5, -2),
        (0.3, 0.5),
    ],
)
def test_main_record_rounds_to_nearest_with_ties_to_even(value, stored):
    keys = torch.zeros(1, 64)
    keys[0, :16] = 6.0  # a scale of exactly 1
    keys[0, 3] = value
    assert unpack("main", pack("main", keys))[0, 3] == stored


def test_main_record_clips_when_the_scale_was_rounded_down():
    keys = torch.zeros(1, 64)
    keys[0, 0] = 6 * 1.06  # scale 1.06 rounds to 1
    assert unpack("main", pack("main", keys))[0, 0] == 6.0


def test_main_record_keeps_channels_and_halves_apart():
    keys = torch.zeros(2, 64)
    keys[0, 0], keys[0, 32], keys[1, 63] = 6.0, -6.0, 3.0
    assert torch.equal(unpack("main", pack("main", keys)), keys)
    codes = pack("main", keys)[0, 0].item()
    assert codes & 15 == 7 and codes >> 4 == 15


@pytest.mark.parametrize("kind", ["main", "index", "window"])
def test_unpacked_records_are_exact_in_bf16_and_packing_them_again_changes_nothing(kind):
    torch.manual_seed(0)
    keys = torch.randn(64, 128) * torch.exp2(torch.randint(-10, 6, (64, 1)).float())
    stored = unpack(kind, pack(kind, keys))
    assert torch.equal(stored.bfloat16().float(), stored)
    if kind != "main":  # a main scale is amax / 6 rounded, so a second scale may differ
        assert torch.equal(unpack(kind, pack(kind, stored)), stored)
    assert (stored - keys).norm() / keys.norm() < (0.03 if kind == "window" else 0.13)


def test_power_of_two_scales_are_at_or_above_the_largest_value():
    keys = torch.zeros(3, 64)
    keys[:, 0] = torch.tensor([6.0, 6.1, 448.0])
    assert pack("index", keys)[:, 32].tolist() == [127, 128, 127 + 7]
    assert pack("window", keys)[2, 64].item() == 127


def test_wrong_records_are_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        unpack("main", torch.zeros(2, 287, dtype=torch.uint8))
    with pytest.raises(ValueError, match="unknown kind"):
        record_bytes("swa", 512)
