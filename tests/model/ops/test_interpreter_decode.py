"""Kernels of a decode step under Triton's interpreter, against what they stand for."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from model.ops.exact_linear import triton as exact_linear
from model.ops.hyper_boundary import triton as boundary
from model.ops.window_rows import window_rows


def test_latents_and_window_keys_are_those_of_two_kernels(interpreted):
    torch.manual_seed(0)
    joint, norm, window_norm = torch.randn(5, 96).bfloat16(), torch.rand(32) + 0.5, torch.rand(64) + 0.5
    values, window, rope = joint[:, :32], joint[:, 32:], (torch.randn(5, 8).cos(), torch.randn(5, 8).sin())
    module = "model.ops.latents.triton"
    latent, keys = interpreted(
        module, "latents", values, norm, window, window_norm, *rope, 1e-6, True, None, None, None
    )
    alone, factors = interpreted(module, "latent_norm", values, norm, 1e-6)
    expected = torch.nn.functional.rms_norm(values.float(), (32,), norm, 1e-6)
    torch.testing.assert_close(latent.float(), expected, atol=0, rtol=2**-7)
    assert torch.equal(alone, latent)
    torch.testing.assert_close(factors, (values.float().square().mean(1, keepdim=True) + 1e-6).rsqrt())
    options = {"eps": 1e-6, "rounded": True}
    assert torch.equal(
        keys, interpreted("model.ops.rotary.triton", "window_keys", window, window_norm, *rope, **options)
    )


def test_two_matrices_in_one_product_give_what_each_alone_gives(interpreted):
    torch.manual_seed(0)
    module = "model.ops.exact_linear.triton"
    first, second = torch.randn(1, 128, 1024).bfloat16(), torch.randn(1, 40, 1024).bfloat16()
    assert interpreted(module, "pairs", first[0], second[0])
    for rows in (3, 300):
        x = torch.randn(1, rows, 1024).bfloat16()
        joint = interpreted(module, "product", x, first, torch.empty(1, rows, 168).bfloat16(), second)
        for weight, part in ((first, joint[:, :, :128]), (second, joint[:, :, 128:])):
            out = torch.empty(1, rows, weight.shape[1]).bfloat16()
            assert torch.equal(part, interpreted(module, "product", x, weight, out))


def test_rows_of_window_records(interpreted):
    slots, positions = torch.tensor([2, 0, 5]), torch.tensor([3, 17, 400])
    floors = torch.tensor([[0, 0, 0], [2, 17, 395]])
    sizes = slots, positions, floors, 10, 6
    rows, counts = window_rows(slots, positions, floors, entries=10, window=6)
    assert rows[0].tolist() == [[20, 21, 22, 23, -1, -1], [2, 3, 4, 5, 6, 7], [55, 56, 57, 58, 59, 50]]
    assert rows[1].tolist() == [[22, 23, -1, -1, -1, -1], [7, *[-1] * 5], [55, 56, 57, 58, 59, 50]]
    assert counts.tolist() == [[4, 6, 6], [2, 1, 6]]
    got = interpreted("model.ops.window_rows.triton", "window_rows", *sizes)
    assert torch.equal(got[0], rows) and torch.equal(got[1], counts)


def test_an_update_sums_the_rows_of_a_token(interpreted):
    torch.manual_seed(0)
    streams, rows, norm = torch.randn(5, 4, 64).bfloat16(), torch.randn(15, 64).bfloat16(), torch.rand(64)
    place, k = torch.randperm(15).view(5, 3).int(), torch.rand(5, 24)
    module = "model.ops.hyper_boundary.triton"
    got = interpreted(module, "update", streams, rows, k, norm, 1e-6, place=place)
    terms = rows[place.long()].float()
    branch = (terms[:, 0] + terms[:, 1] + terms[:, 2]).bfloat16()
    for a, b in zip(got, interpreted(module, "update", streams, branch, k, norm, 1e-6), strict=True):
        assert torch.equal(a, b)


def test_parts_of_a_sum_have_two_steps_at_least():
    """With one the compiler merges the sum over parts into the products, for many rows alone."""
    for depth in range(128, 16385, 128):
        for columns in (32, 130, 512, 1280, 8192):
            count = exact_linear.parts(columns, depth)
            assert count == 1 or (depth % count == 0 and depth // count >= 256)
        step, count = boundary.cut(depth)
        assert depth % (step * count) == 0 and (count == 1 or depth // count >= 2 * step)
