"""The record of a finished sample without what its decode steps hold already: experts and selections.

They are most of a token's bytes, so that a sample's end would cost as much as its sampling. Only those of
prompts are in the record; those of sampled tokens stay in their steps until the sample is consumed. Where a
step was lost, its tokens come back without choices (-1), which training then makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from envs.types import Packed, Replay, Trajectory, Turn
from rl.rollout.recorded import pack, unpack
from rl.rollout.state import Tokens

FREE = -1


def without_steps(trajectory: Trajectory, logged: Mapping[int, int]) -> tuple[Trajectory, list[int]]:
    """Drops the choices of turns all of whose tokens are logged; returns the numbers of these turns.

    `logged` has how many tokens of a turn, by its number in the trajectory, are in the log.
    """
    dropped: list[int] = []

    def cut(number: int, turn: Turn) -> Turn:
        sampled, replay = len(turn.completion_ids), turn.replay
        if replay is None or not sampled or logged.get(number) != sampled:
            return turn
        arrays = [*replay.selections.values(), *([replay.experts] if replay.experts else [])]
        if not arrays or min(array.shape[0] for array in arrays) < sampled:
            return turn
        dropped.append(number)
        return replace(turn, replay=_map(replay, lambda _, array: _first(array, array.shape[0] - sampled)))

    return _turns(trajectory, cut), dropped


def with_steps(trajectory: Trajectory, dropped: list[int], tokens_of: Callable[[int], Tokens]) -> Trajectory:
    """The trajectory that `without_steps` was given; `tokens_of` returns what the log has of a turn."""

    def whole(number: int, turn: Turn) -> Turn:
        if number not in dropped or turn.replay is None:
            return turn
        tokens, ids = tokens_of(number), np.array(turn.completion_ids, np.int32)
        same = len(tokens) == len(ids) and np.array_equal(tokens.token_ids, ids)
        found = {None: tokens.extras.experts, **(tokens.extras.selections or {})} if same else {}
        rows = len(ids)
        return replace(turn, replay=_map(turn.replay, lambda key, array: _then(array, found.get(key), rows)))

    return _turns(trajectory, whole)


def _turns(trajectory: Trajectory, change: Callable[[int, Turn], Turn]) -> Trajectory:
    numbers = iter(range(sum(map(len, trajectory.branches))))
    branches = tuple(tuple(change(next(numbers), turn) for turn in branch) for branch in trajectory.branches)
    return replace(trajectory, branches=branches)


def _map(replay: Replay, change: Callable[[int | None, Packed], Packed]) -> Replay:
    return replace(
        replay,
        experts=None if replay.experts is None else change(None, replay.experts),
        selections={layer: change(layer, keys) for layer, keys in replay.selections.items()},
    )


def _first(array: Packed, rows: int) -> Packed:
    size = len(array.data) // array.shape[0]
    return Packed(array.kind, (rows, *array.shape[1:]), array.data[: rows * size])


def _then(array: Packed, found: np.ndarray | None, rows: int) -> Packed:
    """An array with the rows that the log has behind it; narrower ones end with `FREE`."""
    behind = np.full((rows, *array.shape[1:]), FREE, f"<{array.kind}")
    if found is not None and found.shape[1:-1] == array.shape[1:-1] and found.shape[-1] <= array.shape[-1]:
        behind[..., : found.shape[-1]] = found
    return pack(np.concatenate([unpack(array), behind]), array.kind)
