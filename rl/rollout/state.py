"""What a token log says of samples that no checkpoint has: those that finished, and those to go on with.

`rl.rollout.recovery` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from envs.types import FinishReason, Images, Message, Trajectory
from rl.engines.base import Completion
from rl.rollout import recorded
from rl.rollout.assignment import Assignment
from rl.rollout.extras import Extras
from rl.rollout.frames import Damage

FINISHES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Sampled tokens as columns: token_ids int32 [n], logprobs float32 [n], versions int32 [n], extras."""

    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    extras: Extras = field(default_factory=Extras)

    def __len__(self) -> int:
        return len(self.token_ids)

    @staticmethod
    def join(parts: Sequence[Tokens]) -> Tokens:
        """Those of several parts of a turn as one."""
        if len(parts) < 2:
            return parts[0] if parts else Tokens()
        ids, logprobs, versions = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("token_ids", "logprobs", "versions")
        )
        extras = Extras.join([part.extras for part in parts], [len(part) for part in parts])
        return Tokens(ids, logprobs, versions, extras)

    def __getitem__(self, part: slice) -> Tokens:
        extras = self.extras.take(np.arange(len(self))[part])
        return Tokens(self.token_ids[part], self.logprobs[part], self.versions[part], extras)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Tokens)
            and self.extras.same(other.extras)
            and all(
                np.array_equal(getattr(self, name), getattr(other, name))
                for name in ("token_ids", "logprobs", "versions")
            )
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """A turn as logged. `finish` is None while it was sampled; `results` are those of its tool calls."""

    prompt_ids: tuple[int, ...]
    new_branch: bool
    tokens: Tokens
    finish: FinishReason | None = None
    results: tuple[Message, ...] = ()
    replay_starts: tuple[tuple[int, int], ...] = ()
    images: Images | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of its tokens."""
        return tuple(self.tokens.token_ids.tolist())

    def completion(self, history: int) -> Completion:
        """Its tokens as the engine takes them back, after a history of `history` tokens of the branch."""
        tokens, extras, unfinished = self.tokens, self.tokens.extras, self.finish is None
        return Completion(
            self.token_ids,
            tuple(tokens.logprobs.tolist()),
            tuple(tokens.versions.tolist()),
            self.finish or FinishReason.ABORT,
            states=() if extras.states is None else tuple(extras.states.tolist()),
            replay_starts=self.replay_starts,
            expert_ids=recorded.experts_after(extras.experts, history, unfinished=unfinished),
            sampling_mask=recorded.mask_of(extras.kept),
            selections=recorded.selections_after(extras.selections, history, unfinished=unfinished),
        )


@dataclass(frozen=True, slots=True)
class SandboxPlace:
    """Where a sample's own sandbox stands: its id, its generation, and how many commands it was given."""

    sandbox: str
    generation: int
    position: int


@dataclass(frozen=True, slots=True)
class LoggedSample:
    """An unfinished sample: what it was told and how far it came, in tokens and in its own sandbox."""

    assignment: Assignment
    turns: tuple[LoggedTurn, ...]
    place: SandboxPlace | None = None

    def up_to_version(self, version: int) -> LoggedSample:
        """The sample, with tokens of policies newer than `version` counted as of `version`.

        After a resume from an older checkpoint the newer weights are lost, but not what they sampled: the
        tokens' log-probabilities stay those of the policy that sampled them, which is what a loss needs.
        """
        turns = (
            replace(turn, tokens=replace(turn.tokens, versions=np.minimum(turn.tokens.versions, version)))
            for turn in self.turns
        )
        return replace(self, turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a log holds, by slot; `lost_tokens` are logged tokens that lie behind a hole or have no sample.

    `leaning` are finished slots of which `finished` took their tokens from their steps (`rl.rollout.ends`).
    """

    unfinished: dict[int, LoggedSample]
    finished: dict[int, Trajectory]
    damage: Damage
    tokens: int = 0
    lost_tokens: int = 0
    next_slot: int = 0
    leaning: set[int] = field(default_factory=set)
