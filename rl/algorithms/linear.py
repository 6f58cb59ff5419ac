"""Log-probability, entropy and reverse KL straight from hidden states, a chunk of rows at a time.

With a vocabulary of 129,280 the logits of a batch are larger than the model's activations. Here they exist
for one chunk only, in the forward pass and again in the backward pass, where they are computed anew; the
gradient of the head is summed up chunk by chunk. The results are those of the plain formulas. On a card
kernels do the same a tile at a time, unless a sampling mask truncates the distribution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model.choices import LOWEST_LOGPROB, SamplingMask, entropy_of, tempered, truncated_logprobs
from model.layers.exact import exact_mode, matmul
from model.layers.linear import wide_linear
from model.ops.dispatch import served
from model.ops.linear_logprob import linear_logprob as fused_logprob
from model.ops.linear_logprob import serves
from model.ops.linear_reverse_kl import linear_reverse_kl as fused_reverse_kl

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32; on a card, whose products want more rows, eight times as many."""


def fuses(hidden: Tensor, weight: Tensor, mask: SamplingMask | None = None) -> bool:
    """Whether a kernel computes `linear_logprobs`, so that not even a small batch needs logits."""
    return mask is None and served(hidden) and serves(hidden, weight)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    mask: SamplingMask | None = None,
    exact: bool = False,
    limit: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and entropy of softmax(hidden weight^T / temperature), without all its logits.

    Args:
        hidden: [m, d].
        weight: [V, d], the head.
        labels: int64 [m].
        temperature: divides the logits.
        mask: of the m tokens: the distribution is renormalised over what each could have been. None: over
            the whole vocabulary.
        exact: a token's log-probability has the same bits whatever the others are, and those of a policy and
            sampler in exact mode.
        limit: most elements of logits held at once, where no kernel serves.

    Returns:
        Log-probabilities of the labels [m] (-inf for a label outside its mask), entropies in nats [m], both
        float32, and whether the label is the most likely token, bool [m].
    """
    if fuses(hidden, weight, mask):
        return fused_logprob(hidden, weight, labels, temperature=temperature, exact=exact)
    return _LinearLogprobs.apply(hidden, weight, labels, temperature, mask, exact, limit)  # type: ignore[no-any-return]


def linear_reverse_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    temperature: float = 1.0,
    limit: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Exact KL(pi_student || pi_teacher) over the whole vocabulary: sum_v p (log p - log q), float32 [m].

    The teacher's width may differ from the student's ([m, d_T] and [V, d_T]); the vocabulary may not. The
    teacher gets no gradient.
    """
    if weight.shape[0] != teacher_weight.shape[0]:
        raise ValueError(
            f"the student has {weight.shape[0]} tokens, the teacher {teacher_weight.shape[0]}; an exact KL "
            "needs one vocabulary: choose a teacher with the student's tokenizer"
        )
    if served(hidden):
        # Hidden states of a teacher are kept in float32; those of one in bfloat16 lose nothing.
        other = teacher_hidden.to(teacher_weight.dtype)
        if serves(hidden, weight, other, teacher_weight):
            return fused_reverse_kl(hidden, weight, other, teacher_weight, temperature=temperature)
    return _LinearReverseKL.apply(  # type: ignore[no-any-return]
        hidden, weight, teacher_hidden.detach(), teacher_weight.detach(), temperature, limit
    )


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        mask: SamplingMask | None,
        exact: bool,
        limit: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.temperature, ctx.mask, ctx.rows = temperature, mask, _rows(weight, limit)
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, correct = torch.empty_like(logprobs), torch.empty_like(labels, dtype=torch.bool)
        for part in _parts(len(hidden), ctx.rows):
            with exact_mode(exact):
                log_p = _distribution(hidden[part], weight, temperature, mask and mask[part])
            logprobs[part] = log_p.gather(1, labels[part, None])[:, 0]
            correct[part] = log_p.argmax(1) == labels[part]
            entropy[part] = entropy_of(log_p)
        ctx.mark_non_differentiable(correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, *tuple[None, ...]]:  # pyright: ignore
        hidden, weight, labels = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(len(hidden), ctx.rows):
            log_p = _distribution(hidden[part], weight, ctx.temperature, ctx.mask and ctx.mask[part])
            p, entropy = log_p.exp(), entropy_of(log_p).unsqueeze(1)
            log_p = log_p.clamp_min(LOWEST_LOGPROB)
            # d log p_y / d z = 1_y - p;  d H / d z = -p (log p + H)
            grad = -p * (grads[0][part, None] + grads[1][part, None] * (log_p + entropy))
            grad.scatter_add_(1, labels[part, None], grads[0][part, None].to(grad.dtype))
            _accumulate(grad / ctx.temperature, hidden, weight, part, grad_hidden, grad_weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


class _LinearReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor, temperature: float, limit: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, other, head)
        ctx.temperature, ctx.rows = temperature, _rows(weight, limit)
        out = hidden.new_empty(len(hidden), dtype=torch.float32)
        for part in _parts(len(hidden), ctx.rows):
            log_p = _distribution(hidden[part], weight, temperature)
            log_q = _distribution(other[part], head, temperature)
            out[part] = (log_p.exp() * (log_p - log_q)).sum(1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:  # pyright: ignore
        hidden, weight, other, head = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(len(hidden), ctx.rows):
            log_p = _distribution(hidden[part], weight, ctx.temperature)
            gap = log_p - _distribution(other[part], head, ctx.temperature)
            p = log_p.exp()
            # d KL / d z = p ((log p - log q) - KL)
            grad = grads[0][part, None] * p * (gap - (p * gap).sum(1, keepdim=True))
            _accumulate(grad / ctx.temperature, hidden, weight, part, grad_hidden, grad_weight)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _rows(weight: Tensor, limit: int) -> int:
    return max(1, (8 * limit if weight.is_cuda else limit) // len(weight))


def _parts(count: int, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _distribution(
    hidden: Tensor, weight: Tensor, temperature: float, mask: SamplingMask | None = None
) -> Tensor:
    fused = served(hidden)
    logits = wide_linear(hidden, weight) if fused else matmul(hidden.float(), weight.float())
    return truncated_logprobs(tempered(logits, temperature), mask)


def _accumulate(
    grad: Tensor, hidden: Tensor, weight: Tensor, part: slice, grad_hidden: Tensor, grad_weight: Tensor
) -> None:
    if served(hidden):
        narrow = grad.to(hidden.dtype)
        grad_hidden[part] = narrow @ weight
        grad_weight += wide_linear(narrow.T, hidden[part].T)
        return
    grad_hidden[part] = (grad @ weight.float()).to(grad_hidden.dtype)
    grad_weight.addmm_(grad.T, hidden[part].float())
