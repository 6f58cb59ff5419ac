"""Chunked against plain, forward and every gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.choices import SamplingMask
from model.ops.dispatch import fused_everywhere
from rl.algorithms.linear import linear_logprobs, linear_reverse_kl
from rl.algorithms.opd import reverse_kl, sampled_advantages


def leaves(seed, rows, width=7, vocabulary=11, teacher_width=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, width), (vocabulary, width), (rows, teacher_width), (vocabulary, teacher_width))
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [v.requires_grad_() for v in values[:2]] + values[2:], torch.randint(0, vocabulary, (rows,))


def rounding(factor, size):
    """What float32 leaves of terms as large as `factor * size` where they cancel."""
    return 8 * torch.finfo(torch.float32).eps * factor.norm() * size


@given(st.integers(0, 999), st.integers(0, 33), st.sampled_from([0.5, 1.0, 1.7]), st.integers(1, 400))
def test_logprobs_and_entropy(seed, rows, temperature, limit):
    (hidden, weight, _, _), labels = leaves(seed, rows)
    logprobs, entropy, correct = linear_logprobs(hidden, weight, labels, temperature=temperature, limit=limit)
    plain = torch.distributions.Categorical(logits=hidden @ weight.T / temperature, validate_args=False)
    torch.testing.assert_close(logprobs, plain.log_prob(labels))
    torch.testing.assert_close(entropy, plain.entropy())
    assert correct.tolist() == (plain.logits.argmax(-1) == labels).tolist()
    scale = torch.linspace(0.5, 2, rows)
    ours = torch.autograd.grad((scale * logprobs).sum() + entropy.square().sum(), (hidden, weight))
    theirs = torch.autograd.grad(
        (scale * plain.log_prob(labels)).sum() + plain.entropy().square().sum(), (hidden, weight)
    )
    size = 1 + scale.norm() + 2 * entropy.norm()
    for a, b, factor in zip(ours, theirs, (weight, hidden), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + rounding(factor, size)


@given(st.integers(0, 999), st.integers(1, 33), st.sampled_from([0.5, 1.7]), st.integers(1, 400))
def test_logprobs_and_entropy_under_a_sampling_mask(seed, rows, temperature, limit):
    (hidden, weight, _, _), labels = leaves(seed, rows)
    allowed = torch.rand(rows, 11, generator=torch.Generator().manual_seed(seed)) < 0.4
    allowed[torch.arange(rows), labels] = True
    allowed[::5] = True
    mask = SamplingMask.of_allowed(allowed)
    logprobs, entropy, correct = linear_logprobs(
        hidden, weight, labels, temperature=temperature, mask=mask, limit=limit
    )
    scale = torch.linspace(0.5, 2, rows)
    ours = torch.autograd.grad((scale * logprobs).sum() + entropy.square().sum(), (hidden, weight))
    plain, entropies = [], []
    for row in range(rows):
        kept = allowed[row].nonzero()[:, 0]
        own = (hidden[row] @ weight[kept].T / temperature).log_softmax(-1)
        plain.append(own[kept == labels[row]][0])
        entropies.append(-(own.exp() * own).sum())
        assert bool(correct[row]) == (kept[own.argmax()] == labels[row])
    torch.testing.assert_close(logprobs, torch.stack(plain))
    torch.testing.assert_close(entropy, torch.stack(entropies))
    theirs = torch.autograd.grad(
        (scale * torch.stack(plain)).sum() + torch.stack(entropies).square().sum(), (hidden, weight)
    )
    size = 1 + scale.norm() + 2 * entropy.norm()
    for a, b, factor in zip(ours, theirs, (weight, hidden), strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + rounding(factor, size)


def test_exact_logprobs_do_not_depend_on_the_other_rows():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(70, 64, generator=generator), torch.randn(64, 64, generator=generator)
    labels = torch.randint(0, 64, (70,), generator=generator)
    whole, _, _ = linear_logprobs(hidden, weight, labels, exact=True)
    for part in (slice(0, 1), slice(3, 10), slice(40, 70)):
        for limit in (64, 64 * 7, 64 * 100):
            some, _, _ = linear_logprobs(hidden[part], weight, labels[part], exact=True, limit=limit)
            assert torch.equal(some, whole[part])


@given(st.integers(0, 999), st.integers(1, 33), st.sampled_from([0.5, 1.0, 1.7]), st.integers(1, 400))
def test_reverse_kl_with_a_teacher_of_another_width(seed, rows, temperature, limit):
    (hidden, weight, other, head), _ = leaves(seed, rows)
    ours = linear_reverse_kl(hidden, weight, other, head, temperature=temperature, limit=limit)
    plain = reverse_kl(hidden @ weight.T / temperature, other @ head.T / temperature)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    scale = torch.linspace(0.5, 2, rows)
    size = 1 + (scale * ours).norm()
    for a, b, factor in zip(
        torch.autograd.grad((scale * ours).sum(), (hidden, weight)),
        torch.autograd.grad((scale * plain).sum(), (hidden, weight)),
        (weight, hidden),
        strict=True,
    ):
        assert (a - b).norm() <= 1e-5 * b.norm() + rounding(factor, size)


def test_bfloat16_is_computed_in_float32():
    (hidden, weight, _, _), labels = leaves(0, 9, dtype=torch.bfloat16)
    logprobs, _, _ = linear_logprobs(hidden, weight, labels)
    expected = (hidden.float() @ weight.float().T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    grad_hidden, grad_weight = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16


def test_the_published_value_and_its_direction():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    assert reverse_kl(p.log(), q.log()).item() == pytest.approx(0.085123, abs=1e-6)
    assert reverse_kl(q.log(), p.log()).item() != pytest.approx(0.085123, abs=1e-3)


def test_another_vocabulary_is_refused():
    (hidden, weight, other, head), _ = leaves(0, 3)
    with pytest.raises(ValueError, match="one vocabulary"):
        linear_reverse_kl(hidden, weight, other, head[:-1])


def test_sampled_advantages():
    mask = torch.tensor([True, True, True, False, False, False])
    student = torch.full((6,), -1.0, requires_grad=True)
    advantages = sampled_advantages(torch.zeros(6), student, mask)
    assert advantages.tolist() == [1, 1, 1, 0, 0, 0] and not advantages.requires_grad
    assert not sampled_advantages(student, student, mask).any()


@pytest.mark.parametrize("masked", [False, True])
def test_on_a_card_the_fused_operation_serves_what_no_mask_truncates(masked):
    (hidden, weight, _, _), labels = leaves(3, 9, width=64, dtype=torch.bfloat16)
    allowed = torch.ones(9, 11, dtype=torch.bool)
    allowed[1, (labels[1] + 1) % 11] = False
    mask = SamplingMask.of_allowed(allowed) if masked else None
    ours = linear_logprobs(hidden, weight, labels, temperature=0.7, mask=mask)
    with fused_everywhere():
        fused = linear_logprobs(hidden, weight, labels, temperature=0.7, mask=mask)
    for a, b in zip(fused[:2], ours[:2], strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(fused[2], ours[2])
    assert (fused[0].grad_fn is not None) and (type(fused[0].grad_fn) is type(ours[0].grad_fn)) == masked
    for a, b in zip(
        torch.autograd.grad(fused[0].sum() + fused[1].sum(), (hidden, weight)),
        torch.autograd.grad(ours[0].sum() + ours[1].sum(), (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=2e-2)
