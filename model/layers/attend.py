"""Softmax attention of many query heads over one shared set of keys that are also the values, with a sink.

    p_j = exp(q . k_j / sqrt(c)) / (exp(sink) + sum_j' exp(q . k_j' / sqrt(c)));   o = sum_j p_j k_j

The gradient is written out: nothing of the size of the scores is kept but the exponentials.
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, keys: Tensor, blocked: Tensor, sink: Tensor, value_dtype: torch.dtype) -> Tensor:
        rows, length, heads, width = query.shape
        flat = query.reshape(rows, length * heads, width)
        scores = torch.bmm(flat, keys.transpose(1, 2)).mul_(width**-0.5).view(rows, length, heads, -1)
        scores.masked_fill_(blocked.unsqueeze(2), -torch.inf)
        # Not below the sink, so that a row without keys divides by a finite number.
        top = torch.maximum(scores.amax(-1), sink) if keys.shape[1] else sink.expand(rows, length, heads)
        exponentials = scores.sub_(top.unsqueeze(-1)).exp_()
        sink_part = (sink - top).exp_()
        denominator = exponentials.sum(-1).add_(sink_part)
        weights = exponentials.to(value_dtype).to(keys.dtype).view(rows, length * heads, -1)
        output = torch.bmm(weights, keys).view(rows, length, heads, width) / denominator.unsqueeze(-1)
        ctx.save_for_backward(flat, keys, exponentials, denominator, sink_part, output)
        return output

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor, None]:
        flat, keys, exponentials, denominator, sink_part, output = ctx.saved_tensors
        rows, length, heads, width = output.shape
        grad = grads[0].contiguous()
        inner = (grad * output).sum(-1)
        grad_flat = grad.view(rows, length * heads, width)
        weights = (exponentials / denominator.unsqueeze(-1)).view(rows, length * heads, -1)
        grad_scores = torch.bmm(grad_flat, keys.transpose(1, 2))
        grad_scores.sub_(inner.view(rows, -1, 1)).mul_(weights).mul_(width**-0.5)
        grad_query = torch.bmm(grad_scores, keys).view(rows, length, heads, width)
        grad_keys = torch.bmm(grad_scores.transpose(1, 2), flat).baddbmm_(weights.transpose(1, 2), grad_flat)
        grad_sink = -(inner * sink_part / denominator).sum((0, 1))
        return grad_query, grad_keys, None, grad_sink, None


def attend(query: Tensor, keys: Tensor, blocked: Tensor, sink: Tensor) -> Tensor:
    """Attention of every query over the keys of its row that are not blocked.

    Args:
        query: [B, L, H, c].
        keys: [B, N, c], keys and values in one.
        blocked: [B or 1, L, N] bool, true where a key must not be seen.
        sink: [H] logit of the sink, which takes weight and gives nothing.

    Returns:
        [B, L, H, c] in the dtype of `query`. bfloat16 inputs are scored in float32 with the unnormalised weights
        rounded to bfloat16.
    """
    if query.dtype is torch.bfloat16:
        wide = _Attend.apply(query.float(), keys.float(), blocked, sink.float(), torch.bfloat16)
        return wide.to(torch.bfloat16)  # pyright: ignore[reportOptionalMemberAccess]
    return _Attend.apply(query, keys, blocked, sink, query.dtype)  # pyright: ignore[reportReturnType]
