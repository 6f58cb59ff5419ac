"""The record of a finished sample without what its decode steps hold already.

Tokens, experts and selections are most of a sample's bytes, so that its end would cost as much as sampling.
Of a turn that is wholly in the log only the prompt's part is in the record; what was sampled stays in the
steps until the sample is consumed. Where a step was lost, the sample is no longer finished: it goes on from
the hole, as one does that was killed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from envs.types import Packed, Replay, Trajectory, Turn
from rl.rollout.recorded import pack, unpack
from rl.rollout.state import Tokens

FREE = -1
Dropped = list[list[int]]
"""Turns whose tokens stayed in their steps: number, tokens, and the sum of their ids."""


def in_steps(trajectory: Trajectory, logged: Mapping[int, int]) -> Dropped:
    """Returns the turns whose sampled part is wholly in the log's steps, so that no other record needs it.

    `logged` has how many tokens of a turn, by its number in the trajectory, are in the log.
    """
    return [
        [number, sampled, sum(turn.completion_ids)]
        for number, turn in enumerate(chain.from_iterable(trajectory.branches))
        if (sampled := len(turn.completion_ids))
        and logged.get(number) == sampled
        and _has_rows(turn, sampled)
    ]


def _has_rows(turn: Turn, sampled: int) -> bool:
    """Whether what the engine chose of the last inputs is what the steps have."""
    if (replay := turn.replay) is None:
        return True
    arrays = [*replay.selections.values(), *([replay.experts] if replay.experts else [])]
    return all(array.shape[0] >= sampled for array in arrays)


def with_steps(
    trajectory: Trajectory, dropped: Sequence[Sequence[int]], tokens_of: Callable[[int], Tokens]
) -> Trajectory | None:
    """The trajectory whose turns `dropped` are in the steps alone; `tokens_of` has what is there of a turn.

    None where a token is not there any more.
    """
    found = {number: tokens_of(number) for number, _, _ in dropped}
    if any(len(found[n]) != count or int(found[n].token_ids.sum()) != ids for n, count, ids in dropped):
        return None

    def whole(number: int, turn: Turn) -> Turn:
        if number not in found:
            return turn
        tokens, replay = found[number], turn.replay
        if replay is not None:
            extras = {None: tokens.extras.experts, **(tokens.extras.selections or {})}
            replay = _map(replay, lambda key, array: _then(array, extras.get(key), len(tokens)))
        columns = (tuple(column.tolist()) for column in (tokens.token_ids, tokens.logprobs, tokens.versions))
        ids, logprobs, versions = columns
        return replace(turn, completion_ids=ids, logprobs=logprobs, policy_versions=versions, replay=replay)

    return _turns(trajectory, whole)


def with_choices(
    trajectory: Trajectory, numbers: Sequence[int], tokens_of: Callable[[int], Tokens]
) -> Trajectory:
    """The trajectory of a record of format 2, which left in the steps only the choices of turns `numbers`.

    Where a step was lost, its tokens come back without choices (-1), which training then makes itself.
    """

    def whole(number: int, turn: Turn) -> Turn:
        if number not in numbers or turn.replay is None:
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


def _then(array: Packed, found: np.ndarray | None, rows: int) -> Packed:
    """An array with the rows that the log has behind it; narrower ones end with `FREE`."""
    behind = np.full((rows, *array.shape[1:]), FREE, f"<{array.kind}")
    if found is not None and found.shape[1:-1] == array.shape[1:-1] and found.shape[-1] <= array.shape[-1]:
        behind[..., : found.shape[-1]] = found
    return pack(np.concatenate([unpack(array), behind]), array.kind)
