"""What a rollout asks of an inference engine: token ids in, token ids out, interruptible at any token.

A request carries the whole token history of its trajectory. An engine that keeps the caches of a `session`
computes only what is new; one that does not recomputes, and the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from envs.types import FinishReason
from model.choices import SamplingMask
from model.engine.columns import ExpertIds, Selections
from model.engine.sampler import SamplingParams
from model.images import PreparedImage


@dataclass(frozen=True, slots=True)
class HistoryImages:
    """The images in a history, in order, and the `model.vision.TokenType` of each of its tokens."""

    types: Sequence[int]
    images: Sequence[PreparedImage]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample: `token_ids` is the whole history so far, `session` names the trajectory.

    `completed` holds tokens of this very turn that were sampled before an interruption (with their
    log-probabilities and versions); sampling continues after them, and they count towards `max_tokens`.
    `images` are those of `token_ids`.
    """

    session: str
    turn: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    completed: Completion | None = None
    images: HistoryImages | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampled tokens of one turn; the first three columns have equal length. A stop id is its last token.

    What an engine does not record is empty or None: `full_logprobs` (without top-k and top-p), `states`
    (`model.engine.columns.ContextState`), `replay_starts` (encoder, decoder) of the turn's prefills, the
    experts and selections of the turn's inputs, and the ids that each token was drawn from.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    policy_versions: tuple[int, ...] = ()
    finish: FinishReason = FinishReason.STOP
    full_logprobs: tuple[float, ...] = ()
    states: tuple[int, ...] = ()
    replay_starts: tuple[tuple[int, int], ...] = ()
    expert_ids: ExpertIds | None = field(default=None, compare=False)
    sampling_mask: SamplingMask | None = field(default=None, compare=False)
    selections: Selections | None = field(default=None, compare=False)


ReplayStarts = tuple[tuple[int, int], ...]
"""(encoder, decoder) positions at which the prefills of a turn began, in order."""


@dataclass(frozen=True, slots=True)
class StepFrame:
    """The tokens of one decode step, as columns over the running requests.

    A listener may keep all of it; nobody writes to it again. An engine hands out the same `sessions` and
    `turns` while the same requests run: a listener that knows them need not look at them again.
    """

    sessions: Sequence[str]
    turns: Sequence[int]
    token_ids: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    policy_version: int
    states: np.ndarray | None = None  # uint8 [n]
    expert_ids: np.ndarray | None = None  # int16 [n, layers, k] of each token's input
    sampling_mask: SamplingMask | None = None
    selections: Mapping[int, np.ndarray] | None = None  # int32 [n, K] by layer, of each token's input
    replay_starts: Mapping[str, tuple[int, ReplayStarts]] = field(default_factory=dict)
    """By session: the turn whose windows were placed since the last step, and its replay starts so far."""


class Engine(Protocol):
    """An inference engine as the rollout sees it. All methods may be called from one event loop."""

    @property
    def version(self) -> int:
        """The version of the weights."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one turn. Raises `EngineError` when the request itself is at fault."""
        ...

    async def abort(self, session: str) -> None:
        """Ends the turn that a session is sampling, if any, with `ABORT`; its caches stay."""
        ...

    async def release(self, session: str) -> None:
        """Forgets a trajectory and frees its caches; a running request of it ends with `ABORT`."""
        ...

    async def pause(self) -> None:
        """Stops all requests at a token boundary; they stay in place."""
        ...

    async def resume(self) -> None:
        """Continues after `pause`."""
        ...

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        """Swaps the weights between two tokens; running requests continue under `version`."""
        ...

    async def close(self) -> None:
        """Ends the engine; running requests end with `ABORT`."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters since start: steps, generated tokens, busy seconds, running and waiting requests.

        `healthy` is 1 while the engine serves, 0 when it has died or was closed.
        """
        ...


StepListener = Callable[[StepFrame], None]


class EngineError(ValueError):
    """A request that the engine cannot serve: what is wrong, and what to change."""
