"""Routing, grouping by counting, the activation and the sum of a token's experts, without atomics.

Rows of a group stand in token order and a token's experts are summed in the order of its choice, so that no
result depends on what else is in the batch.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.experts.plan import Plan
from model.ops.tile import operand, round_bf16

_ROWS = 16
_ROUTER_TILE = 1 << 14


@triton.jit
def _route(
    x, weight, bias, forced, affinity, ids, weights, count, factor, inverse_temperature, D: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, FORCED: tl.constexpr, ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(t, count - 1).to(tl.int64)
    e = tl.arange(0, EP)
    acc = tl.zeros((ROWS, EP), tl.float32)
    for n in tl.range(0, D, DEPTH):
        c = n + tl.arange(0, DEPTH)
        a = operand(tl.load(x + row[:, None] * D + c[None, :]))
        b = operand(tl.load(weight + e[None, :] * D + c[:, None], mask=(e < E)[None, :], other=0.0))
        acc = tl.dot(a, b, acc)
    logit = tl.maximum(acc * inverse_temperature, -80.0)
    soft = tl.maximum(logit, 0.0) + _log1p(tl.exp(-tl.abs(logit)))
    value = tl.sqrt_rn(soft)
    inside = (t < count)[:, None]
    tl.store(affinity + row[:, None] * E + e[None, :], value, mask=inside & (e < E)[None, :])
    open = value + tl.load(bias + e, mask=e < E, other=0.0)[None, :]
    open = tl.where((e < E)[None, :], open, float("-inf"))
    j = tl.arange(0, 16)[None, :]
    picked = tl.zeros((ROWS, 16), tl.float32)
    number = tl.zeros((ROWS, 16), tl.int32)
    total = tl.zeros((ROWS,), tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(open, 1, tie_break_left=True)
        open = tl.where(e[None, :] == best[:, None], float("-inf"), open)
        if FORCED:
            given = tl.load(forced + row * K + k).to(tl.int32)
            best = tl.where(given >= 0, given, best)
        own = tl.sum(tl.where(e[None, :] == best[:, None], value, 0.0), 1)
        total += own
        picked = tl.where(j == k, own[:, None], picked)
        number = tl.where(j == k, best[:, None], number)
    keep = inside & (j < K)
    tl.store(ids + row[:, None] * K + j, number.to(tl.int64), mask=keep)
    tl.store(weights + row[:, None] * K + j, picked / (total + 1e-20)[:, None] * factor, mask=keep)


@triton.jit
def _log1p(z):
    """log(1 + z) of z in (0, 1], accurate for small z."""
    u = 1.0 + z
    return tl.where(u == 1.0, z, tl.log(u) * z / tl.where(u == 1.0, 1.0, u - 1.0))


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    chosen: int,
    factor: float,
    temperature: float,
    forced: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `model.ops.experts.route`."""
    count, width = x.shape
    experts = len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and chosen <= 16
    padded = max(16, triton.next_power_of_2(experts))
    depth = min(128, width & -width)
    while padded * depth > _ROUTER_TILE:
        depth //= 2
    affinity = torch.empty((count, experts), dtype=torch.float32, device=x.device)
    ids = torch.empty((count, chosen), dtype=torch.int64, device=x.device)
    weights = torch.empty((count, chosen), dtype=torch.float32, device=x.device)
    _route[(triton.cdiv(count, _ROWS),)](
        x, weight, bias, ids if forced is None else forced.contiguous(), affinity, ids, weights, count,
        factor, 1.0 / temperature, D=width, E=experts, EP=padded, K=chosen,
        FORCED=forced is not None, ROWS=_ROWS, DEPTH=depth, num_warps=4, num_stages=4,
    )  # fmt: skip
    return affinity, ids, weights


@triton.jit
def _expert(ids, i, count, E: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, EP: tl.constexpr):
    """Expert of item i = token * KS + position; none (EP) beyond the end."""
    t, j = i // KS, i % KS
    e = tl.load(ids + t * K + j, mask=(i < count) & (j < K), other=0).to(tl.int32)
    return tl.where(i < count, tl.where(j < K, e, E + j - K), EP)


