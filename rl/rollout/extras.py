"""What the log has of tokens beside ids and log-probabilities, as columns that are cut and joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np


class Extras(NamedTuple):
    """What a step may have beside ids and log-probabilities, over its n tokens.

    `states` uint8 [n]; `experts` int16 [n, layers, k]; `kept` are counts [n] and ids; `selections` int32
    [n, K] by layer.
    """

    states: np.ndarray | None = None
    experts: np.ndarray | None = None
    kept: tuple[np.ndarray, np.ndarray] | None = None
    selections: Mapping[int, np.ndarray] | None = None

    def take(self, rows: np.ndarray) -> Extras:
        """Those of the tokens numbered `rows`."""
        kept = self.kept
        if kept is not None:
            counts, ids = kept
            first, some = np.cumsum(counts) - counts, counts[rows].astype(np.int64)
            within = np.arange(some.sum()) - np.repeat(np.cumsum(some) - some, some)
            kept = some, ids[np.repeat(first[rows], some) + within]
        return Extras(
            None if self.states is None else self.states[rows],
            None if self.experts is None else self.experts[rows],
            kept,
            self.selections and {layer: keys[rows] for layer, keys in self.selections.items()},
        )

    @staticmethod
    def join(parts: Sequence[Extras], lengths: Sequence[int]) -> Extras:
        """Those of several runs of `lengths` tokens as one; where one has none, -1 (and no mask)."""
        states = [part.states for part in parts]
        kept = None
        if any(part.kept is not None for part in parts):
            pairs = [
                part.kept or (np.zeros(length, np.int64), np.zeros(0, np.int32))
                for part, length in zip(parts, lengths, strict=True)
            ]
            kept = np.concatenate([counts for counts, _ in pairs]), np.concatenate([ids for _, ids in pairs])
        layers = sorted({layer for part in parts for layer in part.selections or {}})
        selections = {
            layer: _join([(part.selections or {}).get(layer) for part in parts], lengths) for layer in layers
        }
        return Extras(
            None
            if any(state is None for state in states)
            else np.concatenate([s for s in states if s is not None]),
            _join([part.experts for part in parts], lengths),
            kept,
            {layer: keys for layer, keys in selections.items() if keys is not None} or None,
        )

    def same(self, other: Extras) -> bool:
        """Whether all of it is equal."""
        return self._values() == other._values()

    def _values(self) -> list[object]:
        kept = None if self.kept is None else [column.tolist() for column in self.kept]
        chosen = {layer: keys.tolist() for layer, keys in (self.selections or {}).items()}
        return [
            None if self.states is None else self.states.tolist(),
            None if self.experts is None else self.experts.tolist(),
            kept,
            chosen,
        ]


def _join(parts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """Runs [n, ...] end to end, -1 where one is missing or of another shape than the last one."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    shape = (*known[-1].shape[1:-1], max(part.shape[-1] for part in known))
    whole = np.full((sum(lengths), *shape), -1, known[-1].dtype)
    begin = 0
    for part, length in zip(parts, lengths, strict=True):
        if part is not None and part.shape[1:-1] == shape[:-1]:
            whole[begin : begin + length, ..., : part.shape[-1]] = part
        begin += length
    return whole
