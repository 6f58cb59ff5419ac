"""The state of all sequences as columns, so that a step touches arrays and no object for each token.

A row is a sequence that is being served or an idle session whose caches are kept. `length` tokens of it are
known, the first `cached` of them are in the policy's cache; a row that decodes has exactly one that is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from model.engine.requests import Columns, Pending
from model.engine.sampler import Sampled, SamplingColumns

NO_SLOT = -1
_NO_STOP = -1


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens drawn in one step, one or several a row; place i of a row counts up to `counts`.

    rows int64 [n]; token_ids int64 [n, C]; logprobs and full_logprobs float32 [n, C]; counts int64 [n], at
    least 1; finite bool [n], False where there is no meaningful token. `clean` is False when the caches may
    hold what is not a number.
    """

    rows: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    full_logprobs: np.ndarray
    counts: np.ndarray
    finite: np.ndarray
    clean: bool

    @staticmethod
    def of_one(rows: np.ndarray, drawn: Sampled) -> Drawn:
        """One token a row, as the sampler drew it."""
        columns = (drawn.token_ids[:, None], drawn.logprobs[:, None], drawn.full_logprobs[:, None])
        one, clean = np.ones_like(rows), bool(drawn.finite.all())
        return Drawn(rows, *columns, counts=one, finite=drawn.finite, clean=clean)

    def select(self, chosen: np.ndarray) -> Drawn:
        """The rows where `chosen` bool [n] is set."""
        if chosen.all():
            return self
        columns = (self.rows, self.token_ids, self.logprobs, self.full_logprobs, self.counts, self.finite)
        return Drawn(*(column[chosen] for column in columns), clean=self.clean)

    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens and both log-probabilities, row after row."""
        real = np.arange(self.token_ids.shape[1]) < self.counts[:, None]
        return self.token_ids[real], self.logprobs[real], self.full_logprobs[real]


class Rows:
    """Columns over `count` rows of at most `context` tokens."""

    def __init__(self, count: int, context: int) -> None:
        self.count, self.context = count, context
        self.token_ids = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.versions = np.zeros((count, context), np.int32)
        self.length = np.zeros(count, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.start = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)
        self.slot = np.full(count, NO_SLOT, np.int64)
        self.request_id = np.full(count, -1, np.int64)
        self.stops = np.full((count, 4), _NO_STOP, np.int64)
        self.sampling = SamplingColumns.empty(count)
        self.session: list[str] = [""] * count

    def matches(self, row: int, history: np.ndarray) -> bool:
        """Says whether `history` extends what the row has in the cache by at least one token."""
        cached = int(self.cached[row])
        return history.size > cached and bool((self.token_ids[row, :cached] == history[:cached]).all())

    def open(self, row: int, pending: Pending) -> None:
        """Writes a request into a row; the cache and its counters stay as they are."""
        request, start, size = pending.request, pending.start, pending.history.size
        self.token_ids[row, :size] = pending.history
        self.logprobs[row, start:size] = request.completed.logprobs
        self.versions[row, start:size] = request.completed.versions
        self.length[row], self.start[row] = size, start
        self.limit[row] = min(start + request.sampling.max_tokens, self.context)
        self.request_id[row] = pending.request_id
        self.session[row] = request.session
        self.sampling.set(row, request.sampling)
        self._set_stops(row, sorted(request.sampling.stop_ids))

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Appends one sampled token to each row."""
        at = self.length[rows]
        self.token_ids[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.length[rows] += 1

    def stopped(self, rows: np.ndarray) -> np.ndarray:
        """Says which rows have a stop id as their last token, bool [n]."""
        last = self.token_ids[rows, self.length[rows] - 1]
        return (self.stops[rows] == last[:, None]).any(axis=1)

    def is_stop(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Says which of `tokens` [n, C] are stop ids of `rows` [n], bool [n, C]."""
        return (self.stops[rows][:, None, :] == tokens[:, :, None]).any(axis=2)

    def turn(self, row: int) -> Columns:
        """Returns a copy of what the row's turn has so far."""
        span = slice(int(self.start[row]), int(self.length[row]))
        return Columns(
            self.token_ids[row, span].copy(), self.logprobs[row, span].copy(), self.versions[row, span].copy()
        )

    def _set_stops(self, row: int, stops: list[int]) -> None:
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.count, len(stops)), _NO_STOP, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = _NO_STOP
        self.stops[row, : len(stops)] = stops
