"""The records an environment and a rollout exchange, one per stage.

They are plain frozen dataclasses, so that an environment author needs nothing but Python, and so that every
package above (`rewards`, `rl`) speaks of the same things. Text lives in `Message`; token ids live in `Turn`
and are the ids that were really sampled: nothing is ever tokenised twice.

Example: a trajectory of two turns of the `calc` environment, with one token a character::

    Turn(prompt_ids=ids("E50 47*86="), completion_ids=ids("<47*86>"), observations=(Message("tool", "4042"),))
    Turn(prompt_ids=ids("[4042]"),     completion_ids=ids("#4042$"))

The token sequence of a branch is the concatenation of `prompt_ids + completion_ids` over its turns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why the engine stopped sampling a turn."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWER = "answer"
    MAX_TOKENS = "max_tokens"
    MAX_TURNS = "max_turns"
    PARSE_ERROR = "parse_error"
    ERROR = "error"
    ABORTED = "aborted"


class Status(StrEnum):
    """What became of a trajectory."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    FAILED = "failed"


class Boundary(StrEnum):
    """Where an error arose: it decides whether the policy, the task or the infrastructure is to blame."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    SANDBOX = "sandbox"
    TOOL = "tool"
    REWARD = "reward"
    SCAFFOLD = "scaffold"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the policy made: a tool's name and its parsed arguments.

    `number` counts the calls of a trajectory from 0; the framework sets it, so that a tool whose answer
    changes from call to call is a function of the task and this number, also after an interruption.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the policy sees it.

    `parameters` is a JSON schema of type object. A `stateless` tool keeps nothing between calls, so pooled
    sandboxes may serve the calls of many trajectories, each call in a fresh process.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    stateless: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, in text."""

    role: Role | str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: what the policy is told, and what only the verifier may know.

    `private` never leaves the verifier's side. `gold` is an answer that must score full marks; it lets
    `temper env check` prove the verifier.
    """

    id: str
    prompt: tuple[Message, ...]
    private: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gold: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def ask(cls, id: str, question: str, *, gold: str | None = None, **private: Any) -> Task:
        """Returns the most common kind of task: one question, one answer, and what the verifier knows."""
        return cls(id=id, prompt=(Message(Role.USER, question),), private=private, gold=gold)

    @property
    def content_hash(self) -> str:
        """First 16 hex digits of the SHA-256 of everything that defines the task."""
        data = [self.id, [[str(m.role), m.content] for m in self.prompt], dict(self.private), self.gold]
        return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Packed:
    """An array as bytes, which needs no library: little-endian, `kind` as "i2" or "u4", in C order."""

    kind: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """What the engine chose while it sampled the n tokens of a turn, for training to choose the same.

    A turn sampled under several versions holds the choices of each version for its own tokens.

    Attributes:
        start: position in the branch of the first token with experts; such a token is an input, so the last
            token of a branch has none.
        experts: i2 [m, layers, k], -1 where a token chose none.
        selections: i4 [m, K] by selecting layer: the keys that attention read, -1 in an unused place.
        kept_counts: u4 [n], how many ids top-p and top-k left to each token; 0: all.
        kept_ids: i4, these ids, token after token.
        states: u1 [n], how each token's context was computed (`model.engine.columns.ContextState`).
    """

    start: int = 0
    experts: Packed | None = None
    selections: Mapping[int, Packed] = field(default_factory=dict[int, Packed])
    kept_counts: Packed | None = None
    kept_ids: Packed | None = None
    states: Packed | None = None


@dataclass(frozen=True, slots=True)
class Images:
    """The images in a turn's prompt.

    Attributes:
        types: i1 over the prompt's tokens, `model.vision.TokenType` of each.
        patches: f4 [h * w, 3, p, p] of each image, in order.
        grids: (h, w) of each image.
    """

    types: Packed
    patches: tuple[Packed, ...]
    grids: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What one call of the engine produced, and what the environment answered.

    `prompt_ids` are only the tokens that are new since the previous turn of the same branch (the whole prompt
    in the first turn). `logprobs` and `policy_versions` have the length of `completion_ids`.
    `replay_starts` are positions of the branch at which the engine's windows (of encoder, of decoder) started
    anew, for training to do the same; `replay` is what else the engine recorded. `images` are those among
    `prompt_ids`.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish: FinishReason
    message: Message
    observations: tuple[Message, ...] = ()
    parse_error: str = ""
    replay_starts: tuple[tuple[int, int], ...] = ()
    replay: Replay | None = None
    images: Images | None = None


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryKey:
    """The identity of one sample; `group` numbers the draws of tasks in dispatch order."""

    task: str
    effort: int
    scaffold: str
    group: int
    index: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """A verdict: the total value and its named parts."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Missing:
    """No verdict, and why. It never enters a statistic or the loss, and is never taken for a zero."""

    reason: str
    boundary: Boundary = Boundary.REWARD


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as data: where it arose, its type's name, and its message."""

    boundary: Boundary
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished sample. Each branch is a run of turns whose token history was only appended to."""

    key: TrajectoryKey
    branches: tuple[tuple[Turn, ...], ...]
    status: Status
    stop: StopReason
    score: Score | Missing
    error: ErrorInfo | None = None
    timings: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, over all branches."""
        return tuple(turn for branch in self.branches for turn in branch)

    @property
    def answer(self) -> str:
        """What the policy answered: the text of its last turn, or "" when that turn is no answer.

        A turn that was cut, could not be read, or calls a tool is no answer.
        """
        last = self.turns[-1] if self.turns else None
        if (
            last is None
            or last.finish is not FinishReason.STOP
            or last.parse_error
            or last.message.tool_calls
        ):
            return ""
        return last.message.content

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens the policy sampled: the length that `r_len` counts."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The distinct policy versions that sampled a token of it, ascending."""
        return tuple(sorted({v for turn in self.turns for v in turn.policy_versions}))


@dataclass(frozen=True, slots=True)
class Group:
    """One draw of a task: its trajectories at one effort and one scaffold, compared with each other."""

    id: int
    task: Task
    effort: int
    scaffold: str
    trajectories: tuple[Trajectory, ...]
