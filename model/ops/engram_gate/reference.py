"""Definition of the gate, in fp32 for bf16 arguments and differentiable."""

import torch
from torch import Tensor

from model.layers.norm import inverse_rms

SMALLEST_DOT = 1e-6


def engram_gate(
    streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, text: Tensor | None, *, eps: float
) -> Tensor:
    """See `model.ops.engram_gate.engram_gate`."""
    n, width = streams.shape[1:]
    keys, value = projected.split([n * width, width], dim=-1)
    x, keys = _wide(streams), _wide(keys.unflatten(-1, (n, width)))
    scale = inverse_rms(x, eps) * inverse_rms(keys, eps)
    dot = (x * keys * (_wide(q_weight) * _wide(k_weight))).sum(-1) * (scale.squeeze(-1) * width**-0.5)
    gate = torch.sigmoid(dot.abs().clamp_min(SMALLEST_DOT).sqrt().copysign(dot))
    if text is not None:
        gate = gate * text.unsqueeze(-1)
    return torch.addcmul(x, gate.unsqueeze(-1), _wide(value).unsqueeze(-2)).to(streams.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype is torch.bfloat16 else x
