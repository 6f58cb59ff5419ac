"""Unpacks main records with the decoders of the decode kernel."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.records import channels
from model.ops.tile import KEY_SCALE, constant_bf16, e2m1_halves, e2m1_scale, scale_groups


@triton.jit(do_not_specialize=["count"])
def _unpack(records, keys, count, D: tl.constexpr, BLOCK: tl.constexpr):
    HALF: tl.constexpr = D // 2
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (e < count)[:, None]
    d = tl.arange(0, HALF)[None, :]
    g = tl.arange(0, HALF // 16)[None, :]
    record = records + e[:, None] * (HALF + D // 16)
    low, high = e2m1_halves(tl.load(record + d, mask=inside, other=0))
    s0 = e2m1_scale(tl.load(record + HALF + g, mask=inside, other=0))
    s1 = e2m1_scale(tl.load(record + HALF + HALF // 16 + g, mask=inside, other=0))
    k0 = scale_groups(low, s0, BLOCK, HALF, 16) * constant_bf16(KEY_SCALE)
    k1 = scale_groups(high, s1, BLOCK, HALF, 16) * constant_bf16(KEY_SCALE)
    key = keys + e[:, None] * D + d
    tl.store(key, k0.to(keys.dtype.element_ty), mask=inside)
    tl.store(key + HALF, k1.to(keys.dtype.element_ty), mask=inside)


def unpack_keys(records: Tensor) -> Tensor:
    """See `model.ops.unpack_keys.unpack_keys`."""
    records = records.contiguous()
    count, width = len(records), channels(records, "main")
    keys = torch.empty((count, width), dtype=torch.bfloat16, device=records.device)
    _unpack[(triton.cdiv(count, 16),)](records, keys, count, D=width, BLOCK=16, num_warps=4)
    return keys
