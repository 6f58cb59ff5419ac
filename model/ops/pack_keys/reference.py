"""Definition of the way from projected rows to cache records."""

import torch
from torch import Tensor

from model.ops.records import pack


def pool(values: Tensor, gates: Tensor | None, ratio: int, starts: Tensor) -> Tensor:
    """Softmax-weighted rows of each group, [E, D] bf16."""
    if gates is None:
        return values[starts.long()].to(torch.bfloat16)
    rows = starts.long()[:, None] + torch.arange(ratio, device=starts.device)
    weights = torch.softmax(gates[rows].float(), 1)
    return (weights * values[rows].float()).sum(1).to(torch.bfloat16)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm in fp32, bf16 out; nothing without a weight."""
    if weight is None:
        return x
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(
        torch.bfloat16
    )


def rotate(x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotate the last channels [E, R] of x [E, D] in adjacent pairs, bf16 out."""
    if rope is None:
        return x
    cosine, sine = rope
    plain, rotated = x.float().split([x.shape[1] - 2 * cosine.shape[1], 2 * cosine.shape[1]], 1)
    even, odd = rotated.unflatten(1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1).flatten(1)
    return torch.cat([plain, turned], 1).to(torch.bfloat16)


def pack_keys(
    kind: str,
    values: Tensor,
    gates: Tensor | None,
    ratio: int,
    starts: Tensor,
    norm: Tensor | None,
    eps: float,
    rope: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """See `model.ops.pack_keys.pack_keys`."""
    latent = rms_norm(pool(values, gates, ratio, starts), norm, eps)
    return latent, pack(kind, rotate(latent, rope))
