"""Records: how one key is laid down in bytes, 4 or 8 bits a channel instead of 16 or 32.

Decoding a record gives, bit for bit, what the rounding of `model.quant.blocks` gives: a forward pass that
rounds its keys sees the same values whether they come from a packed cache or from a float one. Main keys are
packed as they are *before* that rounding. Afterwards is not always the same: a main key's scale is itself
rounded, and in the subnormal range of E4M3 the rounded key would find a different scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.quant import e2m1, e4m3, ue8m0
from model.quant.blocks import MAIN_BLOCK, WIDE_BLOCK, index_scale, main_scale, window_scale


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """Codes of `code_bits` bits for the channels of a key, and a scale of one byte a block of channels."""

    name: str
    block: int
    code_bits: int
    _scale: Callable[[Tensor], Tensor]
    _encode_scale: Callable[[Tensor], Tensor]
    _decode_scale: Callable[[Tensor], Tensor]

    def code_bytes(self, width: int) -> int:
        """Bytes of the codes of a key of `width` channels."""
        return width * self.code_bits // 8

    def scale_bytes(self, width: int) -> int:
        """Bytes of its scales. A width below the block is one block."""
        return width // min(self.block, width)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [..., c] to uint8 codes [..., code bytes] and scales [..., scale bytes]."""
        blocks = x.float().unflatten(-1, (-1, min(self.block, x.shape[-1])))
        scale = self._scale(blocks)
        scaled = (blocks / scale).flatten(-2)
        if self.code_bits == 4:
            codes = e2m1.pack(e2m1.encode(e2m1.round_to_grid(scaled)))
        else:
            codes = e4m3.encode(scaled).view(torch.uint8)
        return codes, self._encode_scale(scale.squeeze(-1))

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `encode`: keys [..., c] as `dtype` (exact in float32 and bfloat16)."""
        if self.code_bits == 4:
            values = (
                _nibble_pairs(codes.device)
                .index_select(0, codes.flatten().int())
                .view(*codes.shape[:-1], 2 * codes.shape[-1])
            )
        else:
            values = codes.view(torch.float8_e4m3fn).float()
        blocks = values.unflatten(-1, (scales.shape[-1], values.shape[-1] // scales.shape[-1]))
        return blocks.mul_(self._decode_scale(scales).unsqueeze(-1)).flatten(-2).to(dtype)


def _nibble_pairs(device: torch.device) -> Tensor:
    """[256, 2] the two E2M1 values of each byte."""
    if device not in _PAIRS:
        with torch.inference_mode(False):
            bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
            _PAIRS[device] = e2m1.decode(e2m1.unpack(bytes_.unsqueeze(-1)))
    return _PAIRS[device]


_PAIRS: dict[torch.device, Tensor] = {}


def _encode_e4m3(scale: Tensor) -> Tensor:
    return scale.to(torch.float8_e4m3fn).view(torch.uint8)


def _decode_e4m3(byte: Tensor) -> Tensor:
    return byte.view(torch.float8_e4m3fn).float()


def _decode_power(byte: Tensor) -> Tensor:
    """Powers of two of UE8M0 bytes 1 .. 254 (2^-126 .. 2^127, all that scales of keys can be)."""
    return (byte.int() << 23).view(torch.float32)


MAIN = RecordFormat("main", MAIN_BLOCK, 4, main_scale, _encode_e4m3, _decode_e4m3)
"""Main keys: E2M1, an E4M3 scale per 16 channels; 288 bytes for 512 channels."""
INDEX = RecordFormat("index", WIDE_BLOCK, 4, index_scale, ue8m0.encode, _decode_power)
"""Index keys: E2M1, a power-of-two scale per 32 channels; 68 bytes for 128 channels."""
WINDOW = RecordFormat("window", WIDE_BLOCK, 8, window_scale, ue8m0.encode, _decode_power)
"""Sliding-window keys: E4M3, a power-of-two scale per 32 channels; 528 bytes for 512 channels."""
