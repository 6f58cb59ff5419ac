"""The sampled tokens of a turn as columns: all that training needs to see the tokens as the sampler did."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from model.choices import SamplingMask
from model.engine.errors import RequestError


class ContextState(IntEnum):
    """How the context of a sampled token was computed. A higher value says less about it."""

    OWN = 0
    """All of it by the weights that sampled the token, with the windows that `replay_starts` say."""
    MIXED = 1
    """Some of it by earlier weights, whose caches were kept."""
    REPLAYED = 2
    """Its caches had been lost and were computed with other windows than those of the tokens before."""


@dataclass(frozen=True, slots=True)
class ExpertIds:
    """The experts that tokens went to.

    `ids` int16 [n, layers, k] are those of the tokens at positions `start` .. `start` + n - 1 of the sequence
    as *inputs*: the last sampled token of a turn has none yet (it is the first input of the next turn), and
    -1 stands in layers that did not run for a token.
    """

    start: int
    ids: np.ndarray


@dataclass(frozen=True, slots=True)
class Selections:
    """The keys that tokens selected: `keys` by index source layer, int32 [n, K] each, as `ExpertIds`."""

    start: int
    keys: dict[int, np.ndarray]


@dataclass(frozen=True, slots=True)
class Columns:
    """Sampled tokens of one turn, as columns of equal length n. What is left out is filled in.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n], under the distribution that was sampled from.
        versions: int32 [n], of the weights that sampled the token.
        full_logprobs: float32 [n], under the tempered distribution without truncation; NaN where unknown.
        states: uint8 [n], `ContextState`; left out, tokens of another version than the first count as mixed.
        expert_ids: The experts of the turn's inputs, its prompt included.
        sampling_mask: The ids each token was drawn from; None: from all.
        replay_starts: (encoder, decoder) positions at which the windows of the turn's prefills start.
        selections: The keys that the turn's inputs selected.
    """

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    full_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    states: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    expert_ids: ExpertIds | None = None
    sampling_mask: SamplingMask | None = None
    replay_starts: tuple[tuple[int, int], ...] = ()
    selections: Selections | None = None

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if not count == len(self.logprobs) == len(self.versions):
            raise RequestError(
                f"the columns of a turn have different lengths: {count} tokens, "
                f"{len(self.logprobs)} log-probabilities, {len(self.versions)} versions"
            )
        if count and not len(self.full_logprobs):
            object.__setattr__(self, "full_logprobs", np.full(count, np.nan, np.float32))
        if count and not len(self.states):
            mixed = np.asarray(self.versions) != self.versions[0]
            object.__setattr__(self, "states", mixed.astype(np.uint8) * ContextState.MIXED)
        mask = count if self.sampling_mask is None else len(self.sampling_mask)
        if not count == len(self.full_logprobs) == len(self.states) == mask:
            raise RequestError(
                f"the columns of a turn have different lengths: {count} tokens, {len(self.full_logprobs)} "
                f"full log-probabilities, {len(self.states)} states, {mask} sampling masks"
            )
