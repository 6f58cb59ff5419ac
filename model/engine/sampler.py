"""Sampling of the next token: temperature, top-k, top-p and a counter-based random draw."""

from __future__ import annotations

from dataclasses import dataclass


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
