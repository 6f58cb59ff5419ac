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

from model.ops.experts.plan import BLOCK_TOKENS, TILE_ROWS, Plan, most_tiles
from model.ops.tile import operand, round_bf16

_ROUTER_TILE = 1 << 14
_SCAN_ABOVE = 1 << 17


@triton.jit
def _route(
    x, weight, bias, forced, affinity, ids, weights, loads, count, factor, inverse_temperature,
    D: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, FORCED: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
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
    load = tl.zeros((ROWS, EP), tl.int32)
    for k in tl.static_range(K):
        best = tl.argmax(open, 1, tie_break_left=True)
        open = tl.where(e[None, :] == best[:, None], float("-inf"), open)
        if FORCED:
            given = tl.load(forced + row * K + k).to(tl.int32)
            best = tl.where(given >= 0, given, best)
        hit = e[None, :] == best[:, None]
        own = tl.sum(tl.where(hit, value, 0.0), 1)
        load += hit.to(tl.int32)
        total += own
        picked = tl.where(j == k, own[:, None], picked)
        number = tl.where(j == k, best[:, None], number)
    keep = inside & (j < K)
    tl.store(ids + row[:, None] * K + j, number.to(tl.int64), mask=keep)
    tl.store(weights + row[:, None] * K + j, picked / (total + 1e-20)[:, None] * factor, mask=keep)
    load = tl.sum(tl.where(inside, load, 0), 0)
    tl.store(loads + tl.program_id(0) * E + e, load, mask=e < E)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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
    blocks = triton.cdiv(count, BLOCK_TOKENS)
    loads = torch.empty((blocks, experts), dtype=torch.int32, device=x.device)
    _route[(blocks,)](
        x, weight, bias, ids if forced is None else forced.contiguous(), affinity, ids, weights, loads, count,
        factor, 1.0 / temperature, D=width, E=experts, EP=padded, K=chosen,
        FORCED=forced is not None, ROWS=BLOCK_TOKENS, DEPTH=depth, num_warps=4, num_stages=4,
    )  # fmt: skip
    return affinity, ids, weights, loads


@triton.jit(do_not_specialize=["blocks"])
def _place_before(
    loads, before, blocks, E: tl.constexpr, EP: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr
):
    """Tokens of each expert before each block, and in all blocks: [blocks + 1, EP]."""
    e = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    running = tl.zeros((WIDE,), tl.int32)
    for n in tl.range(0, blocks, STEP):
        b = n + tl.arange(0, STEP)
        keep = (b < blocks)[:, None] & (e < E)[None, :]
        part = tl.load(loads + b[:, None] * E + e[None, :], mask=keep, other=0)
        past = tl.cumsum(part, 0) - part + running[None, :]
        tl.store(before + b[:, None] * EP + e[None, :], past, mask=(b < blocks)[:, None])
        running += tl.sum(part, 0)
    tl.store(before + blocks * EP + e, running)


@triton.jit
def _tiles(
    tiles, bound, program, blocks, end, total, EP: tl.constexpr, ALL: tl.constexpr, TILE: tl.constexpr
):
    """Expert and first row of each tile of up to TILE rows; -1 beyond the last; and how many there are."""
    e = tl.arange(0, EP)
    own = (total + TILE - 1) // TILE
    stop = tl.cumsum(own, 0)
    base = end - total - (stop - own) * TILE
    for n in tl.range(program * 16, bound, blocks * 16):
        slot = n + tl.arange(0, 16)
        expert = tl.sum((stop[None, :] <= slot[:, None]).to(tl.int32), 1)
        first = tl.sum(tl.where(e[None, :] == expert[:, None], base[None, :], 0), 1) + slot * TILE
        at = tiles + 2 * slot
        tl.store(at, tl.where(expert < ALL, expert, -1), mask=slot < bound)
        tl.store(at + 1, first, mask=slot < bound)
    if program == 0:
        tl.store(tiles + 2 * bound + tl.arange(0, 2), tl.sum(own, 0))


@triton.jit(do_not_specialize=["count", "blocks", "bound"])
def _place(
    ids, loads, tokens, place, ends, tiles, count, blocks, bound, E: tl.constexpr, K: tl.constexpr,
    KS: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    SCANNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Rows of the experts of a block of BLOCK tokens, of which CHUNK are placed at a time."""
    program = tl.program_id(0)
    e = tl.arange(0, EP)
    before = tl.zeros((EP,), tl.int32)
    total = tl.zeros((EP,), tl.int32)
    if SCANNED:
        before = tl.load(loads + program * EP + e)
        total = tl.load(loads + blocks * EP + e)
    else:
        for n in tl.range(0, blocks, 16):
            b = n + tl.arange(0, 16)
            keep = (b < blocks)[:, None] & (e < E)[None, :]
            part = tl.load(loads + b[:, None] * E + e[None, :], mask=keep, other=0)
            total += tl.sum(part, 0)
            before += tl.sum(tl.where((b < program)[:, None], part, 0), 0)
    always: tl.constexpr = E + KS - K
    shared = (e >= E) & (e < always)
    total = tl.where(shared, count, total)
    end = tl.cumsum(total, 0)
    start = end - total + tl.where(shared, program * BLOCK, before)
    for n in tl.static_range(0, BLOCK, CHUNK):
        i = tl.arange(0, CHUNK * KP)
        t, j = program * BLOCK + n + i // KP, i % KP
        inside = (t < count) & (j < KS)
        expert = tl.load(ids + t * K + j, mask=inside & (j < K), other=0).to(tl.int32)
        expert = tl.where(inside, tl.where(j < K, expert, E + j - K), EP)
        hit = (expert[:, None] == e[None, :]).to(tl.int32)
        row = tl.sum(hit * (tl.cumsum(hit, 0) - 1 + start[None, :]), 1)
        tl.store(place + t * KS + j, row, mask=inside)
        tl.store(tokens + row, t, mask=inside)
        start += tl.sum(hit, 0)
    if program == 0:
        tl.store(ends + e, end, mask=e < always)
    _tiles(tiles, bound, program, blocks, end, total, EP, always, TILE)


def plan(ids: Tensor, loads: Tensor, shared: int, scan_above: int = _SCAN_ABOVE) -> Plan:
    """See `model.ops.experts.plan_of`."""
    count, chosen = ids.shape
    blocks, experts = loads.shape
    every, device = chosen + shared, ids.device
    padded = max(16, triton.next_power_of_2(experts + shared))
    wide = triton.next_power_of_2(every)
    bound = most_tiles(count * every, experts + shared)
    tokens = torch.empty(count * every, dtype=torch.int32, device=device)
    place = torch.empty((count, every), dtype=torch.int32, device=device)
    ends = torch.empty(experts + shared, dtype=torch.int32, device=device)
    tiles = torch.empty((bound + 1, 2), dtype=torch.int32, device=device)
    scanned = blocks * padded > scan_above
    if scanned:
        before = torch.empty((blocks + 1, padded), dtype=torch.int32, device=device)
        _place_before[(padded // 16,)](
            loads, before, blocks, E=experts, EP=padded, STEP=128, WIDE=16, num_warps=4
        )
        loads = before
    _place[(blocks,)](
        ids, loads, tokens, place, ends, tiles, count, blocks, bound, E=experts, K=chosen, KS=every, KP=wide,
        EP=padded, BLOCK=BLOCK_TOKENS, CHUNK=min(BLOCK_TOKENS, max(1, 16384 // padded // wide)),
        SCANNED=scanned, TILE=TILE_ROWS, num_warps=8,
    )  # fmt: skip
    return Plan(tokens, place, ends, tiles)


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
