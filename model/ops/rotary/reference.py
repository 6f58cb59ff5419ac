"""Definitions of the rotation and of the sliding-window keys, in plain PyTorch and differentiable."""

import torch
from torch import Tensor

from model.ops.records import pack, unpack


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """See `model.ops.rotary.rotary`; out of place."""
    width = 2 * cosine.shape[1]
    shape = (len(x),) + (1,) * (x.dim() - 2) + (width // 2,)
    cosine, sine = cosine.view(shape), sine.view(shape)
    plain, rotated = x.float().split([x.shape[-1] - width, width], -1)
    even, odd = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(-2)
    return torch.cat([plain, turned], -1).to(x.dtype)


def window_keys(
    values: Tensor, norm: Tensor, cosine: Tensor, sine: Tensor, *, eps: float, rounded: bool
) -> tuple[Tensor, Tensor]:
    """See `model.ops.rotary.window_keys`: keys, and their records."""
    wide = values.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
    keys = rotary(normed.to(values.dtype), cosine, sine)
    records = pack("window", keys.detach())
    if rounded:
        keys = keys + (unpack("window", records).to(keys.dtype) - keys).detach()
    return keys, records
