import pytest
import torch

from model.ops.dispatch import fused_everywhere
from model.ops.linear_reverse_kl import linear_reverse_kl, reference, serves


def _arguments(count, vocabulary, width, other_width, dtype):
    torch.manual_seed(0)
    shapes = ((count, width), (vocabulary, width), (count, other_width), (vocabulary, other_width))
    return [(torch.randn(shape) * 0.4).to(dtype) for shape in shapes]


def test_equals_the_kl_of_two_categoricals():
    hidden, weight, other, head = _arguments(6, 30, 16, 8, torch.float64)
    kl = linear_reverse_kl(hidden, weight, other, head, temperature=0.7)
    p, q = (
        torch.distributions.Categorical(logits=x @ w.T / 0.7) for x, w in ((hidden, weight), (other, head))
    )
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(p, q))
    same = linear_reverse_kl(hidden, weight, hidden, weight)
    torch.testing.assert_close(same, torch.zeros_like(same))


def test_gradients_of_the_student_only():
    tensors = [x.requires_grad_() for x in _arguments(4, 9, 6, 5, torch.float64)]
    assert torch.autograd.gradcheck(
        lambda h, w: linear_reverse_kl(h, w, *tensors[2:], temperature=1.3), tuple(tensors[:2])
    )
    linear_reverse_kl(*tensors).sum().backward()
    assert tensors[2].grad is None and tensors[3].grad is None


def test_wrong_arguments_are_refused():
    hidden, weight, other, head = _arguments(3, 10, 8, 4, torch.float32)
    with pytest.raises(ValueError, match="must agree"):
        linear_reverse_kl(hidden, weight, other, head[:-1])
    with pytest.raises(ValueError, match="temperature"):
        linear_reverse_kl(hidden, weight, other, head, temperature=0.0)


@pytest.mark.parametrize("count", [20, 150])
def test_kernel(interpreted, count):
    vocabulary, temperature = 300, 0.7
    tensors = _arguments(count, vocabulary, 64, 128, torch.bfloat16)
    module = "model.ops.linear_reverse_kl.triton"
    kl, lse, lse_other = interpreted(module, "forward", *tensors, temperature=temperature)
    own = (tensors[0].double() @ tensors[1].double().T).requires_grad_()
    theirs = tensors[2].double() @ tensors[3].double().T
    eye = torch.eye(vocabulary, dtype=torch.float64)
    expected = reference.linear_reverse_kl(own, eye, theirs, eye, temperature=temperature)
    torch.testing.assert_close(kl.double(), expected.detach(), atol=2e-5, rtol=1e-5)
    grad = torch.randn(count)
    (gradient,) = torch.autograd.grad(expected, own, grad.double())
    for columns in (slice(0, 256), slice(256, 300)):
        got = interpreted(
            module,
            "logit_gradients",
            *tensors,
            (kl, lse, lse_other, grad),
            temperature=temperature,
            columns=columns,
            out=torch.empty(count, 256, dtype=torch.bfloat16),
        )
        wanted = gradient[:, columns]
        assert (got.double() - wanted).norm() < 4e-3 * wanted.norm()


def test_distillation_takes_it_where_it_serves(monkeypatch):
    from rl.algorithms import linear

    hidden, weight, other, head = _arguments(5, 40, 64, 128, torch.bfloat16)
    assert serves(hidden, weight, other, head) and not serves(hidden.float(), weight, other, head)
    plain = linear.linear_reverse_kl(hidden, weight, other.float(), head, temperature=0.9)
    calls = []

    def noted(*arguments, **options):
        calls.append(arguments)
        return linear_reverse_kl(*arguments, **options)

    monkeypatch.setattr(linear, "fused_reverse_kl", noted)
    with fused_everywhere():
        fused = linear.linear_reverse_kl(hidden, weight, other.float(), head, temperature=0.9)
        narrow = linear.linear_reverse_kl(hidden[:, :60], weight[:, :60], other.float(), head)
    torch.testing.assert_close(fused, plain, atol=1e-5, rtol=1e-4)
    assert len(calls) == 1 and narrow.isfinite().all()
