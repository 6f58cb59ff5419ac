"""Reverse KL of a student to a teacher over the whole vocabulary, from hidden states: no logits are kept.

Logits of both exist a tile at a time, in registers, in the forward and again in the backward pass.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.linear_logprob import DEPTH, serves
from model.ops.linear_reverse_kl import reference

__all__ = ["linear_reverse_kl"]


def linear_reverse_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), p and q the tempered softmax of student and teacher.

    Args:
        hidden: [T, d], the student's.
        weight: [V, d] of the same dtype.
        teacher_hidden: [T, d_T]; no gradient, nor for its head.
        teacher_weight: [V, d_T].
        temperature: divides the logits of both.

    Returns:
        [T] in nats, fp32, differentiable in hidden and weight.
    """
    if (
        hidden.shape[1] != weight.shape[1]
        or teacher_hidden.shape[1] != teacher_weight.shape[1]
        or len(weight) != len(teacher_weight)
        or len(hidden) != len(teacher_hidden)
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, teacher's hidden "
            f"{tuple(teacher_hidden.shape)} and weight {tuple(teacher_weight.shape)} must agree in rows, "
            "vocabulary and each in its width"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    other, head = teacher_hidden.detach(), teacher_weight.detach()
    if use_kernel("linear_reverse_kl", hidden):
        if not serves(hidden, weight, other, head):
            raise ValueError(
                f"the kernel takes bf16 and widths in multiples of {DEPTH}, got "
                f"{hidden.dtype} {hidden.shape[1]} and {other.dtype} {other.shape[1]}"
            )
        from model.ops.linear_reverse_kl.autograd import LinearReverseKL

        return LinearReverseKL.apply(hidden, weight, other, head, temperature)  # pyright: ignore[reportReturnType]
    return reference.linear_reverse_kl(hidden, weight, other, head, temperature=temperature)
