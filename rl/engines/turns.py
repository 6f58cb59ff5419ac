"""A turn in the words of both sides: the rollout's `Completion` and the engine's columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from envs.types import FinishReason
from model.engine.columns import Columns
from model.engine.errors import RequestError
from model.engine.requests import Finished
from rl.engines.base import Completion, EngineError, StepFrame


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
    turn = finished.turn
    return Completion(
        tuple(turn.token_ids.tolist()),
        tuple(turn.logprobs.tolist()),
        tuple(turn.versions.tolist()),
        FinishReason(str(finished.finish)),
        tuple(turn.full_logprobs.tolist()),
        tuple(turn.states.tolist()),
        turn.replay_starts,
        turn.expert_ids,
        turn.sampling_mask,
        turn.selections,
    )


def step_frames(session: str, turn: int, sampled: Completion) -> Iterator[StepFrame]:
    """Tokens that were sampled elsewhere, as a listener would have heard of them here."""
    for token, logprob, version in zip(
        sampled.token_ids, sampled.logprobs, sampled.policy_versions, strict=True
    ):
        yield StepFrame(
            [session], [turn], np.array([token], np.int32), np.array([logprob], np.float32), version
        )


def engine_error(error: RequestError) -> EngineError:
    """The engine's typed error as the rollout knows it, with the former as its cause."""
    result = EngineError(str(error))
    result.__cause__ = error
    return result
