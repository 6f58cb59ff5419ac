"""Stored weights: FP8 in tiles or rows, FP4 in rows, each with power-of-two scales as bytes.

Decoding to bfloat16 is exact (both formats have fewer bits of mantissa). Encoding a decoded tensor gives the
same values again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model.quant import e2m1, e4m3, ue8m0
from model.quant.blocks import WIDE_BLOCK, index_scale, window_scale


def _spread(scale: Tensor, shape: tuple[int, int], tile: tuple[int, int]) -> Tensor:
    """Scales of tiles repeated to one a weight."""
    rows = scale.repeat_interleave(tile[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(tile[1], dim=1)[:, : shape[1]]


def decode_fp8(weight: Tensor, scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """[rows, columns] float8_e4m3fn and one scale byte a `tile` to float32."""
    wide = _spread(ue8m0.decode(scale.view(torch.uint8)), (weight.shape[0], weight.shape[1]), tile)
    return weight.float() * wide


def encode_fp8(weight: Tensor, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """[rows, columns] to float8_e4m3fn and scale bytes [ceil(rows / tile), ceil(columns / tile)]."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % tile[1], 0, -rows % tile[0]))
    tiles = padded.unflatten(0, (-1, tile[0])).unflatten(2, (-1, tile[1])).transpose(1, 2).flatten(2)
    scale = window_scale(tiles).squeeze(-1)
    return e4m3.encode(weight.float() / _spread(scale, (rows, columns), tile)), ue8m0.encode(scale)


def decode_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """[rows, columns / 2] bytes and scale bytes [rows, columns / 32] to float32 [rows, columns]."""
    values = e2m1.decode(e2m1.unpack(packed.view(torch.uint8))).unflatten(1, (-1, WIDE_BLOCK))
    return (values * ue8m0.decode(scale.view(torch.uint8)).unsqueeze(-1)).flatten(1)


def as_words(packed: Tensor) -> Tensor:
    """Packed bytes [..., n] in the order that kernels decode with the fewest operations.

    Of a block of 32 columns, half h of word j holds columns 16 h + 4 i + j, i = 0 .. 3. Columns 0, 1 and 2 of
    a half stand as bf16 has its sign and its middle bits, shifted right by 0, 3 and 6; column 3 takes the
    bits that are left.
    """
    codes = e2m1.unpack(packed.view(torch.uint8)).to(torch.int16).unflatten(-1, (-1, 2, 4, 4))
    a, b, c, d = codes.unbind(-2)
    halves = ((a & 7) << 6) | ((b & 7) << 3) | (c & 7) | ((d & 3) << 10) | ((d & 12) << 11)
    halves |= ((a >> 3) << 15) | ((b & 8) << 9) | ((c & 8) << 6)
    return halves.transpose(-1, -2).contiguous().view(torch.uint8).flatten(-3)


def as_pairs(words: Tensor) -> Tensor:
    """The inverse of `as_words`: the published order."""
    halves = words.contiguous().view(torch.int16).unflatten(-1, (-1, 4, 2)).transpose(-1, -2)
    a, b = ((halves >> 12) & 8) | ((halves >> 6) & 7), ((halves >> 9) & 8) | ((halves >> 3) & 7)
    c, d = ((halves >> 6) & 8) | (halves & 7), ((halves >> 11) & 12) | ((halves >> 10) & 3)
    return e2m1.pack(torch.stack([a, b, c, d], dim=-2).to(torch.uint8).flatten(-4))


def encode_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] to packed bytes [rows, columns / 2] and scale bytes [rows, columns / 32]."""
    blocks = weight.float().unflatten(-1, (-1, WIDE_BLOCK))
    scale = index_scale(blocks)
    codes = e2m1.encode(e2m1.round_to_grid(blocks / scale)).flatten(-2)
    return e2m1.pack(codes), ue8m0.encode(scale).squeeze(-1)
