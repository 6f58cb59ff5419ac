"""Sampling of the next token: temperature, top-k, top-p and a counter-based random draw.

The draw of a token is a hash of the request's seed and the token's position in the sequence. It therefore
does not depend on the batch, on the order of requests, or on an interruption: a sequence that is continued
elsewhere meets the same draws. A token is the inverse of the cumulative distribution at its draw, in the
order of ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.choices import SamplingMask, truncated_logprobs

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNIFORM_BITS = 48


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one completion.

    `temperature` 0 is greedy. `top_p` 1 and `top_k` 0 switch the truncations off. The draw at a position of
    the sequence depends on `seed` and that position only, never on the batch.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """The sampling parameters of a batch, one entry a row.

    temperature, top_p: float64 [B]. top_k: int64 [B]. seed: uint64 [B].
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    seed: np.ndarray

    @classmethod
    def empty(cls, rows: int) -> SamplingColumns:
        """Returns columns of `rows` rows that sample from the whole distribution."""
        ones, zeros = np.ones(rows), np.zeros(rows, np.int64)
        return cls(ones, ones.copy(), zeros, np.zeros(rows, np.uint64))

    def set(self, row: int, params: SamplingParams) -> None:
        """Writes the parameters of one request."""
        self.temperature[row], self.top_p[row] = params.temperature, params.top_p
        self.top_k[row] = params.top_k
        self.seed[row] = params.seed % 2**64

    def take(self, rows: np.ndarray) -> SamplingColumns:
        """Returns the columns of some rows."""
        return SamplingColumns(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.seed[rows])


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn, one entry a row.

    Attributes:
        token_ids: int64 [B].
        logprobs: float32 [B], under the distribution that was sampled from (tempered and truncated); of a
            greedy row, under temperature 1 without truncation.
        full_logprobs: float32 [B], under the tempered distribution without truncation.
        finite: bool [B]; a row whose logits are not finite has no meaningful token.
        kept: which ids top-k and top-p left to each row, on the host; a row that was not truncated holds
            none. None when no row was.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    full_logprobs: np.ndarray
    finite: np.ndarray
    kept: SamplingMask | None = None

    def take(self, rows: np.ndarray) -> Sampled:
        """What was drawn for the rows that `rows` (bool [B] or numbers) picks."""
        kept = None
        if self.kept is not None:
            numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
            kept = self.kept.take(torch.from_numpy(numbers))
        return Sampled(
            self.token_ids[rows], self.logprobs[rows], self.full_logprobs[rows], self.finite[rows], kept
        )


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns the draws in [0, 1) of seeds uint64 [B] at positions [B], float64 [B].

    Two rounds of SplitMix64 (Steele, Lea, Flood 2014), the second over the first's output plus the position.
    """
    return _draw(_mix(seeds.astype(np.uint64)), positions)


def _draw(mixed: np.ndarray, positions: np.ndarray) -> np.ndarray:
    bits = _mix(mixed ^ (positions.astype(np.uint64) * _INCREMENT)) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float64) * 2.0**-_UNIFORM_BITS


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _INCREMENT
    x = (x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]
    x = (x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return x ^ (x >> _SHIFTS[2])


def sample(logits: Tensor, columns: SamplingColumns, positions: np.ndarray) -> Sampled:
    """Draws one token a row.

    Args:
        logits: float32 [B, V], of the next token.
        columns: The parameters of the rows.
        positions: int64 [B], the position in its sequence that the drawn token will take.
    """
    greedy = columns.temperature == 0.0
    temperature = np.where(greedy, 1.0, columns.temperature)
    scaled = logits if (temperature == 1.0).all() else logits / _column(temperature, logits)
    logprobs = truncated_logprobs(scaled, None)
    allowed = _truncate(logprobs, columns, greedy)
    kept = None if allowed is None else truncated_logprobs(scaled, allowed)
    draws = torch.from_numpy(uniforms(columns.seed, positions)).to(logits.device)
    tokens = invert(logprobs if kept is None else kept, draws)
    if greedy.any():
        mask = torch.from_numpy(greedy).to(logits.device)
        tokens = torch.where(mask, logits.argmax(dim=1), tokens)
    full = logprobs.gather(1, tokens[:, None])[:, 0]
    own = full if kept is None else kept.gather(1, tokens[:, None])[:, 0]
    own, full = torch.stack((own, full)).cpu().numpy()
    mask = None if allowed is None else SamplingMask.of_allowed(allowed.cpu())
    return Sampled(tokens.cpu().numpy(), own, full, np.isfinite(full), mask)


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, like.dtype)[:, None]


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a batch is sampled from.

    Attributes:
        sampled: float32 [B, V], log-probabilities of the distribution that tokens are drawn from:
            tempered and truncated; of a greedy row, 0 for the most likely id and -inf elsewhere.
        reported: float32 [B, V], the same, but of a greedy row under temperature 1.
        full: float32 [B, V], tempered without truncation.
        finite: bool [B].
        allowed: bool [B, V], what top-k and top-p left; None when no row is truncated.
    """

    sampled: Tensor
    reported: Tensor
    full: Tensor
    finite: Tensor
    allowed: Tensor | None

    def report(self, rows: Tensor, tokens: Tensor) -> Sampled:
        """What `sample` says when it draws `tokens` [n] in `rows` [n]."""
        own, full = torch.stack((self.reported[rows, tokens], self.full[rows, tokens])).cpu().numpy()
        kept = None if self.allowed is None else SamplingMask.of_allowed(self.allowed[rows].cpu())
        return Sampled(tokens.cpu().numpy(), own, full, self.finite[rows].cpu().numpy(), kept)


