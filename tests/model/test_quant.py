import torch
from hypothesis import given
from hypothesis import strategies as st

from model.quant import blocks, e2m1, e4m3, ue8m0
from model.quant.weights import as_pairs, as_words, decode_fp4, decode_fp8, encode_fp4, encode_fp8

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
EVEN = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def test_e2m1_rounds_ties_to_even_and_keeps_the_sign_of_zero():
    ties = torch.tensor(list(EVEN))
    assert e2m1.round_to_grid(ties).tolist() == list(EVEN.values())
    assert e2m1.round_to_grid(-ties).tolist() == [-value for value in EVEN.values()]
    assert torch.signbit(e2m1.round_to_grid(torch.tensor([-0.0, -0.1, 0.0, 0.1]))).tolist() == [
        True,
        True,
        False,
        False,
    ]


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_e2m1_takes_the_nearest_value(values):
    x = torch.tensor(values)
    rounded = e2m1.round_to_grid(x)
    nearest = (x.clamp(-6, 6).abs()[:, None] - GRID).abs().amin(1)
    assert torch.equal((x.clamp(-6, 6) - rounded).abs(), nearest)


def test_e2m1_codes_and_packing_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(codes)), codes)
    assert torch.equal(e2m1.unpack(e2m1.pack(codes)), codes)
    assert e2m1.pack(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [1 | 2 << 4]


def test_ue8m0_bytes_are_powers_of_two():
    byte = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(ue8m0.encode(ue8m0.decode(byte)), byte)
    assert ue8m0.decode(torch.tensor([127, 130], dtype=torch.uint8)).tolist() == [1.0, 8.0]
    assert ue8m0.round_up(torch.tensor([1.0, 1.0000001, 3.0, 0.3])).tolist() == [1.0, 2.0, 4.0, 0.5]


def test_e4m3_saturates():
    assert e4m3.round_to_grid(torch.tensor([500.0, -1e9, 448.0])).tolist() == [448.0, -448.0, 448.0]


@given(st.integers(0, 10_000), st.sampled_from([1e-6, 1e-3, 1.0, 1e3]))
def test_rounding_is_idempotent_and_close(seed, size):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)) * size
    for rounding, step in ((blocks.round_main, 0.3), (blocks.round_window, 0.07), (blocks.round_index, 0.3)):
        rounded = rounding(x)
        if 1e-3 <= size <= 1:
            assert (rounded - x).abs().max() <= step * x.abs().max()
        assert torch.equal(blocks.round_window(blocks.round_window(x)), blocks.round_window(x))


def test_straight_through_rounds_forward_and_passes_gradients_unchanged():
    x = torch.randn(4, 32, requires_grad=True)
    rounded = blocks.straight_through(x, blocks.round_index)
    assert torch.equal(rounded, blocks.round_index(x))
    weight = torch.randn(4, 32)
    (rounded * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_a_narrow_vector_is_one_block():
    x = torch.randn(5, 16)
    assert torch.equal(
        blocks.round_window(x), blocks.round_window(torch.cat([x, torch.zeros(5, 16)], 1))[:, :16]
    )


@given(st.integers(1, 70), st.sampled_from([32, 64, 96]), st.integers(0, 1000))
def test_stored_weights_decode_to_the_values_they_were_encoded_from(rows, columns, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    for tile in ((32, 32), (1, 32)):
        once = decode_fp8(*encode_fp8(weight, tile), tile)
        assert (once - weight).abs().max() <= 0.07 * weight.abs().max()
        assert torch.equal(decode_fp8(*encode_fp8(once, tile), tile), once)
        assert torch.equal(once.to(torch.bfloat16).float(), once)
    once = decode_fp4(*encode_fp4(weight))
    assert torch.equal(decode_fp4(*encode_fp4(once)), once)
    assert torch.equal(once.to(torch.bfloat16).float(), once)


def test_the_order_in_words_holds_the_same_codes():
    packed = torch.randint(0, 256, (3, 5, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    words = as_words(packed)
    assert words.shape == packed.shape and words.dtype is torch.uint8
    halves, codes = words.view(torch.int16).int() & 0xFFFF, e2m1.unpack(packed).int()
    for word, half in ((0, 0), (1, 1), (5, 0), (15, 1)):
        bits, first = halves[..., 2 * word + half], word // 4 * 32 + 16 * half + word % 4
        for column, shift in ((0, 0), (4, 3), (8, 6)):
            found = codes[..., first + column]
            assert torch.equal((bits << shift) & 0x81C0, (found >> 3 << 15) | (found % 8 << 6))
    assert torch.equal(as_pairs(words), packed)
