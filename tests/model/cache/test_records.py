"""A record decodes to what the rounding of a forward pass gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.cache.records import INDEX, MAIN, WINDOW
from model.quant.blocks import round_index, round_main, round_window

KINDS = {"main": (MAIN, round_main), "index": (INDEX, round_index), "window": (WINDOW, round_window)}


def same_bits(ours, theirs):
    kind = torch.int32 if ours.dtype is torch.float32 else torch.int16
    return torch.equal(ours.view(kind), theirs.view(kind))


def test_record_sizes_are_the_published_ones():
    sizes = {
        record.name: (record.code_bytes(c), record.scale_bytes(c))
        for record, c in [(MAIN, 512), (INDEX, 128), (WINDOW, 512)]
    }
    assert sizes == {"main": (256, 32), "index": (64, 4), "window": (512, 16)}
    assert MAIN.code_bytes(8) == 4 and MAIN.scale_bytes(8) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 32, 64, 512])
def test_decoding_gives_the_rounded_value_bit_for_bit(kind, dtype, width):
    record, rounding = KINDS[kind]
    generator = torch.Generator().manual_seed(width)
    magnitude = torch.exp2(torch.randint(-14, 14, (400, width), generator=generator).float())
    x = (torch.randn(400, width, generator=generator) * magnitude).to(dtype)
    x[0], x[1, ::2], x[2] = 0.0, -0.0, 448 * 6
    codes, scales = record.encode(x)
    assert codes.dtype is scales.dtype is torch.uint8
    assert codes.shape == (400, record.code_bytes(width)) and scales.shape == (400, record.scale_bytes(width))
    assert same_bits(record.decode(codes, scales, dtype), rounding(x))


@pytest.mark.parametrize("kind", ["index", "window"])
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-40, 20))
def test_index_and_window_records_of_rounded_keys_decode_to_them(kind, seed, exponent):
    record, rounding = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 1, (8, 64), generator=generator).float() + exponent)
    rounded = rounding(torch.randn(8, 64, generator=generator) * spread)
    assert same_bits(record.decode(*record.encode(rounded), torch.float32), rounded)


def test_a_main_key_rounded_before_it_is_packed_would_not_survive():
    """Why packed storage is given main keys before their rounding."""
    x = torch.full((1, 16), 4.5 * 2.0**-8)
    rounded = round_main(x)
    assert torch.equal(MAIN.decode(*MAIN.encode(x), torch.float32), rounded)
    assert not torch.equal(MAIN.decode(*MAIN.encode(rounded), torch.float32), rounded)


@pytest.mark.parametrize("kind", ["main", "window"])
def test_a_broken_key_stays_visible(kind):
    record, _ = KINDS[kind]
    x = torch.ones(1, 32)
    x[0, 3] = torch.nan
    assert record.decode(*record.encode(x), torch.float32)[0, :16].isnan().any()
