"""Sampling without sorting: every pass over the vocabulary runs by chunks in parallel.

Two passes find the largest logit and sum the integer weights; one program a row then draws a chunk and an id
in it. Where a row is truncated, the second pass also counts ids in 32 ranges below the largest logit, a third
lays side by side what may stay, and the program of the row finds where that ends (`sampling.limits`).
Integer sums only: the same tokens whatever the batch or the size of the chunks.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.sampling import limits
from model.ops.sampling.limits import collect, count_ranges, draw_kept
from model.ops.sampling.reference import Drawn, Rules, logprobs_of, tempered_logits
from model.ops.sampling.tile import (
    CHUNK,
    ONE,
    RANGES,
    chosen_chunk,
    finite_quotient,
    largest,
    quotient,
    rule,
    tempered,
    threshold,
    weigh,
)

_INCREMENT = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
CANDIDATES = 4096
"""Candidates of a truncated row that are looked at together."""


@triton.jit
def _mix(x):
    x = x + _INCREMENT
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position):
    """The draw in [0, 1) of a seed (bits) at a position, fp64: see `reference.uniforms`."""
    mixed = _mix(seed.to(tl.uint64, bitcast=True))
    bits = _mix(mixed ^ (position.to(tl.uint64, bitcast=True) * _INCREMENT)) >> 16
    return bits.to(tl.int64, bitcast=True).to(tl.float64) * 3.552713678800501e-15


@triton.jit(do_not_specialize=["rows"])
def _tops(
    logits, rules, tops, rows, size, stride, CHUNKS: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    temperature = 1.0
    if not PLAIN:
        temperature, _, _, _ = rule(rules, rows, row, size)
    z = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf"))
    broken = tl.max((z != z).to(tl.int32), 0) > 0
    # The quotient rises with the logit, so that its largest is that of the largest logit.
    top = quotient(tl.max(tl.where(z == z, z, float("-inf")), 0), temperature)
    tl.store(tops + row * CHUNKS + chunk, tl.where(broken, float("nan"), top))


@triton.jit(do_not_specialize=["rows"])
def _masses(
    logits,
    rules,
    tops,
    masses,
    counts,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    PLAIN: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    temperature = 1.0
    if not PLAIN:
        temperature, _, top_k, top_p = rule(rules, rows, row, size)
    top = largest(tops, row, CHUNKS, PADDED)
    raw = tl.load(logits + row * stride + ids, mask=ids < size, other=float("-inf"))
    z = finite_quotient(raw, temperature)
    tl.store(masses + row * CHUNKS + chunk, tl.sum(weigh(z, top), 0))
    if TRUNCATE:  # noqa: SIM102
        if ((top_k < size) | (top_p < 1.0)) & (top == top):
            at = counts + (row * CHUNKS + chunk) * RANGES + tl.arange(0, RANGES)
            tl.store(at, count_ranges(raw, z, top))


@triton.jit
def _draw_any(logits, temperature, top, mass, total, draw, size, BLOCK: tl.constexpr):
    """The token drawn from the whole row, whose chunks weigh `mass`."""
    limit = threshold(draw, total)
    chunk, before = chosen_chunk(mass, limit)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    within = weigh(tempered(logits, ids, ids < size, temperature), top)
    passed = (before + tl.cumsum(within, 0) <= limit).to(tl.int32)
    return tl.minimum(chunk * BLOCK + tl.sum(passed, 0), size - 1)


@triton.jit
def _best(
    logits, temperature, top, tops, size, CHUNKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    c = tl.arange(0, PADDED)
    chunk = tl.min(tl.where(tl.load(tops + c, mask=c < CHUNKS, other=float("-inf")) == top, c, CHUNKS - 1), 0)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    z = tempered(logits, ids, ids < size, temperature)
    return tl.min(tl.where(z == top, ids, size - 1), 0)


@triton.jit(do_not_specialize=["rows"])
def _choose(
    logits,
    rules,
    tops,
    masses,
    places,
    found,
    weights,
    ids,
    out,
    rows,
    size,
    stride,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    TRUNCATE: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """A row's token, how many ids it was truncated to, and both log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    temperature, greedy, top_k, top_p = rule(rules, rows, row, size)
    top = largest(tops, row, CHUNKS, PADDED)
    draw = uniform(tl.load(rules + 3 * rows + row), tl.load(rules + 4 * rows + row))
    c = tl.arange(0, PADDED)
    mass = tl.load(masses + row * CHUNKS + c, mask=c < CHUNKS, other=0)
    total = tl.sum(mass, 0)
    weight = total
    listed = size * 0
    finite = top == top
    token = size * 0
    truncated = ((top_k < size) | (top_p < 1.0)) & finite
    if TRUNCATE and truncated:
        count = tl.load(places + row * (CHUNKS + 1) + CHUNKS - 1)
        token, weight, listed = draw_kept(
            found + row * size, weights + row * size, ids + row * size, count, total, top, draw, top_k, top_p,
            size, CANDIDATES,
        )  # fmt: skip
    elif finite:
        if greedy:
            token = _best(logits, temperature, top, tops + row * CHUNKS, size, CHUNKS, PADDED, BLOCK)
        else:
            token = _draw_any(logits, temperature, top, mass, total, draw, size, BLOCK)
    z = tempered(logits, token, token < size, temperature)
    gap = z.to(tl.float64) - top.to(tl.float64)
    own = (gap - tl.log(weight.to(tl.float64) / ONE)).to(tl.float32)
    full = (gap - tl.log(total.to(tl.float64) / ONE)).to(tl.float32)
    own = tl.where(finite, own, float("nan"))
    full = tl.where(finite, full, float("nan"))
    tl.store(out + row, token)
    tl.store(out + rows + row, listed)
    tl.store(out + 2 * rows + row, own.to(tl.int32, bitcast=True))
    tl.store(out + 3 * rows + row, full.to(tl.int32, bitcast=True))


