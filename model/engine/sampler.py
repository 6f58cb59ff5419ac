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
from model.ops.sampling import Rules, sampling, truncate, uniforms

__all__ = [
    "Distribution",
    "Sampled",
    "SamplingColumns",
    "SamplingParams",
    "distribution",
    "sample",
    "uniforms",
]


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


def sample(
    logits: Tensor, columns: SamplingColumns, positions: np.ndarray, *, exact: bool = False
) -> Sampled:
    """Draws one token a row.

    Args:
        logits: float32 [B, V], of the next token.
        columns: The parameters of the rows.
        positions: int64 [B], the position in its sequence that the drawn token will take.
        exact: log-probabilities are to have the bits that a trainer in exact mode computes.
    """
    drawn = sampling(logits, _rules(columns, positions), exact=exact)
    mask = None
    if drawn.counts is not None and drawn.ids is not None:
        mask = SamplingMask(drawn.ids, torch.nn.functional.pad(drawn.counts.cumsum(0), (1, 0)))
    full = drawn.full.numpy()
    return Sampled(drawn.tokens.numpy(), drawn.logprobs.numpy(), full, np.isfinite(full), mask)


def _rules(columns: SamplingColumns, positions: np.ndarray) -> Rules:
    return Rules(
        torch.from_numpy(columns.temperature),
        torch.from_numpy(columns.top_p),
        torch.from_numpy(columns.top_k),
        torch.from_numpy(columns.seed.view(np.int64)),
        torch.from_numpy(positions.astype(np.int64)),
    )


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
        tempered: float32 [B, V], logits of `sampled`, from which `draw` draws what `sample` does.
    """

    sampled: Tensor
    reported: Tensor
    full: Tensor
    finite: Tensor
    allowed: Tensor | None
    tempered: Tensor

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
    top_k, top_p = np.where(greedy, 0, columns.top_k), np.where(greedy, 1.0, columns.top_p)
    allowed = truncate(scaled, torch.from_numpy(top_k), torch.from_numpy(top_p))
    tempered, sampled = scaled, full
    if allowed is not None:
        tempered = scaled.masked_fill(~allowed, -torch.inf)
        sampled = truncated_logprobs(tempered, None)
    reported = sampled
    if greedy.any():
        certain = torch.full_like(logits, -torch.inf).scatter_(1, logits.argmax(1, keepdim=True), 0.0)
        mask = torch.from_numpy(greedy).to(logits.device)
        sampled = torch.where(mask[:, None], certain, sampled)
        tempered = torch.where(mask[:, None], certain, tempered)
    return Distribution(sampled, reported, full, full.amax(dim=1).isfinite(), allowed, tempered)
