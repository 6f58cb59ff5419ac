"""The state of all sequences as columns, so that a step touches arrays and no object for each token.

A row is a sequence that is being served or an idle session whose caches are kept. `length` tokens of it are
known, the first `cached` of them are in the policy's cache; a row that decodes has exactly one that is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from model.choices import FREE, Capture, SamplingMask
from model.engine.columns import Columns, ContextState, ExpertIds, Selections
from model.engine.replay import NO_FLOOR, Bound, Floor, Past
from model.engine.requests import Pending, Request
from model.engine.sampler import Sampled, SamplingColumns
from model.vision import ImageTokens, TokenType

NO_SLOT = -1
_NO_STOP = -1


class Rows:
    """Columns over `count` rows of at most `context` tokens.

    `experts` (layers, k) are captured if given, and so are the keys that `selecting` layers select.
    """

    def __init__(
        self,
        count: int,
        context: int,
        experts: tuple[int, int] | None = None,
        selecting: Mapping[int, int] | None = None,
    ) -> None:
        self.count, self.context = count, context
        self.token_ids = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.full_logprobs = np.zeros((count, context), np.float32)
        self.versions = np.zeros((count, context), np.int32)
        self.states = np.zeros((count, context), np.uint8)
        self.expert_ids: np.ndarray | None = None
        if experts is not None:
            self.expert_ids = np.full((count, context, *experts), FREE, np.int16)
        self.selections = {
            layer: np.full((count, context, keys), FREE, np.int32)
            for layer, keys in (selecting or {}).items()
        }
        self.length = np.zeros(count, np.int64)
        self.cached = np.zeros(count, np.int64)
        self.start = np.zeros(count, np.int64)
        self.limit = np.zeros(count, np.int64)
        self.reported = np.zeros(count, np.int64)
        """Tokens whose experts earlier turns of the session have reported."""
        self.slot = np.full(count, NO_SLOT, np.int64)
        self.request_id = np.full(count, -1, np.int64)
        self.mixed = np.zeros(count, bool)
        self.replayed = np.zeros(count, bool)
        self.stops = np.full((count, 4), _NO_STOP, np.int64)
        self.sampling = SamplingColumns.empty(count)
        self.session: list[str] = [""] * count
        self.request: list[Request | None] = [None] * count
        self.bound = np.full(count, Bound.NOTHING, np.int8)
        """What `floor` is owed to while the row has no caches yet."""
        self.floor: list[Floor] = [NO_FLOOR] * count
        self.starts: list[tuple[Floor, ...]] = [()] * count
        """What the turn records of its prefills."""
        self.before: list[Past | None] = [None] * count
        """What the session goes back to when the turn ends before its first token."""
        self._masks: list[dict[int, np.ndarray]] = [{} for _ in range(count)]

    def matches(self, row: int, pending: Pending) -> bool:
        """Says whether a request extends what the row has in the cache by at least one token."""
        cached, history, request = int(self.cached[row]), pending.history, self.request[row]
        if history.size <= cached or (self.token_ids[row, :cached] != history[:cached]).any():
            return False
        return request is not None and request.same_images(pending.request, cached)

    def open(self, row: int, pending: Pending) -> None:
        """Writes a request into a row; the cache and its counters stay as they are."""
        request, start, size = pending.request, pending.start, pending.history.size
        turn = request.completed
        self.token_ids[row, :size] = pending.history
        span = slice(start, start + len(turn.token_ids))
        self.logprobs[row, span], self.full_logprobs[row, span] = turn.logprobs, turn.full_logprobs
        self.versions[row, span], self.states[row, span] = turn.versions, turn.states
        self.length[row], self.start[row] = size, start
        self.limit[row] = min(start + request.sampling.max_tokens, self.context)
        self.request_id[row], self.request[row] = pending.request_id, request
        self.session[row] = request.session
        self.sampling.set(row, request.sampling)
        self._set_stops(row, sorted(request.sampling.stop_ids))
        self._masks[row] = _unpacked(turn.sampling_mask, start)
        self._open_chosen(row, turn)

    def append(self, rows: np.ndarray, drawn: Sampled, version: int) -> None:
        """Appends one sampled token to each row."""
        at = self.length[rows]
        self.token_ids[rows, at] = drawn.token_ids
        self.logprobs[rows, at], self.full_logprobs[rows, at] = drawn.logprobs, drawn.full_logprobs
        self.versions[rows, at], self.states[rows, at] = version, self.state(rows)
        if drawn.kept is not None:
            offsets, ids = drawn.kept.offsets.tolist(), drawn.kept.ids.numpy()
            for i, (row, place) in enumerate(zip(rows.tolist(), at.tolist(), strict=True)):
                if offsets[i] < offsets[i + 1]:
                    self._masks[row][place] = ids[offsets[i] : offsets[i + 1]].copy()
        self.length[rows] += 1

    def capture(
        self, rows: np.ndarray, shares: np.ndarray, capture: Capture, taken: np.ndarray | None = None
    ) -> None:
        """Writes what a pass chose for the next `shares` [n] tokens of rows, row after row.

        `taken` are the numbers of these tokens in the pass; None: all of it. What was recorded before stays:
        it is what the tokens after it were sampled from.
        """
        assert self.expert_ids is not None and capture.expert_ids is not None
        self._write(self.expert_ids, rows, shares, _on_host(capture.expert_ids, taken))
        for layer, table in self.selections.items():
            self._write(table, rows, shares, _on_host(capture.selections[layer], taken))

    def _write(self, table: np.ndarray, rows: np.ndarray, shares: np.ndarray, chosen: np.ndarray) -> None:
        begin = 0
        for row, share in zip(rows.tolist(), shares.tolist(), strict=True):
            at = int(self.cached[row])
            _fill(table[row, at : at + share], chosen[begin : begin + share].astype(table.dtype))
            begin += share

    def inherit(self, row: int, leader: int) -> None:
        """Makes `row` say of its history what `leader`, which computed it for both, says."""
        self.cached[row], self.mixed[row] = self.cached[leader], self.mixed[leader]
        self.replayed[row] = self.replayed[leader]
        size = int(self.cached[leader])
        for table in self._chosen():
            _fill(table[row, :size], table[leader, :size])

    def _chosen(self) -> list[np.ndarray]:
        """The tables of what was chosen, [count, context, ...] each."""
        return [] if self.expert_ids is None else [self.expert_ids, *self.selections.values()]

    def state(self, rows: np.ndarray) -> np.ndarray:
        """`ContextState` of the next tokens of rows, uint8 [n]."""
        state = np.where(self.mixed[rows], ContextState.MIXED, ContextState.OWN)
        return np.where(self.replayed[rows], ContextState.REPLAYED, state).astype(np.uint8)

    def last_experts(self, rows: np.ndarray) -> np.ndarray | None:
        """Experts [n, layers, k] of the last computed token of each row."""
        return None if self.expert_ids is None else self.expert_ids[rows, self.cached[rows] - 1]

    def last_selections(self, rows: np.ndarray) -> dict[int, np.ndarray] | None:
        """Keys [n, K] by layer that the last computed token of each row selected."""
        at = self.cached[rows] - 1
        return {layer: table[rows, at] for layer, table in self.selections.items()} or None

    def stopped(self, rows: np.ndarray) -> np.ndarray:
        """Says which rows have a stop id as their last token, bool [n]."""
        last = self.token_ids[rows, self.length[rows] - 1]
        return (self.stops[rows] == last[:, None]).any(axis=1)

    def is_stop(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Says which of `tokens` [n, C] are stop ids of `rows` [n], bool [n, C]."""
        return (self.stops[rows][:, None, :] == tokens[:, :, None]).any(axis=2)

    def turn(self, row: int) -> Columns:
        """Returns a copy of what the row's turn has so far."""
        start, stop = int(self.start[row]), int(self.length[row])
        experts, begin, end = None, int(self.reported[row]), int(self.cached[row])
        if self.expert_ids is not None:
            experts = ExpertIds(begin, self.expert_ids[row, begin:end].copy())
        selected = {layer: table[row, begin:end].copy() for layer, table in self.selections.items()}
        masks, mask = self._masks[row], None
        if masks:
            nothing = np.zeros(0, np.int64)
            mask = SamplingMask.of_rows([masks.get(place, nothing).tolist() for place in range(start, stop)])
        return Columns(
            self.token_ids[row, start:stop].copy(),
            self.logprobs[row, start:stop].copy(),
            self.versions[row, start:stop].copy(),
            self.full_logprobs[row, start:stop].copy(),
            self.states[row, start:stop].copy(),
            experts,
            mask,
            self.starts[row],
            Selections(begin, selected) if selected else None,
        )

    def past(self, row: int) -> Past | None:
        """What to remember of the row's session when its caches go."""
        if self.length[row] == self.start[row]:
            return self.before[row]
        tokens = self.token_ids[row, : self.length[row]].copy()
        return Past(tokens, self.floor[row], bool(self.replayed[row]))

    def images(self, rows: np.ndarray, shares: np.ndarray) -> ImageTokens | None:
        """The images among the next `shares` [n] tokens of rows, types [n, L]; None where there is none."""
        types = torch.full((rows.size, int(shares.max())), int(TokenType.TEXT))
        parts = []
        for i, (row, share) in enumerate(zip(rows.tolist(), shares.tolist(), strict=True)):
            request, begin = self.request[row], int(self.cached[row])
            if request is None or (known := request.images) is None or begin >= known.types.shape[0]:
                continue
            held = known.types[begin : begin + share]
            first = int((known.types[:begin] == TokenType.IMAGE).sum())
            types[i, : held.shape[0]] = held
            parts.append(known.rows[first : first + int((held == TokenType.IMAGE).sum())])
        return ImageTokens(types, torch.cat(parts)) if (types >= 0).any() else None

    def _open_chosen(self, row: int, turn: Columns) -> None:
        cached, known, selected = int(self.cached[row]), turn.expert_ids, turn.selections
        self.reported[row] = cached
        for table in self._chosen():
            table[row, cached:] = FREE
        if self.expert_ids is not None and known is not None:
            self.reported[row] = known.start
            self.expert_ids[row, known.start : known.start + len(known.ids)] = known.ids
        for layer, keys in (selected.keys if selected is not None else {}).items():
            if layer in self.selections and selected is not None:
                width = min(keys.shape[1], self.selections[layer].shape[2])
                part = self.selections[layer][row, selected.start : selected.start + len(keys)]
                part[:, :width] = keys[:, :width]

    def _set_stops(self, row: int, stops: list[int]) -> None:
        if len(stops) > self.stops.shape[1]:
            wider = np.full((self.count, len(stops)), _NO_STOP, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[row] = _NO_STOP
        self.stops[row, : len(stops)] = stops


def _on_host(chosen: Tensor, taken: np.ndarray | None) -> np.ndarray:
    host = chosen.cpu().numpy()
    return host if taken is None else host[taken]


def _fill(known: np.ndarray, chosen: np.ndarray) -> None:
    """Writes choices [m, ..., k] where none is known yet."""
    np.copyto(known, chosen, where=(known == FREE).all(-1, keepdims=True))


def _unpacked(mask: SamplingMask | None, start: int) -> dict[int, np.ndarray]:
    """The ids of a mask by position, for a turn that begins at `start`."""
    if mask is None:
        return {}
    parts = np.split(mask.ids.numpy(), mask.offsets.numpy()[1:-1])
    return {start + i: part for i, part in enumerate(parts) if part.size}