def packed(rules: Rules, device: torch.device) -> Tensor:
    """The rules as int64 [5, B] on `device`, floats by their bits: one copy."""
    floats = (rules.temperature.view(torch.int64), rules.top_p.view(torch.int64))
    joint = torch.stack((*floats, rules.top_k, rules.seed, rules.position))
    return (joint.pin_memory() if device.type == "cuda" else joint).to(device, non_blocking=True)


def tops_and_masses(
    logits: Tensor, rules: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of each chunk [B, chunks]: the largest logit, and the sum of weights.

    Without rules nothing is tempered. `counts` [B, chunks, RANGES] int32 gets the number of ids in each range
    below the largest logit, of rows that are truncated.
    """
    rows, size = logits.shape
    chunks = triton.cdiv(size, CHUNK)
    tops = logits.new_empty((rows, chunks))
    masses = logits.new_empty((rows, chunks), dtype=torch.int64)
    given = masses if rules is None else rules
    at = (rows, size, logits.stride(0))
    shape = {"CHUNKS": chunks, "PLAIN": rules is None, "BLOCK": CHUNK, "num_warps": 8}
    _tops[(chunks, rows)](logits, given, tops, *at, **shape)
    shape |= {"PADDED": triton.next_power_of_2(chunks), "TRUNCATE": counts is not None}
    ranges = masses if counts is None else counts
    if counts is not None:
        shape["num_warps"] = limits.WARPS
    _masses[(chunks, rows)](logits, given, tops, masses, ranges, *at, **shape)
    return tops, masses


def draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """See `model.ops.sampling.draw`."""
    ones = torch.ones(len(seeds), dtype=torch.float64)
    rules = Rules(ones, ones, torch.zeros_like(seeds), seeds, positions)
    return launch(logits.contiguous(), packed(rules, logits.device), truncate=False)[0][0].long()


def launch(logits: Tensor, rules: Tensor, *, truncate: bool) -> tuple[Tensor, Tensor | None]:
    """Tokens, counts of ids and both log-probabilities as int32 bits [4, B], and the ids [B, V] int32.

    `truncate` tells that a row may lose ids; then a row takes 20 bytes of scratch an id of the vocabulary.
    """
    rows, size = logits.shape
    assert logits.stride(1) == 1, "logits must be contiguous along the row"
    chunks = triton.cdiv(size, CHUNK)
    out = logits.new_empty((4, rows), dtype=torch.int32)
    counts = logits.new_empty((rows, chunks, RANGES.value), dtype=torch.int32) if truncate else None
    tops, masses = tops_and_masses(logits, rules, counts)
    places = found = weights = ids = masses
    if counts is not None:
        found, weights = logits.new_empty((2, rows, size), dtype=torch.int64)
        ids = logits.new_empty((rows, size), dtype=torch.int32)
        places = collect(logits, rules, tops, masses, counts, found)
    _choose[(rows,)](
        logits,
        rules,
        tops,
        masses,
        places,
        found,
        weights,
        ids,
        out,
        rows,
        size,
        logits.stride(0),
        CHUNKS=chunks,
        PADDED=triton.next_power_of_2(chunks),
        TRUNCATE=truncate,
        BLOCK=CHUNK,
        CANDIDATES=CANDIDATES,
        num_warps=8,
    )
    return out, ids if truncate else None


def sampling(logits: Tensor, rules: Rules, *, exact: bool = False) -> Drawn:
    """See `model.ops.sampling.sampling`; `exact` where no row is truncated."""
    rows, size = logits.shape
    if not rows:
        return Drawn(torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    truncate = bool(rules.truncating(size).any())
    out, ids = launch(logits, packed(rules, logits.device), truncate=truncate)
    if exact:
        assert not truncate
        own = logprobs_of(tempered_logits(logits, rules), out[0].long())
        tokens, own = torch.stack((out[0], own.view(torch.int32))).cpu()
        own = own.view(torch.float32)
        return Drawn(tokens.long(), own, own)
    tokens, counts, own, full = out.cpu()
    own, full = own.view(torch.float32), full.view(torch.float32)
    if ids is None:
        return Drawn(tokens.long(), own, full)
    counts = torch.where(counts == size, 0, counts.long())
    most = int(counts.max())
    listed = ids[:, :most].cpu()[torch.arange(most) < counts[:, None]]
    return Drawn(tokens.long(), own, full, counts, listed.long())
