"""The two packed key records of the caches, as plain tensors.

Main record, 288 bytes: 256 bytes of E2M1 codes, then 32 E4M3 scales, one per 16 channels in channel order. Byte j holds
channel j in its low and channel j + 256 in its high nibble, so that a kernel works on two halves of the head without
interleaving. Window record, 528 bytes: 512 E4M3 values, then 16 UE8M0 scales, one per 32 channels.
Every decoded value is exact in bf16: E2M1 x E4M3 has at most 6 significant bits, E4M3 x 2^k has 4.
"""

import torch
from torch import Tensor

HEAD_DIM = 512
MAIN_BYTES = HEAD_DIM // 2 + HEAD_DIM // 16
WINDOW_BYTES = HEAD_DIM + HEAD_DIM // 32

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def head_dim(records: Tensor, kind: str) -> int:
    """Channels of a record from its bytes: 9/16 byte a channel ("main") or 33/32 ("window")."""
    size = records.shape[-1]
    channels = size * 16 // 9 if kind == "main" else size * 32 // 33
    expected = channels // 2 + channels // 16 if kind == "main" else channels + channels // 32
    if channels % 32 or expected != size or records.dtype != torch.uint8:
        raise ValueError(
            f"{kind} records must be uint8 with 288 (main) or 528 (window) bytes for 512 channels, or the same "
            f"proportions for another multiple of 32; got {records.dtype} with {size} bytes"
        )
    return channels


def unpack_main(records: Tensor) -> Tensor:
    """Main records [..., 288] uint8 -> keys [..., 512] fp32."""
    channels = head_dim(records, "main")
    table = torch.tensor(_E2M1, device=records.device)
    codes, scales = records.split([channels // 2, channels // 16], -1)
    values = torch.cat([table[(codes & 15).long()], table[(codes >> 4).long()]], -1)
    return values * scales.contiguous().view(torch.float8_e4m3fn).float().repeat_interleave(16, -1)


def unpack_window(records: Tensor) -> Tensor:
    """Window records [..., 528] uint8 -> keys [..., 512] fp32."""
    channels = head_dim(records, "window")
    codes, scales = records.split([channels, channels // 32], -1)
    values = codes.contiguous().view(torch.float8_e4m3fn).float()
    return values * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
