"""The packed key records of the caches, as plain tensors.

Main record, 288 bytes: 256 bytes of E2M1 codes, then 32 E4M3 scales, one per 16 channels in channel order.
Byte j holds channel j in its low and channel j + 256 in its high nibble, so that a kernel works on two
halves of the head without interleaving. Window record, 528 bytes: 512 E4M3 values, then 16 UE8M0 scales, one
per 32 channels. Index record, 68 bytes for 128 channels: 64 bytes of E2M1 codes in the same halves, then 4
UE8M0 scales, one per 32 channels. Every decoded value is exact in bf16: E2M1 x E4M3 has at most 6
significant bits, E4M3 x 2^k has 4.
"""

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Bytes a channel, as a fraction: codes and scales.
_BYTES = {"main": (9, 16), "window": (33, 32), "index": (17, 32)}


def record_bytes(kind: str, channels: int) -> int:
    """Bytes of a record of `channels` (a multiple of 64): 288 and 528 for 512, 68 for an index key of 128."""
    if kind not in _BYTES:
        raise ValueError(f"unknown kind of record {kind!r}, use one of {sorted(_BYTES)}")
    over, under = _BYTES[kind]
    if channels % 64:
        raise ValueError(f"a record needs a multiple of 64 channels, got {channels}")
    return channels * over // under


def channels(records: Tensor, kind: str) -> int:
    """Channels of records [..., bytes]."""
    over, under = _BYTES[kind]
    count = records.shape[-1] * under // over
    if records.dtype != torch.uint8 or record_bytes(kind, count) != records.shape[-1]:
        raise ValueError(f"{records.dtype} with {records.shape[-1]} bytes is no {kind} record")
    return count


def unpack(kind: str, records: Tensor) -> Tensor:
    """Records [..., bytes] uint8 -> keys [..., D] fp32."""
    width = channels(records, kind)
    if kind == "window":
        codes, scales = records.split([width, width // 32], -1)
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        codes, scales = records.split([width // 2, records.shape[-1] - width // 2], -1)
        table = torch.tensor(_E2M1, device=records.device)
        values = torch.cat([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
    if kind == "main":
        return values * scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def pack(kind: str, keys: Tensor) -> Tensor:
    """Keys [..., D] -> records [..., bytes] uint8.

    Main: scale S = E4M3(max(amax, 6 * 2^-9) / 6) per 16 channels, value E2M1(clip(x / S, -6, 6)). Index: S
    the power of two at or above max(amax, 6 * 2^-126) / 6 per 32. Window: S the power of two at or above
    max(amax, 1e-4) / 448 per 32, value E4M3(x / S). All roundings to nearest, ties to even.
    """
    record_bytes(kind, keys.shape[-1])
    group = 16 if kind == "main" else 32
    x = keys.float().unflatten(-1, (-1, group))
    amax = x.abs().amax(-1, keepdim=True)
    if kind == "main":
        scale_codes = (amax.clamp(min=6 * 2.0**-9) / 6).clamp(max=448).to(torch.float8_e4m3fn)
        scale, scale_bytes = scale_codes.float(), scale_codes.view(torch.uint8)
    else:
        floor, largest = (1e-4, 448.0) if kind == "window" else (6 * 2.0**-126, 6.0)
        exponent = _ceil_log2(amax.clamp(min=floor) * torch.tensor(1 / largest))
        scale, scale_bytes = torch.exp2(exponent.double() - 127).float(), exponent.to(torch.uint8)
    ratio = (x / scale).flatten(-2)
    if kind == "window":
        codes = ratio.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        low, high = _e2m1_codes(ratio).chunk(2, -1)
        codes = low | (high << 4)
    return torch.cat([codes, scale_bytes.flatten(-2)], -1)


def _ceil_log2(x: Tensor) -> Tensor:
    """Biased exponent of the power of two at or above a positive normal fp32."""
    bits = x.view(torch.int32)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()


def _e2m1_codes(x: Tensor) -> Tensor:
    """Nearest E2M1 code, ties to the even mantissa; beyond 6 it is 6, and the sign of zero is kept."""
    size = x.abs()
    above = [
        (size > 0.25),
        (size >= 0.75),
        (size > 1.25),
        (size >= 1.75),
        (size > 2.5),
        (size >= 3.5),
        (size > 5.0),
    ]
    return torch.stack(above).sum(0, dtype=torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
