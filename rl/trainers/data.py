"""Samples: what a trainer learns from, with no line drawn between prompt and response.

Whether a token is trained is decided by where it came from: the policy sampled it, or a demonstration's
assistant wrote it. Never by parsing the text, and never by role.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from envs.base import Environment
from envs.types import Message, Role, Task, ToolSpec, Trajectory, Turn
from model.choices import Choices, SamplingMask
from model.images import PreparedImage
from model.vision import TokenType
from rl.rollout.pictures import history_images
from rl.rollout.recorded import unpack
from rl.trainers.choices import ReplayChoices, branch_choices, branch_mask

Columns = tuple[list[int], list[bool], list[float], list[int]]


class ChatFormat(Protocol):
    """The part of a checkpoint's chat format that turns a demonstration into token ids."""

    def render_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]], effort: int | None
    ) -> list[int]:
        """Renders a prompt up to where the assistant speaks."""
        ...

    def render_observation(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Renders what follows an assistant's turn, up to where it speaks again."""
        ...

    def render_assistant(self, message: Mapping[str, Any]) -> list[int]:
        """Renders an assistant's turn, end token included."""
        ...


@dataclass(frozen=True, slots=True)
class SampleImages:
    """The images of a sample: `types` int8 [n] says what each token stands for, `images` are in order."""

    types: np.ndarray
    images: tuple[PreparedImage, ...]

    def first(self, count: int) -> SampleImages | None:
        """Those of the first `count` tokens; None: no image is left. Raises ValueError inside an image."""
        types = self.types[:count]
        starts, ends = (int((types == kind).sum()) for kind in (TokenType.START, TokenType.END))
        if starts != ends:
            raise ValueError(f"a sample cannot be cut at token {count}, inside an image; cut it elsewhere")
        return SampleImages(types, self.images[:starts]) if starts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence of tokens as columns of equal length n.

    Example: `E 5 0 47*86= <47*86> [4042] #4042 $` has loss_mask 1 on `<47*86>` and `#4042 $` only.

    Attributes:
        token_ids: int32 [n].
        loss_mask: bool [n], True where the token is trained; never at position 0, which nothing predicts.
        logprobs: float32 [n], of the sampler; 0 where the policy did not sample.
        advantages: float32 [n], 0 outside the mask.
        policy_version: int32 [n], version that sampled the token; -1 where the policy did not.
        id: what names the sample in an error.
        response: the trajectory (or demonstration) it is a branch of.
        group: the draw of a task it belongs to.
        effort: the requested effort.
        config_version: version of the configuration it was made under.
        truncated: whether tokens were cut off at the trainer's maximum.
        choices: what the sampler's forward pass chose, over n tokens, which the trainer's repeats.
        sampling_mask: what each of n tokens could have been; its log-probability is renormalised over that.
        replay_starts: (encoder, decoder) positions at which the sampler started its windows anew; the
            trainer's tokens see no window keys before them.
        images: the images among the tokens; None: text only.
        states: int8 [n], how the sampler computed a token's context (`ContextState`); -1: it did not say.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    policy_version: np.ndarray
    id: str = ""
    response: str = ""
    group: int = 0
    effort: int = 0
    config_version: int = 0
    truncated: bool = False
    choices: Choices | None = None
    sampling_mask: SamplingMask | None = None
    replay_starts: tuple[tuple[int, int], ...] = ()
    images: SampleImages | None = None
    states: np.ndarray | None = None

    def __post_init__(self) -> None:
        columns = (self.token_ids, self.loss_mask, self.logprobs, self.advantages, self.policy_version)
        if len({column.shape for column in columns}) != 1 or self.token_ids.ndim != 1:
            shapes = ", ".join(str(column.shape) for column in columns)
            raise ValueError(f"sample {self.id!r} has columns of shapes {shapes}; all are [n]")
        mask = self.sampling_mask
        if mask is not None and len(mask) != len(self):
            raise ValueError(
                f"sample {self.id!r} of {len(self)} tokens has a sampling mask over {len(mask)}; record one "
                "row a token, empty where nothing was sampled or cut off"
            )
        if len(self) and self.loss_mask[0]:
            raise ValueError(
                f"sample {self.id!r} trains its first token, which nothing predicts; give it a prompt"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def trained_tokens(self) -> int:
        """Number of tokens with a loss."""
        return int(self.loss_mask.sum())


def trajectory_samples(
    trajectory: Trajectory,
    advantage: float,
    *,
    max_tokens: int | None = None,
    config_version: int = 0,
    replay: ReplayChoices = "selections",
) -> list[Sample]:
    """One sample per branch of a trajectory; the advantage is that of the whole trajectory.

    `replay` names the recorded choices that training repeats. What each token was drawn from is always kept.

    A branch that repeats the history of another holds it in its prompt, so no token is trained twice.
    Branches in which nothing was sampled (or all that was is cut off at `max_tokens`) give no sample.

    Raises:
        ValueError: A turn's columns differ in length.
    """
    name = _name(trajectory)
    samples = []
    for number, branch in enumerate(trajectory.branches):
        ids, mask, logprobs, versions = _branch_columns(branch, name)
        keep = np.asarray(mask[:max_tokens], dtype=bool)
        if not keep.any():
            continue
        choices, kept = branch_choices(branch, replay), branch_mask(branch)
        samples.append(
            Sample(
                token_ids=np.asarray(ids[:max_tokens], dtype=np.int32),
                loss_mask=keep,
                logprobs=np.asarray(logprobs[:max_tokens], dtype=np.float32),
                advantages=np.where(keep, np.float32(advantage), np.float32(0)),
                policy_version=np.asarray(versions[:max_tokens], dtype=np.int32),
                id=f"{name}/branch {number}",
                response=name,
                group=trajectory.key.group,
                effort=trajectory.key.effort,
                config_version=config_version,
                truncated=max_tokens is not None and len(ids) > max_tokens,
                choices=None if choices is None else choices.first(len(keep)),
                sampling_mask=None if kept is None else kept[: len(keep)],
                replay_starts=tuple(start for turn in branch for start in turn.replay_starts),
                states=_branch_states(branch)[: len(keep)],
                images=_branch_images(branch, len(keep)),
            )
        )
    return samples


def _name(trajectory: Trajectory) -> str:
    key = trajectory.key
    return f"{key.task} effort {key.effort} {key.scaffold} group {key.group}.{key.index}.{key.attempt}"


def _branch_columns(branch: Sequence[Turn], name: str) -> Columns:
    columns: Columns = ([], [], [], [])
    for turn in branch:
        sampled = len(turn.completion_ids)
        if not sampled == len(turn.logprobs) == len(turn.policy_versions):
            raise ValueError(
                f"a turn of {name} has {sampled} sampled tokens, {len(turn.logprobs)} log-probabilities and "
                f"{len(turn.policy_versions)} versions; the engine must return one of each per token"
            )
        _append(columns, turn.prompt_ids, trained=False)
        _append(columns, turn.completion_ids, turn.logprobs, turn.policy_versions, trained=True)
    return columns


def _branch_images(branch: Sequence[Turn], count: int) -> SampleImages | None:
    turns = [(len(turn.prompt_ids), turn.images, len(turn.completion_ids)) for turn in branch]
    if (found := history_images(turns)) is None:
        return None
    return SampleImages(np.array(found.types, np.int8), tuple(found.images)).first(count)


def _branch_states(branch: Sequence[Turn]) -> np.ndarray:
    parts: list[np.ndarray] = []
    for turn in branch:
        recorded = None if turn.replay is None else turn.replay.states
        unknown = np.full(len(turn.completion_ids), -1, np.int8)
        states = unknown if recorded is None else unpack(recorded).astype(np.int8)
        parts += [np.full(len(turn.prompt_ids), -1, np.int8), states]
    return np.concatenate(parts) if parts else np.zeros(0, np.int8)


def _append(
    columns: Columns,
    ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    versions: Sequence[int] | None = None,
    *,
    trained: bool,
) -> None:
    columns[0].extend(ids)
    columns[1].extend([trained] * len(ids))
    columns[2].extend([0.0] * len(ids) if logprobs is None else logprobs)
    columns[3].extend([-1] * len(ids) if versions is None else versions)


def demonstration_sample(
    task: Task,
    turns: Sequence[Message],
    chat: ChatFormat,
    *,
    tools: Sequence[ToolSpec] = (),
    effort: int | None = None,
) -> Sample:
    """Renders a demonstration; only what its assistant says is trained.

    Raises:
        ValueError: It has no assistant turn.
    """
    columns: Columns = ([], [], [], [])
    prompt = [message_dict(message) for message in task.prompt]
    _append(
        columns, chat.render_prompt(prompt, tools=[tool_dict(t) for t in tools], effort=effort), trained=False
    )
    for assistant, messages in itertools.groupby(turns, lambda message: message.role == Role.ASSISTANT):
        if assistant:
            for message in messages:
                _append(columns, chat.render_assistant(message_dict(message)), trained=True)
        else:
            _append(columns, chat.render_observation([message_dict(m) for m in messages]), trained=False)
    mask = np.asarray(columns[1], dtype=bool)
    if not mask.any():
        raise ValueError(
            f"the demonstration of task {task.id!r} has no assistant turn, so there is nothing to learn"
        )
    return Sample(
        token_ids=np.asarray(columns[0], dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(mask), dtype=np.float32),
        advantages=mask.astype(np.float32),
        policy_version=np.asarray(columns[3], dtype=np.int32),
        id=f"demonstration of {task.id}",
        response=task.id,
        effort=effort or 0,
    )


def demonstration_samples(
    env: Environment, chat: ChatFormat, split: str, seed: int, *, efforts: Sequence[int] = (50,)
) -> Iterator[Sample]:
    """Yields an environment's demonstrations as samples, each at an effort drawn from `efforts` by `seed`."""
    draw = random.Random(seed)
    for task, turns in env.demonstrations(split, seed):
        yield demonstration_sample(task, turns, chat, tools=env.tools, effort=draw.choice(efforts))


def message_dict(message: Message) -> dict[str, Any]:
    """A message in the shape of the OpenAI API, as chat formats take it."""
    data: dict[str, Any] = {"role": str(message.role), "content": message.content}
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_call_id:
        data["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        data["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in message.tool_calls
        ]
    return data


def tool_dict(tool: ToolSpec) -> dict[str, Any]:
    """A tool in the shape of the OpenAI API."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