def distribution(logits: Tensor, columns: SamplingColumns) -> Distribution:
    """What `sample` draws from, for float32 logits [B, V] and the parameters of the rows."""
    greedy = columns.temperature == 0.0
    temperature = np.where(greedy, 1.0, columns.temperature)
    scaled = logits if (temperature == 1.0).all() else logits / _column(temperature, logits)
    full = truncated_logprobs(scaled, None)
    allowed = _truncate(full, columns, greedy)
    sampled = reported = full if allowed is None else truncated_logprobs(scaled, allowed)
    if greedy.any():
        certain = torch.full_like(logits, -torch.inf).scatter_(1, logits.argmax(1, keepdim=True), 0.0)
        mask = torch.from_numpy(greedy).to(logits.device)
        sampled = torch.where(mask[:, None], certain, sampled)
    return Distribution(sampled, reported, full, full.amax(dim=1).isfinite(), allowed)


def invert(logprobs: Tensor, draws: Tensor) -> Tensor:
    """Returns the first id whose cumulative probability exceeds the draw, int64 [B].

    Cumulated in float64, and draws have 48 bits, so the draw times the total stays below the total: an id of
    probability 0 is never returned. A row that is not finite yields some id in range.
    """
    cumulative = logprobs.double().exp_().cumsum(dim=1)
    thresholds = draws * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, thresholds[:, None], right=True)[:, 0]
    return tokens.clamp_(max=logprobs.shape[1] - 1)


def _truncate(logprobs: Tensor, columns: SamplingColumns, greedy: np.ndarray) -> Tensor | None:
    """Returns which ids top-k and then top-p keep, bool [B, V]; ties go to the lower id.

    None when no row truncates.
    """
    size = logprobs.shape[1]
    top_k = np.where((columns.top_k <= 0) | greedy, size, columns.top_k)
    top_p = np.where(greedy, 1.0, columns.top_p)
    if not ((top_k < size) | (top_p < 1.0)).any():
        return None
    ordered, order = logprobs.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(size, device=logprobs.device)
    ordered = ordered.masked_fill(rank >= _column(top_k, rank), -torch.inf)
    probabilities = torch.softmax(ordered.double(), dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    limit = torch.from_numpy(top_p).to(logprobs.device)[:, None]
    # The most likely id always stays; a top_p of 1 drops nothing, whatever the rounding of the sum.
    dropped = (before >= limit) & (rank > 0) & (limit < 1.0)
    stays = ~dropped & (ordered > -torch.inf)
    return torch.empty_like(stays).scatter_(1, order, stays)
