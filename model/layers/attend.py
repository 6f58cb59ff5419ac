"""Softmax attention of many query heads over one shared set of keys that are also the values, with a sink.

    p_j = exp(q . k_j / sqrt(c)) / (exp(sink) + sum_j' exp(q . k_j' / sqrt(c)));   o = sum_j p_j k_j

The sink is one more key of zeros whose score is replaced by the sink's logit, so that an ordinary softmax
does. The gradient is written out: nothing of the size of the scores is kept but the probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.layers.linear import widen


def _forward(query: Tensor, keys: Tensor, bias: Tensor, sink: Tensor, rounded: bool) -> tuple[Tensor, ...]:
    """Output [B, L, H, c], probabilities and keys, both with the sink in the last place."""
    rows, length, heads, width = query.shape
    flat = query.reshape(rows, length * heads, width)
    with_sink = torch.cat([keys, keys.new_zeros(rows, 1, width)], dim=1)
    scores = torch.baddbmm(sink.new_zeros(1), flat, with_sink.transpose(1, 2), beta=0, alpha=width**-0.5)
    by_head = scores.view(rows, length, heads, -1)
    by_head[..., :-1].add_(bias.unsqueeze(2))
    by_head[..., -1] = sink
    probabilities = scores.softmax(-1)
    if not rounded:
        return torch.bmm(probabilities, with_sink).view(query.shape), probabilities, with_sink, flat
    largest = probabilities[..., :-1].amax(-1, keepdim=True)
    weights = (probabilities / largest).to(torch.bfloat16).to(with_sink.dtype)
    return (torch.bmm(weights, with_sink) * largest).view(query.shape), probabilities, with_sink, flat


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, keys: Tensor, bias: Tensor, sink: Tensor, rounded: bool) -> Tensor:
        output, probabilities, with_sink, flat = _forward(query, keys, bias, sink, rounded)
        ctx.save_for_backward(probabilities, with_sink, flat)
        return output

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor, None]:
        probabilities, with_sink, flat = ctx.saved_tensors
        rows, length, heads, width = grads[0].shape
        grad = grads[0].reshape(rows, length * heads, width)
        grad_weights = torch.bmm(grad, with_sink.transpose(1, 2))
        softmax_backward = torch.ops.aten._softmax_backward_data
        grad_scores = softmax_backward(grad_weights, probabilities, -1, probabilities.dtype)
        unused, scale = grad.new_zeros(1), width**-0.5
        grad_query = torch.baddbmm(unused, grad_scores, with_sink, beta=0, alpha=scale).view(grads[0].shape)
        grad_keys = torch.baddbmm(unused, grad_scores.transpose(1, 2), flat, beta=0, alpha=scale)
        grad_keys.baddbmm_(probabilities.transpose(1, 2), grad)
        grad_sink = grad_scores[..., -1].reshape(-1, heads).sum(0)
        return grad_query, grad_keys[:, :-1], None, grad_sink, None


def attend(query: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
    """Attention of every query over the keys of its row.

    Args:
        query: [B, L, H, c].
        keys: [B, N, c], keys and values in one.
        bias: [B or 1, L, N], 0 where a key may be seen and -inf where not, in the dtype of the scores.
        sink: [H] logit of the sink, which takes weight and gives nothing.

    Returns:
        [B, L, H, c] in the dtype of `query`. bfloat16 inputs are scored in float32, and the unnormalised
        weights are rounded to bfloat16 before they meet the values.
    """
    rounded = query.dtype is torch.bfloat16
    if rounded:
        query, keys = widen(query), widen(keys)
        bias, sink = bias.to(query.dtype), sink.to(query.dtype)
    if torch.is_grad_enabled():
        output: Tensor = _Attend.apply(query, keys, bias, sink, rounded)  # pyright: ignore
    else:
        output = _forward(query, keys, bias, sink, rounded)[0]
    return output.to(torch.bfloat16) if rounded else output


def as_bias(blocked: Tensor, dtype: torch.dtype) -> Tensor:
    """0 and -inf for a bool mask that is true where a key must not be seen."""
    return torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill_(blocked, -torch.inf)
