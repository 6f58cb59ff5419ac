"""Definition of the draw: integer weights, a counter-based generator, and the inverse of the distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.choices import log_softmax

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNIFORM_BITS = 48
WEIGHT_BITS = 44
"""The most likely id weighs 2^44."""
MOST_IDS = 2 ** (63 - WEIGHT_BITS) - 1
"""So many of them sum to less than 2^63."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How each of B rows is sampled; tensors on the host.

    temperature, top_p: float64 [B]; temperature 0 is greedy. top_k: int64 [B], 0 for no limit. seed: int64
    [B], the bits of an unsigned number. position: int64 [B], that the drawn token will take.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor

    def truncating(self, size: int) -> Tensor:
        """[B] whether top-k or top-p can drop one of `size` ids."""
        limited = ((self.top_k > 0) & (self.top_k < size)) | (self.top_p < 1.0)
        return limited & (self.temperature != 0.0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn, on the host.

    tokens int64 [B]; logprobs and full float32 [B], under the tempered distribution with and without
    truncation (temperature 1 for greedy rows). counts int64 [B] and ids int64 [sum of counts]: what each row
    was truncated to, ascending; no ids for a row that kept everything. None when no row was truncated.
    """

    tokens: Tensor
    logprobs: Tensor
    full: Tensor
    counts: Tensor | None = None
    ids: Tensor | None = None


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the draws in [0, 1) of seeds uint64 [B] at positions [B], float64 [B].

    Two rounds of SplitMix64 (Steele, Lea, Flood 2014), the second over the first's output plus the position.
    """
    mixed = _mix(seeds.astype(np.uint64))
    bits = _mix(mixed ^ (positions.astype(np.uint64) * _INCREMENT)) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float64) * 2.0**-_UNIFORM_BITS


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _INCREMENT
    x = (x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return x ^ (x >> _SHIFTS[2])


def weights(logits: Tensor) -> Tensor:
    """Relative probabilities [..., V] of logits as int64, 2^44 for the largest: their sums are exact.

    An id below 2^-45 of the most likely one weighs nothing. Rows that are not finite weigh nothing.
    """
    wide = logits.double()
    relative = (wide - wide.amax(-1, keepdim=True)).exp_()
    return relative.mul_(2.0**WEIGHT_BITS).add_(0.5).nan_to_num_(0.0).long()


def pick(mass: Tensor, draws: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds the draw times the total, int64 [B].

    An id without weight is never returned, unless nothing in its row has weight.
    """
    cumulative = mass.cumsum(1)
    total = cumulative[:, -1]
    threshold = torch.minimum((draws * total.double()).long(), total - 1)
    tokens = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    return tokens.clamp_(max=mass.shape[1] - 1)


def invert(logprobs: Tensor, draws: Tensor) -> Tensor:
    """The id [B] at which the cumulative probability of log-probabilities [B, V] passes draws [B] float64."""
    return pick(weights(logprobs), draws)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor | None:
    """Which ids top-k and then top-p keep of tempered logits, bool [B, V]; ties go to the lower id.

    top_k int64 [B] (0 or less: no limit) and top_p float64 [B] are on the host. None when no row is
    truncated.
    """
    size = logits.shape[1]
    top_k = torch.where(top_k <= 0, size, top_k)
    limited = (top_k < size) | (top_p < 1.0)
    if not bool(limited.any()):
        return None
    top_k, top_p, limited = (x.to(logits.device)[:, None] for x in (top_k, top_p, limited))
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(size, device=logits.device)
    mass = weights(logits).gather(1, order).masked_fill_(rank >= top_k, 0)
    before = mass.cumsum(1) - mass
    # The most likely id always stays; a top_p of 1 drops nothing.
    limit = (top_p * mass.sum(1, keepdim=True).double()).ceil().long().clamp_(min=1)
    dropped = (before >= limit) & (top_p < 1.0)
    stays = ~dropped & (rank < top_k) & (ordered > -torch.inf) | ~limited
    return torch.empty_like(stays).scatter_(1, order, stays)


def tempered_logits(logits: Tensor, rules: Rules) -> Tensor:
    """Logits [B, V] over the temperatures, 1 for greedy rows."""
    temperature = torch.where(rules.temperature == 0.0, 1.0, rules.temperature)
    if bool((temperature == 1.0).all()):
        return logits
    return logits / temperature.to(logits.device, logits.dtype)[:, None]


def logprobs_of(tempered: Tensor, tokens: Tensor) -> Tensor:
    """[B] of the tokens [B], by the function that a trainer calls."""
    return log_softmax(tempered).gather(1, tokens[:, None])[:, 0]


def sampling(logits: Tensor, rules: Rules) -> Drawn:
    """See `model.ops.sampling.sampling`."""
    greedy, tempered = rules.temperature == 0.0, tempered_logits(logits, rules)
    allowed = truncate(tempered, torch.where(greedy, 0, rules.top_k), torch.where(greedy, 1.0, rules.top_p))
    kept = tempered if allowed is None else tempered.masked_fill(~allowed, -torch.inf)
    draws = torch.from_numpy(uniforms(rules.seed.numpy(), rules.position.numpy())).to(logits.device)
    tokens = invert(kept, draws)
    if greedy.any():
        tokens = torch.where(greedy.to(logits.device), logits.argmax(dim=1), tokens)
    full = own = logprobs_of(tempered, tokens)
    if allowed is None:
        return Drawn(tokens.cpu(), own.cpu(), full.cpu())
    own = logprobs_of(kept, tokens)
    host = allowed.cpu()
    counts = host.sum(1)
    counts.masked_fill_(counts == host.shape[1], 0)
    ids = (host & (counts > 0)[:, None]).nonzero()[:, 1]
    return Drawn(tokens.cpu(), own.cpu(), full.cpu(), counts, ids)
