"""From projected rows to cache records in one kernel: pool the group, normalise, rotate, quantise, pack.

Serves the compressed entries (FP4), their index keys (MXFP4) and the sliding window (FP8).
"""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.pack_keys import reference
from model.ops.records import record_bytes

__all__ = ["pack_keys"]


def pack_keys(
    kind: str,
    values: Tensor,
    *,
    gates: Tensor | None = None,
    ratio: int = 1,
    starts: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    rope: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Latents and packed records of E groups of rows.

    Pooled: per channel, softmax of `gates` over the group's rows weighs `values` (fp32, then rounded to
    bf16). Latent: RMSNorm of it, bf16. Record: latent with the last channels rotated in adjacent pairs,
    rounded to bf16, quantised.

    Args:
        kind: "main", "index" or "window" (`model.ops.records`).
        values: [T, D] fp32 or bf16.
        gates: [T, D]; None only for ratio 1.
        ratio: rows of a group.
        starts: [E] int32, first row of each group; None for consecutive groups (a rest is left out).
        norm: [D] weight of the norm; None for no norm.
        eps: of the norm.
        rope: cosines and sines [E, R / 2] fp32 for the last R channels of each group; None for no rotation.

    Returns:
        Latents [E, D] bf16 (before the rotation) and records [E, bytes] uint8.
    """
    record_bytes(kind, values.shape[1])
    if (gates is None) != (ratio == 1) or (gates is not None and gates.shape != values.shape):
        raise ValueError(
            f"ratio {ratio} needs {'no gates' if ratio == 1 else 'gates of the shape of values'}"
        )
    count = len(values) // ratio if starts is None else len(starts)
    if starts is None:
        starts = torch.arange(count, dtype=torch.int32, device=values.device) * ratio
    if rope is not None and (len(rope[0]) != count or rope[0].shape != rope[1].shape):
        raise ValueError(
            f"{count} groups need as many rows of cosines and sines, got {rope[0].shape}, {rope[1].shape}"
        )
    if use_kernel("pack_keys", values):
        from model.ops.pack_keys import triton

        return triton.pack_keys(kind, values, gates, ratio, starts, norm, eps, rope)
    return reference.pack_keys(kind, values, gates, ratio, starts, norm, eps, rope)
