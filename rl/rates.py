"""How busy each side was between two optimiser steps, from counters and clocks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

_BUSY, _TOKENS = "sys/engine.busy_seconds", "sys/engine.generated_tokens"


@dataclass(slots=True)
class Rates:
    """Turns the generator's counters and the learner's seconds into shares and rates, once a step."""

    _at: float = field(default_factory=time.monotonic)
    _busy: float = 0.0
    _tokens: float = 0.0

    def update(
        self, counters: Mapping[str, float], train_s: float, trained_tokens: float
    ) -> dict[str, float]:
        """Returns idle shares and tokens per second since the last call.

        `counters` are the generator's since its start, `train_s` the seconds the learner worked since
        then, on `trained_tokens` tokens.
        """
        now, busy, tokens = time.monotonic(), counters.get(_BUSY, 0.0), counters.get(_TOKENS, 0.0)
        wall = max(now - self._at, 1e-9)
        rates = {
            "sys/idle.trainer": 1 - min(train_s / wall, 1.0),
            "sys/idle.rollout": 1 - min(max(busy - self._busy, 0.0) / wall, 1.0),
            "sys/tok_s.gen": max(tokens - self._tokens, 0.0) / wall,
            "sys/tok_s.train": trained_tokens / max(train_s, 1e-9),
            "sys/step_s": wall,
        }
        self._at, self._busy, self._tokens = now, busy, tokens
        return rates
