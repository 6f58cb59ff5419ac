"""A turn in the words of both sides: the rollout's `Completion` and the engine's columns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from envs.types import FinishReason
from model.engine.columns import Columns
from model.engine.errors import RequestError
from model.engine.requests import Finished
from rl.engines.base import Completion, EngineError, ReplayStarts, StepFrame


def columns(completed: Completion) -> Columns:
    """A completion's columns."""
    return Columns(
        np.array(completed.token_ids, np.int64),
        np.array(completed.logprobs, np.float32),
        np.array(completed.policy_versions, np.int32),
        np.array(completed.full_logprobs, np.float32),
        np.array(completed.states, np.uint8),
        completed.expert_ids,
        completed.sampling_mask,
        completed.replay_starts,
        completed.selections,
    )


def completion(finished: Finished) -> Completion:
    """What became of a turn."""
    return of_columns(finished.turn, FinishReason(str(finished.finish)))


def of_columns(turn: Columns, finish: FinishReason = FinishReason.ABORT) -> Completion:
    """The completion that has these columns."""
    return Completion(
        tuple(turn.token_ids.tolist()),
        tuple(turn.logprobs.tolist()),
        tuple(turn.versions.tolist()),
        finish,
        tuple(turn.full_logprobs.tolist()),
        tuple(turn.states.tolist()),
        turn.replay_starts,
        turn.expert_ids,
        turn.sampling_mask,
        turn.selections,
    )


def deliver(results: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    """Wakes those who still wait, with their result or their error; called in their event loop."""
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


class Named(Protocol):
    """Who waits for a request: what a step frame says of it."""

    session: str
    turn: int


class FrameNames:
    """Sessions and turns of a step's requests: the very lists of the last step while these are the same."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.int64)
        self._names: tuple[list[str], list[int]] = [], []
        self._starts: dict[str, tuple[int, ReplayStarts]] = {}

    def note(self, starts: Mapping[int, ReplayStarts], waiters: Mapping[int, Named]) -> None:
        """Keeps the replay starts of requests for the next frame."""
        named = {waiters[i].session: (waiters[i].turn, pairs) for i, pairs in starts.items() if i in waiters}
        self._starts |= named

    def take_starts(self) -> dict[str, tuple[int, ReplayStarts]]:
        """What was kept, for a frame."""
        starts, self._starts = self._starts, {}
        return starts

    def of(self, request_ids: np.ndarray, waiters: Mapping[int, Named]) -> tuple[list[str], list[int]]:
        """Returns those of `request_ids` int64 [n]; an id always means the same request."""
        if not np.array_equal(request_ids, self._ids):
            found = [waiters[i] for i in request_ids.tolist()]
            self._ids = request_ids.copy()
            self._names = [waiter.session for waiter in found], [waiter.turn for waiter in found]
        return self._names


def step_frames(
    session: str, turn: int, sampled: Completion, history: int, known: int = 0
) -> Iterator[StepFrame]:
    """Tokens that were sampled elsewhere, as a listener would have heard of them here.

    The turn goes on from `history` tokens; its first `known` tokens were heard of before.
    """
    starts = {} if sampled.replay_starts == ((0, 0),) else {session: (turn, sampled.replay_starts)}
    for i in range(known, len(sampled.token_ids)):
        row = slice(history - 1 + i, history + i)
        mask = sampled.sampling_mask
        yield StepFrame(
            [session],
            [turn],
            np.array(sampled.token_ids[i : i + 1], np.int32),
            np.array(sampled.logprobs[i : i + 1], np.float32),
            sampled.policy_versions[i],
            np.array(sampled.states[i : i + 1], np.uint8) if sampled.states else None,
            None
            if sampled.expert_ids is None
            else _rows(sampled.expert_ids.ids, sampled.expert_ids.start, row),
            None if mask is None else mask[i : i + 1],
            None
            if sampled.selections is None
            else {
                n: _rows(keys, sampled.selections.start, row) for n, keys in sampled.selections.keys.items()
            },
            starts if i == known else {},
        )


def _rows(columns: np.ndarray, start: int, positions: slice) -> np.ndarray:
    found = columns[positions.start - start : positions.stop - start]
    assert len(found) == positions.stop - positions.start, "the choices of a token's input came with it"
    return found


def engine_error(error: RequestError) -> EngineError:
    """The engine's typed error as the rollout knows it, with the former as its cause."""
    result = EngineError(str(error))
    result.__cause__ = error
    return result
