"""From a row of a data file to a training sample: a conversation, or a trajectory with its token ids.

A conversation is rendered the way a rollout builds one: the prompt, then each assistant's turn and what
others say in between, appended and never rendered again. So what is trained is what the assistant wrote, by
where it came from and not by searching the text, and a demonstration looks to the policy like its own
history.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from envs.types import Missing
from model.chat import ChatFormat
from model.chat.base import ChatError
from model.chat.prompt import Prompt
from model.images import ImageError, ImageReader, PreparedImage
from model.vision import TokenType
from rl.rollout.codec import CodecError, trajectory_from_json
from rl.trainers.data import Sample, SampleImages, trajectory_samples
from rl.trainers.data_files import DataError

_CONVERSATION = {"messages", "tools", "effort", "id"}
_TRAJECTORY = {"trajectory", "task", "min_version"}
_MESSAGE = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "train"}


@dataclass(frozen=True, slots=True)
class Renderer:
    """Makes samples of rows.

    Attributes:
        chat: the policy's wording.
        images: reads image parts; None: the policy takes none.
        effort: of conversations that name none; None renders none.
        max_tokens: longer samples are refused, unless `cut` is set.
        cut: keep the beginning of samples that are too long.
        min_score: trajectories below it, or without a score, are passed over; None takes all.
    """

    chat: ChatFormat
    images: ImageReader | None = None
    effort: int | None = None
    max_tokens: int | None = None
    cut: bool = False
    min_score: float | None = None

    def samples(self, row: Mapping[str, Any], place: str) -> list[Sample]:
        """The samples of a row: one of a conversation, one for each branch of a trajectory.

        Raises:
            DataError: The row cannot be used; names its place.
        """
        try:
            if "trajectory" in row:
                _check_keys(row, _TRAJECTORY, "a row with a trajectory")
                made = self._trajectory(row)
            else:
                _check_keys(row, _CONVERSATION, "a conversation")
                made = [self._conversation(row, place)]
            return [self._fitted(sample) for sample in made]
        except (ChatError, ImageError, CodecError, KeyError, TypeError, ValueError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{place}: {reason}") from error

    def _trajectory(self, row: Mapping[str, Any]) -> list[Sample]:
        if not isinstance(row["trajectory"], Mapping):
            raise ValueError("trajectory is an object, as a run writes it to rollouts/step-*.jsonl")
        trajectory = trajectory_from_json(row["trajectory"])
        score = trajectory.score
        if self.min_score is not None and (isinstance(score, Missing) or score.value < self.min_score):
            return []
        return trajectory_samples(trajectory, 1.0, max_tokens=self.max_tokens if self.cut else None)

    def _conversation(self, row: Mapping[str, Any], place: str) -> Sample:
        messages = _messages(row)
        effort = row.get("effort", self.effort)
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        if not first:
            raise ValueError("the assistant speaks first; begin with a user's or system message")
        tools = row.get("tools") or []
        _check_objects(tools, "tools")
        pieces = _Pieces()
        pieces.add(self.chat.prompt(messages[:first], tools=tools, effort=effort, images=self.images))
        for assistant, group in itertools.groupby(messages[first:], lambda m: m["role"] == "assistant"):
            turns = list(group)
            if assistant:
                for turn in turns:
                    pieces.add_turn(
                        self.chat.render_assistant(_without(turn, "train")), turn.get("train", True)
                    )
            elif turns[-1] is not messages[-1]:
                pieces.add(self.chat.observation(turns, images=self.images))
        if not any(pieces.mask):
            raise ValueError("no assistant's turn to learn from; add one, or leave the row out")
        return pieces.sample(str(row.get("id", place)), effort or 0)

    def _fitted(self, sample: Sample) -> Sample:
        limit = self.max_tokens
        if limit is None or len(sample) <= limit:
            return sample
        if not self.cut:
            raise ValueError(
                f"{len(sample)} tokens are more than sft.max_tokens={limit}; raise it, leave the row out, or "
                "set sft.cut=true to keep the beginning"
            )
        kept = {name: getattr(sample, name)[:limit] for name in _COLUMNS}
        if not kept["loss_mask"].any():
            raise ValueError(f"of the first {limit} tokens (sft.max_tokens) none is an assistant's; raise it")
        images = None if sample.images is None else sample.images.first(limit)
        return replace(sample, **kept, images=images, truncated=True)


_COLUMNS = ("token_ids", "loss_mask", "logprobs", "advantages", "policy_version")


class _Pieces:
    """The columns of a sample in the making."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.types: list[int] = []
        self.images: list[PreparedImage] = []

    def add(self, prompt: Prompt) -> None:
        """Appends what the policy is told."""
        self.ids += prompt.token_ids
        self.mask += [False] * len(prompt.token_ids)
        self.types += prompt.types
        self.images += prompt.images

    def add_turn(self, ids: Sequence[int], trained: bool) -> None:
        """Appends what the assistant says."""
        self.ids += ids
        self.mask += [bool(trained)] * len(ids)
        self.types += [TokenType.TEXT] * len(ids)

    def sample(self, name: str, effort: int) -> Sample:
        mask, count = np.asarray(self.mask, dtype=bool), len(self.ids)
        images = SampleImages(np.asarray(self.types, np.int8), tuple(self.images)) if self.images else None
        return Sample(
            token_ids=np.asarray(self.ids, dtype=np.int32),
            loss_mask=mask,
            logprobs=np.zeros(count, dtype=np.float32),
            advantages=mask.astype(np.float32),
            policy_version=np.full(count, -1, dtype=np.int32),
            id=name,
            response=name,
            effort=effort,
            images=images,
        )


def _messages(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    messages = row["messages"]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError("messages is a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is an object with a role")
        _check_keys(message, _MESSAGE, f"message {number}")
        _check_objects(message.get("tool_calls") or [], f"message {number}: tool_calls")
        if "train" in message and (message["role"] != "assistant" or not isinstance(message["train"], bool)):
            raise ValueError(
                f"message {number}: train is true or false, and stands at an assistant's message"
            )
    return list(messages)


def _check_objects(value: object, what: str) -> None:
    """Refuses what is no list of `{"function": {...}}`, the shape of tools and of calls of them."""
    if not isinstance(value, list) or not all(
        isinstance(item, Mapping) and isinstance(item.get("function"), Mapping) for item in value
    ):
        raise ValueError(f'{what} is a list of objects like {{"type": "function", "function": {{...}}}}')


def _check_keys(value: Mapping[str, Any], known: set[str], what: str) -> None:
    if unknown := sorted(set(map(str, value)) - known):
        raise ValueError(
            f"{what} has no {', '.join(map(repr, unknown))}; it may have {', '.join(sorted(known))}"
        )


def _without(message: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != key}
