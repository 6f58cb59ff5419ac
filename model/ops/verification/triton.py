"""Rejection sampling by chunks of the vocabulary; what depends on the outcome stays on the card.

The weights of all rows are summed as in sampling. One program a request decides on its drafts; the chunks of
the row that follows the accepted ones are then weighed, with what was proposed there taken off, and one
program a request draws from them.
"""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.sampling.tile import CHUNK, chosen_chunk, largest, threshold, weigh
from model.ops.sampling.triton import tops_and_masses
from model.ops.verification.reference import REST_BITS

_UNITS = tl.constexpr(float(2**REST_BITS))


@triton.jit
def _total(masses, row, CHUNKS: tl.constexpr, PADDED: tl.constexpr):
    c = tl.arange(0, PADDED)
    return tl.sum(tl.load(masses + row * CHUNKS + c, mask=c < CHUNKS, other=0), 0)


@triton.jit
def _probability(z, top, total):
    return weigh(z, top).to(tl.float64) / total.to(tl.float64)


@triton.jit(do_not_specialize=["requests"])
def _accept(
    target,
    tops,
    masses,
    proposed,
    q_tops,
    q_masses,
    index,
    drafts,
    lengths,
    draws,
    accepted,
    requests,
    size,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """How many drafts of a request pass before the first that does not."""
    r = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + r)
    count = length * 0
    going = length >= 0
    for k in tl.range(0, WIDTH):
        token = tl.load(drafts + r * WIDTH + k)
        row = tl.load(index + r * PLACES + k)
        slot = k * requests + r
        z = tl.load(target + row * size + token)
        p = _probability(z, largest(tops, row, CHUNKS, PADDED), _total(masses, row, CHUNKS, PADDED))
        z = tl.load(proposed + slot * size + token)
        q = _probability(z, largest(q_tops, slot, CHUNKS, PADDED), _total(q_masses, slot, CHUNKS, PADDED))
        going = going & (tl.load(draws + r * WIDTH + k) * q < p) & (k < length)
        count += going.to(tl.int64)
    tl.store(accepted + r, count)


@triton.jit
def _left(
    target,
    tops,
    masses,
    proposed,
    q_tops,
    q_masses,
    index,
    lengths,
    accepted,
    r,
    ids,
    requests,
    size,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Units of p, and of what is left of it after a refusal, for some ids of a request's next row."""
    place = tl.load(accepted + r)
    row = tl.load(index + r * PLACES + place)
    inside = ids < size
    z = tl.load(target + row * size + ids, mask=inside, other=float("-inf"))
    p = _probability(z, largest(tops, row, CHUNKS, PADDED), _total(masses, row, CHUNKS, PADDED))
    refused = place < tl.load(lengths + r)
    slot = tl.minimum(place, WIDTH - 1)
    at = slot * requests + r
    z = tl.load(proposed + at * size + ids, mask=ids < tl.where(refused, size, 0), other=float("-inf"))
    q = _probability(z, largest(q_tops, at, CHUNKS, PADDED), _total(q_masses, at, CHUNKS, PADDED))
    rest = tl.where(refused & (p > q), p - q, 0.0)
    whole = tl.where(p == p, p, 0.0)
    return (whole * _UNITS + 0.5).to(tl.int64), (rest * _UNITS + 0.5).to(tl.int64)


@triton.jit(do_not_specialize=["requests"])
def _weigh_rest(
    target,
    tops,
    masses,
    proposed,
    q_tops,
    q_masses,
    index,
    lengths,
    accepted,
    left,
    requests,
    size,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    whole, rest = _left(
        target, tops, masses, proposed, q_tops, q_masses, index, lengths, accepted, r, ids, requests, size,
        WIDTH, PLACES, CHUNKS, PADDED,
    )  # fmt: skip
    at = left + r * CHUNKS + tl.program_id(0)
    tl.store(at, tl.sum(whole, 0))
    tl.store(at + requests * CHUNKS, tl.sum(rest, 0))


@triton.jit(do_not_specialize=["requests"])
def _draw_rest(
    target,
    tops,
    masses,
    proposed,
    q_tops,
    q_masses,
    index,
    lengths,
    accepted,
    left,
    draws,
    tokens,
    requests,
    size,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    mass = tl.load(left + r * CHUNKS + c, mask=c < CHUNKS, other=0)
    rest = tl.load(left + (requests + r) * CHUNKS + c, mask=c < CHUNKS, other=0)
    # Where rounding alone refused, nothing is left: p equals q, and p is drawn from.
    short = tl.sum(rest, 0) > 0
    mass = tl.where(short, rest, mass)
    limit = threshold(tl.load(draws + r), tl.sum(mass, 0))
    chunk, before = chosen_chunk(mass, limit)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    whole, rest = _left(
        target, tops, masses, proposed, q_tops, q_masses, index, lengths, accepted, r, ids, requests, size,
        WIDTH, PLACES, CHUNKS, PADDED,
    )  # fmt: skip
    within = tl.where(short, rest, whole)
    passed = (before + tl.cumsum(within, 0) <= limit).to(tl.int32)
    tl.store(tokens + r, tl.minimum(chunk * BLOCK + tl.sum(passed, 0), size - 1).to(tl.int64))


def verification(
    target: Tensor,
    proposed: Tensor,
    index: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    draws: Tensor,
    rest_draws: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `model.ops.verification.verification`."""
    (requests, width), size = drafts.shape, target.shape[1]
    accepted, tokens = torch.zeros_like(lengths), torch.empty_like(lengths)
    if not requests:
        return accepted, tokens
    chunks = triton.cdiv(size, CHUNK)
    target, slots = target.contiguous(), proposed[:width].contiguous()
    lengths, rest_draws = lengths.contiguous(), rest_draws.contiguous()
    tops, masses = tops_and_masses(target)
    q_tops, q_masses = tops_and_masses(slots.view(-1, size)) if width else (tops, masses)
    weights = (target, tops, masses, slots, q_tops, q_masses, index.contiguous())
    shape = {
        "WIDTH": max(width, 1),
        "PLACES": width + 1,
        "CHUNKS": chunks,
        "PADDED": triton.next_power_of_2(chunks),
    }
    if width:
        _accept[(requests,)](
            *weights, drafts.contiguous(), lengths, draws.contiguous(), accepted, requests, size, **shape,
            num_warps=1,
        )  # fmt: skip
    left = torch.empty((2, requests, chunks), dtype=torch.int64, device=target.device)
    shape |= {"BLOCK": CHUNK, "num_warps": 8}
    outcome = (lengths, accepted, left)
    _weigh_rest[(chunks, requests)](*weights, *outcome, requests, size, **shape)
    _draw_rest[(requests,)](*weights, *outcome, rest_draws, tokens, requests, size, **shape)
    return accepted, tokens