@triton.jit
def _histogram(
    ids, histogram, count, E: tl.constexpr, K: tl.constexpr, KS: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    hit = _expert(ids, i, count, E, K, KS, EP)[:, None] == tl.arange(0, EP)[None, :]
    tl.store(histogram + tl.program_id(0) * EP + tl.arange(0, EP), tl.sum(hit.to(tl.int32), 0))


@triton.jit
def _place(
    ids, histogram, tokens, place, ends, count, blocks, E: tl.constexpr, K: tl.constexpr, KS: tl.constexpr,
    EP: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, EP)
    hit = (_expert(ids, i, count, E, K, KS, EP)[:, None] == e[None, :]).to(tl.int32)
    before = tl.zeros((EP,), tl.int32)
    total = tl.zeros((EP,), tl.int32)
    if SINGLE:
        total = tl.sum(hit, 0)
    else:
        for n in tl.range(0, blocks, 16):
            b = n + tl.arange(0, 16)
            part = tl.load(histogram + b[:, None] * EP + e[None, :], mask=(b < blocks)[:, None], other=0)
            total += tl.sum(part, 0)
            before += tl.sum(tl.where((b < program)[:, None], part, 0), 0)
    end = tl.cumsum(total, 0)
    start = end - total + before
    rank = tl.cumsum(hit, 0) - 1
    row = tl.sum(hit * (rank + start[None, :]), 1)
    tl.store(place + i, row, mask=i < count)
    tl.store(tokens + row, i // KS, mask=i < count)
    if program == 0:
        tl.store(ends + e, end, mask=e < ALL)


def plan(ids: Tensor, experts: int, shared: int) -> Plan:
    """See `model.ops.experts.plan_of`."""
    count, chosen = ids.shape
    every = chosen + shared
    items = count * every
    padded = max(16, triton.next_power_of_2(experts + shared))
    block = min(max(16, 16384 // padded), max(16, triton.next_power_of_2(items)))
    blocks = triton.cdiv(items, block)
    histogram = torch.empty((blocks, padded), dtype=torch.int32, device=ids.device)
    tokens = torch.empty(items, dtype=torch.int32, device=ids.device)
    place = torch.empty((count, every), dtype=torch.int32, device=ids.device)
    ends = torch.empty(experts + shared, dtype=torch.int32, device=ids.device)
    sizes = {"E": experts, "K": chosen, "KS": every, "EP": padded, "BLOCK": block}
    if blocks > 1:
        _histogram[(blocks,)](ids, histogram, items, **sizes, num_warps=4)
    _place[(blocks,)](
        ids, histogram, tokens, place, ends, items, blocks, **sizes, ALL=experts + shared, SINGLE=blocks == 1,
        num_warps=8,
    )  # fmt: skip
    return Plan(tokens, place, ends)


@triton.jit
def _halves(hidden, row, c, keep, limit, F: tl.constexpr):
    gate = tl.load(hidden + row * 2 * F + c, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * F + F + c, mask=keep, other=0.0).to(tl.float32)
    return gate, up, tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def _swiglu(
    hidden, weights, place, out, limit, K: tl.constexpr, KS: tl.constexpr, F: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    row = tl.load(place + i).to(tl.int64)
    j = i % KS
    weight = tl.load(weights + i // KS * K + j, mask=j < K, other=1.0)
    _, _, gate, up = _halves(hidden, row, c, c < F, limit, F)
    product = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * F + c, round_bf16(product * weight).to(out.dtype.element_ty), mask=c < F)


def swiglu(hidden: Tensor, weights: Tensor, plan: Plan, limit: float) -> Tensor:
    """See `model.ops.experts.swiglu`."""
    rows, width = hidden.shape
    out = torch.empty((rows, width // 2), dtype=hidden.dtype, device=hidden.device)
    _swiglu[(rows,)](
        hidden, weights, plan.place, out, limit, K=weights.shape[1], KS=plan.place.shape[1], F=width // 2,
        BLOCK=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _swiglu_backward(
    hidden, weights, place, grad, grad_hidden, grad_weights, limit, K: tl.constexpr, KS: tl.constexpr,
    F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    keep = c < F
    row = tl.load(place + i).to(tl.int64)
    j = i % KS
    weight = tl.load(weights + i // KS * K + j, mask=j < K, other=1.0)
    raw_gate, raw_up, gate, up = _halves(hidden, row, c, keep, limit, F)
    g = tl.load(grad + row * F + c, mask=keep, other=0.0).to(tl.float32)
    slope = 1.0 / (1.0 + tl.exp(-gate))
    active = gate * slope
    tl.store(grad_weights + i // KS * K + j, tl.sum(g * active * up, 0), mask=j < K)
    g = g * weight
    grad_gate = g * up * slope * (1.0 + gate * (1.0 - slope))
    grad_gate = tl.where(raw_gate < limit, grad_gate, 0.0)
    grad_up = tl.where((raw_up > -limit) & (raw_up < limit), g * active, 0.0)
    at = grad_hidden + row * 2 * F + c
    tl.store(at, round_bf16(grad_gate).to(grad_hidden.dtype.element_ty), mask=keep)
    tl.store(at + F, round_bf16(grad_up).to(grad_hidden.dtype.element_ty), mask=keep)


def swiglu_backward(
    hidden: Tensor, weights: Tensor, plan: Plan, limit: float, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden rows and of the weights [T, k]."""
    rows, width = hidden.shape
    grad_hidden, grad_weights = torch.empty_like(hidden), torch.empty_like(weights)
    _swiglu_backward[(rows,)](
        hidden, weights, plan.place, grad, grad_hidden, grad_weights, limit, K=weights.shape[1],
        KS=plan.place.shape[1], F=width // 2, BLOCK=triton.next_power_of_2(width // 2), num_warps=4,
    )  # fmt: skip
    return grad_hidden, grad_weights


@triton.jit
def _combine(rows, place, out, KS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(KS):
        row = tl.load(place + t * KS + j).to(tl.int64)
        acc += tl.load(rows + row * D + c, mask=c < D, other=0.0).to(tl.float32)
    tl.store(out + t * D + c, round_bf16(acc).to(out.dtype.element_ty), mask=c < D)


def combine(rows: Tensor, plan: Plan) -> Tensor:
    """See `model.ops.experts.combine`."""
    count, every = plan.place.shape
    width = rows.shape[1]
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    block = min(1024, triton.next_power_of_2(width))
    grid = (count, triton.cdiv(width, block))
    _combine[grid](rows, plan.place, out, KS=every, D=width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _few(
    x, weight, tokens, place, weights, ends, out, limit, K: tl.constexpr, KS: tl.constexpr, D: tl.constexpr,
    N: tl.constexpr, PAIR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows of an expert times its matrix; PAIR: gathered tokens times gate and up, activated and weighted."""
    g = tl.program_id(1)
    end = tl.load(ends + g)
    start = tl.load(ends + tl.maximum(g - 1, 0))
    start = tl.where(g == 0, 0, start)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    matrix = weight + g.to(tl.int64) * (D * N * (2 if PAIR else 1)) + n[None, :] * D + k[:, None]
    for m in tl.range(start, end, ROWS):
        row = m + tl.arange(0, ROWS)
        inside = row < end
        source = row
        if PAIR:
            source = tl.load(tokens + row, mask=inside, other=0)
        left = x + tl.where(inside, source, 0).to(tl.int64)[:, None] * D + k[None, :]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for d in tl.range(0, D, DEPTH):
            a = operand(tl.load(left + d))
            acc = tl.dot(a, operand(tl.load(matrix + d)), acc)
            if PAIR:
                up = tl.dot(a, operand(tl.load(matrix + N * D + d)), up)
        if PAIR:
            scale = tl.full((ROWS,), 1.0, tl.float32)
            for j in tl.static_range(K):
                here = tl.load(place + source * KS + j, mask=inside, other=-1) == row
                scale = tl.where(here, tl.load(weights + source * K + j, mask=inside, other=0.0), scale)
            gate = tl.minimum(round_bf16(acc).to(tl.float32), limit)
            up = tl.minimum(tl.maximum(round_bf16(up).to(tl.float32), -limit), limit)
            acc = gate / (1.0 + tl.exp(-gate)) * up * scale[:, None]
        target = out + row.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(target, round_bf16(acc).to(out.dtype.element_ty), mask=inside[:, None])


def few_fits(x: Tensor, w13: Tensor, w2: Tensor, items: int) -> bool:
    """Whether the kernels for few rows serve the shapes: whole tiles, and no more rows than pay."""
    return items <= FEW and w2.shape[2] % 64 == 0 and x.shape[1] % 64 == 0


FEW = 1024


def few(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, plan: Plan, limit: float) -> Tensor:
    """The rows [n, d] that `combine` sums, of few tokens [T, d]: two kernels and nothing gathered."""
    items, inner = len(plan.tokens), w2.shape[2]
    active = torch.empty((items, inner), dtype=x.dtype, device=x.device)
    rows = torch.empty((items, x.shape[1]), dtype=x.dtype, device=x.device)
    arguments = (plan.tokens, plan.place, weights, plan.ends)
    sizes = {"K": weights.shape[1], "KS": plan.place.shape[1], "ROWS": 64, "num_warps": 4, "num_stages": 3}
    for source, weight, out, pair in ((x, w13, active, True), (active, w2, rows, False)):
        depth, columns = source.shape[1], out.shape[1]
        tile = 32 if pair else 64
        _few[(columns // tile, len(plan.ends))](
            source, weight, *arguments, out, limit, D=depth, N=columns, PAIR=pair, COLUMNS=tile,
            DEPTH=min(128, depth & -depth), **sizes,
        )  # fmt: skip
    return rows
