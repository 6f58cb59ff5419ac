"""Kernels of a decode step on a card: few rows have the bits of many, fused kernels those of their parts."""

from functools import partial

import pytest
import torch

from benchmarks.kernel_timing import error
from model.ops.exact_linear import exact_linear, exact_pair
from model.ops.experts.plan import Plan
from model.ops.hyper_boundary import hyper_coefficients, hyper_update, hyper_update_of_rows
from model.ops.hyper_boundary import reference as boundary
from model.ops.latents import latent_norm, latents
from model.ops.rotary import window_keys
from model.ops.side import SideStream, arrivals

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("rows", [1, 7, 64, 200, 500])
def test_few_rows_have_the_bits_of_many(rows):
    """Of products (alone, two at once, by groups) and of coefficients, repeated."""
    torch.manual_seed(0)
    x = torch.randn(700, 8192, device="cuda", dtype=torch.bfloat16)
    first, second = (torch.randn(n, 2048, device="cuda", dtype=torch.bfloat16) for n in (1280, 512))
    groups = torch.randn(8, 130, 1024, device="cuda", dtype=torch.bfloat16)
    large = torch.randn(4168, 1280, device="cuda", dtype=torch.bfloat16)
    streams, squares = x.view(700, 4, 2048), x.float().square().sum(1)
    site = (torch.randn(24, 8192, device="cuda") * 0.02, torch.randn(24, device="cuda"), torch.ones(3).cuda())

    def run(count):
        narrow = x[:count, :2048]
        joint = exact_pair(narrow, first, second)
        assert torch.equal(joint, torch.cat([exact_linear(narrow, w) for w in (first, second)], 1))
        grouped = exact_linear(x[:count].unflatten(1, (8, 1024)).transpose(0, 1), groups).transpose(0, 1)
        alone = exact_linear(x[:count, :1280], large)
        return joint, grouped, hyper_coefficients(streams[:count], squares[:count], *site)[0], alone

    with torch.no_grad():
        many = run(700)
        most = hyper_coefficients(streams.repeat(25, 1, 1), squares.repeat(25), *site)[0]
        assert torch.equal(most[:700], many[2])
        for _ in range(5):
            assert all(torch.equal(a, b[:rows]) for a, b in zip(run(rows), many, strict=True))
    wide = x.double()
    assert error(many[0], torch.cat([wide[:, :2048] @ w.double().T for w in (first, second)], 1)) < 3e-3
    expected = boundary.coefficients(streams.double(), *site)
    assert error(many[2], expected) < 1e-4
    assert error(many[3], wide[:, :1280] @ large.double().T) < 3e-3


@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_an_update_that_sums_rows_has_the_bits_of_sum_and_update(rows):
    """Where the compiler chose what to fuse, one element of half a million differed."""
    from model.ops.experts.triton import combine

    torch.manual_seed(0)
    heavy = torch.exp(torch.randn(4096, 4, 2048, device="cuda"))
    streams = (torch.randn(4096, 4, 2048, device="cuda") * heavy).bfloat16()
    given = torch.randn(4096 * 5, 2048, device="cuda", dtype=torch.bfloat16)
    place = torch.randperm(4096 * 5, device="cuda", dtype=torch.int32).view(4096, 5)
    coefficients, norm = torch.rand(4096, 24, device="cuda"), torch.rand(2048, device="cuda").bfloat16()
    with torch.no_grad():
        branch = combine(given, Plan(place.flatten(), place, place[0], place))
        apart = hyper_update(streams, branch, coefficients, norm, eps=1e-6)
        few = streams[:rows], given, place[:rows], coefficients[:rows], norm
        fused = hyper_update_of_rows(*few, eps=1e-6)
    assert all(torch.equal(a, b[:rows]) for a, b in zip(fused, apart, strict=True))


def test_latents_and_their_norm_alone_have_the_same_bits():
    torch.manual_seed(0)
    joint = torch.randn(77, 1792, device="cuda", dtype=torch.bfloat16)
    norm, window_norm = (torch.rand(n, device="cuda").bfloat16() + 0.5 for n in (1280, 512))
    rope = torch.randn(77, 32, device="cuda").cos(), torch.randn(77, 32, device="cuda").sin()
    values, window = joint.split([1280, 512], 1)
    with torch.no_grad():
        latent, keys = latents(values, norm, window, window_norm, rope, eps=1e-6, rounded=True)
        assert torch.equal(keys, window_keys(window, window_norm, *rope, eps=1e-6, rounded=True))
    leaves = [values.clone().requires_grad_(), norm.clone().requires_grad_()]
    alone = latent_norm(*leaves, 1e-6)
    assert torch.equal(alone, latent)
    grad = torch.randn_like(alone)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = torch.nn.functional.rms_norm(wide[0], (1280,), wide[1], 1e-6)
    assert error(alone, expected) < 3e-3
    right = torch.autograd.grad(expected, wide, grad.double())
    for got, want in zip(torch.autograd.grad(alone, leaves, grad), right, strict=True):
        assert error(got, want) < 4e-3


def test_work_on_the_second_stream_waits_and_is_waited_for():
    side, device = SideStream(torch.device("cuda")), torch.device("cuda")
    x = torch.zeros(1 << 24, device=device)
    for step in range(20):
        x += 1
        total = side.run(partial(torch.sum, x, dtype=torch.float64))
        assert side.run(partial(arrivals, device, 1)).data_ptr() != arrivals(device, 1).data_ptr()
        side.join()
        assert total.item() == (step + 1) * len(x)
