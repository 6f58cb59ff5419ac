"""One program packs a group; the partner of a rotated channel is computed a second time."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.records import record_bytes
from model.ops.tile import UNFUSED, e2m1_code, e4m3_code, e4m3_value, round_bf16, ue8m0_code

# Groups a program packs, and its warps.
BLOCK, WARPS = 1, 2


@triton.jit
def _pooled(values, gates, row, c, inside, RATIO: tl.constexpr, D: tl.constexpr):
    """Softmax-pooled channels c of the group that starts at `row`, rounded to bf16, as fp32."""
    at = row.to(tl.int64) * D + c
    if RATIO == 1:
        pooled = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    else:
        top = tl.load(gates + at, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(1, RATIO):
            top = tl.maximum(top, tl.load(gates + at + j * D, mask=inside, other=0.0).to(tl.float32))
        total = tl.zeros_like(top)
        pooled = tl.zeros_like(top)
        for j in tl.static_range(RATIO):
            e = tl.exp(tl.load(gates + at + j * D, mask=inside, other=0.0).to(tl.float32) - top)
            total += e
            pooled += e * tl.load(values + at + j * D, mask=inside, other=0.0).to(tl.float32)
        pooled = pooled / total
    return round_bf16(pooled).to(tl.float32)


@triton.jit
def _pack(
    values,
    gates,
    starts,
    norm,
    cosine,
    sine,
    latent,
    records,
    count,
    eps,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KIND: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (e < count)[:, None]
    row = tl.load(starts + e, mask=e < count, other=0)[:, None]
    c = tl.arange(0, D)[None, :]
    x = _pooled(values, gates, row, c, inside, RATIO, D)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / D) + eps)[:, None]
        x = round_bf16(x * factor * tl.load(norm + c).to(tl.float32)).to(tl.float32)
    tl.store(latent + e.to(tl.int64)[:, None] * D + c, x.to(latent.dtype.element_ty), mask=inside)
    if ROTATED > 0:
        turned = inside & (c >= D - ROTATED)
        partner = _pooled(values, gates, row, c ^ 1, turned, RATIO, D)
        if HAS_NORM:
            partner = round_bf16(partner * factor * tl.load(norm + (c ^ 1)).to(tl.float32)).to(tl.float32)
        pair = (c - (D - ROTATED)) // 2
        at = e[:, None] * (ROTATED // 2) + pair
        cos = tl.load(cosine + at, mask=turned, other=1.0)
        sin = tl.load(sine + at, mask=turned, other=0.0)
        x = round_bf16(tl.fma(x, cos, tl.where(c % 2 == 0, -partner, partner) * sin)).to(tl.float32)

    GROUP: tl.constexpr = 16 if KIND == "main" else 32
    grouped = tl.reshape(x, (BLOCK, D // GROUP, GROUP))
    amax = tl.max(tl.abs(grouped), 2)
    if KIND == "main":
        scale_code = e4m3_code(tl.math.div_rn(tl.maximum(amax, 0.01171875), amax * 0.0 + 6.0))
        scale = e4m3_value(scale_code)
    elif KIND == "window":
        scale_code, scale = ue8m0_code(amax, 1e-4, 448.0)
    else:
        scale_code, scale = ue8m0_code(amax, 7.052966104933725e-38, 6.0)
    scales = tl.broadcast_to(scale[:, :, None], (BLOCK, D // GROUP, GROUP))
    ratio = tl.reshape(tl.math.div_rn(grouped, scales), (BLOCK, D))
    record = records + e.to(tl.int64)[:, None] * BYTES
    if KIND == "window":
        tl.store(record + c, e4m3_code(ratio).to(tl.uint8), mask=inside)
        CODES: tl.constexpr = D
    else:
        half = tl.where(tl.arange(0, 2) == 0, 1, 16)[None, :, None]
        codes = tl.sum(tl.reshape(e2m1_code(ratio), (BLOCK, 2, D // 2)) * half, 1)
        tl.store(record + tl.arange(0, D // 2)[None, :], codes.to(tl.uint8), mask=inside)
        CODES: tl.constexpr = D // 2
    g = tl.arange(0, D // GROUP)[None, :]
    tl.store(record + CODES + g, scale_code.to(tl.uint8), mask=inside)


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
    values = values.contiguous()
    gates = values if gates is None else gates.contiguous()
    count, width = len(starts), values.shape[1]
    size = record_bytes(kind, width)
    latent = torch.empty((count, width), dtype=torch.bfloat16, device=values.device)
    records = torch.empty((count, size), dtype=torch.uint8, device=values.device)
    cosine, sine = (values, values) if rope is None else (x.contiguous() for x in rope)
    block = BLOCK
    _pack[(triton.cdiv(count, block),)](
        values,
        gates,
        starts,
        values if norm is None else norm,
        cosine,
        sine,
        latent,
        records,
        count,
        eps,
        RATIO=ratio,
        D=width,
        ROTATED=0 if rope is None else 2 * cosine.shape[1],
        HAS_NORM=norm is not None,
        KIND=kind,
        BYTES=size,
        BLOCK=block,
        num_warps=WARPS,
        **UNFUSED,
    )
    return latent, records
