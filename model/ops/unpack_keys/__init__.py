"""Cache records back to bf16 keys, exactly: what prefill and training gather from.

Done once for a group of layers that share one cache, so that their attention reads plain bf16.
"""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.records import unpack

__all__ = ["unpack_keys"]


def unpack_keys(records: Tensor) -> Tensor:
    """Main records [E, 9 D / 16] uint8 -> keys [E, D] bf16 (every value is exact in bf16)."""
    if use_kernel("unpack_keys", records):
        from model.ops.unpack_keys import triton

        return triton.unpack_keys(records)
    return unpack("main", records).to(torch.bfloat16)
