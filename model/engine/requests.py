"""What goes into the engine and what comes out of it: requests, columns of a step, finished turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from model.engine.errors import (
    ContextOverflowError,
    EmptyPromptError,
    RequestError,
    SamplingError,
    TokenRangeError,
)
from model.engine.sampler import SamplingParams


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Columns:
    """Sampled tokens of one turn, as columns of equal length.

    token_ids int32 [n], logprobs float32 [n] (of the sampled distribution), versions int32 [n].
    """

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise RequestError(
                "the columns of a turn have different lengths: "
                f"{len(self.token_ids)} tokens, {len(self.logprobs)} log-probabilities, "
                f"{len(self.versions)} versions"
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to sample.

    Attributes:
        session: Whose caches to use and to keep; one request of a session is served at a time.
        token_ids: The whole history before the turn.
        sampling: How to sample. `max_tokens` counts `completed` too.
        completed: Tokens of this very turn that were sampled before an interruption.
    """

    session: str
    token_ids: Sequence[int] | np.ndarray
    sampling: SamplingParams
    completed: Columns = field(default_factory=Columns)


@dataclass(frozen=True, slots=True)
class Finished:
    """A turn that ended; `turn` includes what was completed before. `error` is set when `finish` is ERROR."""

    request_id: int
    session: str
    finish: Finish
    turn: Columns
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of one step as columns over the requests that got one, and the turns that ended.

    request_ids and token_ids int64 [n], logprobs and full_logprobs float32 [n]; `version` sampled them.
    """

    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    full_logprobs: np.ndarray
    version: int
    finished: list[Finished]


@dataclass(slots=True)
class Pending:
    """A checked request that waits for a row: its history with what was completed, and the turn's start."""

    request_id: int
    request: Request
    history: np.ndarray
    start: int


def check_request(request_id: int, request: Request, *, vocab_size: int, context: int) -> Pending:
    """Checks a request and returns it ready to be served.

    Raises:
        RequestError: One of its subclasses, which says what is wrong.
    """
    _check_sampling(request.sampling)
    prompt = _as_ids(request.token_ids)
    if prompt.size == 0:
        raise EmptyPromptError("the prompt is empty: give at least one token")
    history = np.concatenate((prompt, _as_ids(request.completed.token_ids)))
    if history.min() < 0 or history.max() >= vocab_size:
        bad = history[(history < 0) | (history >= vocab_size)][0]
        raise TokenRangeError(f"token id {bad} is outside 0..{vocab_size - 1}, the policy's vocabulary")
    if prompt.size >= context:
        raise ContextOverflowError(
            f"a history of {prompt.size} tokens leaves no room in a context of {context}; "
            "shorten it or make the engine with more max_tokens"
        )
    if history.size > context or len(request.completed.token_ids) > request.sampling.max_tokens:
        raise ContextOverflowError(
            f"{len(request.completed.token_ids)} completed tokens exceed the turn's budget of "
            f"{min(request.sampling.max_tokens, context - prompt.size)}"
        )
    return Pending(request_id, request, history.astype(np.int32), prompt.size)


def already_finished(pending: Pending, context: int) -> Finish | None:
    """Returns why a turn that comes with completed tokens has ended already, or None."""
    completed = pending.request.completed
    if len(completed.token_ids) and int(completed.token_ids[-1]) in pending.request.sampling.stop_ids:
        return Finish.STOP
    limit = min(pending.start + pending.request.sampling.max_tokens, context)
    return Finish.LENGTH if pending.history.size >= limit else None


def _as_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(ids)
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TokenRangeError(
                f"token ids are a flat sequence of integers, not {array.dtype} {array.shape}"
            )
        return array.astype(np.int64)
    except (ValueError, OverflowError) as error:
        raise TokenRangeError(f"token ids are a flat sequence of integers: {error}") from error


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise SamplingError(f"max_tokens is at least 1, not {sampling.max_tokens}")
    if not math.isfinite(sampling.temperature) or sampling.temperature < 0:
        raise SamplingError(f"temperature is a number of at least 0, not {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise SamplingError(f"top_p is above 0 and at most 1, not {sampling.top_p}")
    if sampling.top_k < 0:
        raise SamplingError(f"top_k is at least 0 (0 switches it off), not {sampling.top_k}")
