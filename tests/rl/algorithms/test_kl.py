import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.kl import NAMES, estimate

LOGPROBS, REFERENCE = torch.tensor([-1.0, -1, -1]), torch.tensor([0.0, -15, -30])


@pytest.mark.parametrize(
    ("name", "free", "clamped"),
    [
        ("k1", [-1, 14, 29], [-1, 10, 10]),
        ("k2", [0.5, 98, 420.5], [0.5, 10, 10]),
        ("k3", [0.7183, 13, 28], [0.7183, 10, 10]),
    ],
)
def test_published_values(name, free, clamped):
    plain = estimate(name, LOGPROBS, REFERENCE, input_clamp=None, output_clamp=None)
    torch.testing.assert_close(plain, torch.tensor(free, dtype=torch.float32), atol=1e-4, rtol=0)
    torch.testing.assert_close(
        estimate(name, LOGPROBS, REFERENCE), torch.tensor(clamped, dtype=torch.float32), atol=1e-4, rtol=0
    )


def test_unbiased():
    logprobs, old, reference = torch.tensor([-1.0]), torch.tensor([-1.5]), torch.tensor([-2.0])
    assert estimate("k3", logprobs, reference).item() == pytest.approx(0.367879, abs=1e-6)
    assert estimate("unbiased", logprobs, reference, old).item() == pytest.approx(0.606531, abs=1e-6)
    with pytest.raises(ValueError, match="sampled with"):
        estimate("unbiased", logprobs, reference)


def test_unbiased_has_the_value_and_gradient_of_the_exact_kl():
    generator = torch.Generator().manual_seed(0)
    logits, sampler, reference = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, old, ref = logits.log_softmax(0), sampler.log_softmax(0), reference.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    expected = (old.exp() * estimate("unbiased", logprobs, ref, old)).sum()
    torch.testing.assert_close(expected, exact)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expected, exact))
    )


@given(st.floats(-1e4, 0), st.floats(-1e4, 0), st.sampled_from(NAMES))
def test_never_overflows(a, b, name):
    logprobs = torch.tensor([a], requires_grad=True)
    value = estimate(name, logprobs, torch.tensor([b]), torch.tensor([b]))
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), logprobs)[0].isfinite().all()
