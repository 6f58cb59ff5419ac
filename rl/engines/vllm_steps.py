"""What vLLM's core says of a step, as turns and step frames.

vLLM hands tokens over one request at a time, and may merge steps that its reader was late for. The token log
wants what every step drew, and the weights that drew it, so the core's own output is read here, on its way to
vLLM's front, whose objects are not touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from envs.types import FinishReason
from model.engine.columns import ExpertIds
from rl.engines.base import Completion, StepFrame

_FINISH = {0: FinishReason.STOP, 1: FinishReason.LENGTH}


@dataclass(slots=True)
class Turn:
    """A turn that is being sampled: what it began with, and what was drawn since."""

    session: str
    number: int
    prompt: int
    """Tokens of its history."""
    before: Completion
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    finish: FinishReason | None = None
    task: asyncio.Task[None] | None = None
    stopped: bool = False

    def completion(self) -> Completion:
        """All of the turn; one that has not ended was aborted."""
        before = self.before
        return Completion(
            (*before.token_ids, *self.tokens),
            (*before.logprobs, *self.logprobs),
            (*before.policy_versions, *self.versions),
            self.finish or FinishReason.ABORT,
            expert_ids=self._experts(),
        )

    def _experts(self) -> ExpertIds | None:
        """The experts of the turn's inputs, from the first token of its history on."""
        if not self.experts:
            return None
        ids = np.concatenate(self.experts).astype(np.int16)
        return ExpertIds(0, ids[: self.prompt + len(self.before.token_ids) + len(self.tokens) - 1])


def read_step(
    outputs: Sequence[Any], version: int, turns: Mapping[int, Turn]
) -> tuple[StepFrame | None, int, int]:
    """Books a step's outputs with their turns; others' (of turns that were aborted) are passed over.

    Returns:
        The step's frame, if anything was drawn; how many prompt tokens were computed for turns that began,
        and how many of these turns' tokens came from caches.
    """
    drawn: list[tuple[Turn, int, float]] = []
    prefilled = cached = 0
    for output in outputs:
        turn = turns.get(request_number(output.request_id))
        if turn is None:
            continue
        if (stats := output.prefill_stats) is not None:
            prefilled += stats.num_prompt_tokens - stats.num_cached_tokens
            cached += stats.num_cached_tokens
        if output.routed_experts is not None:
            turn.experts.append(np.asarray(output.routed_experts))
        for place, token in enumerate(output.new_token_ids):
            logprob = float(output.new_logprobs.logprobs[place, 0])
            turn.tokens.append(token)
            turn.logprobs.append(logprob)
            turn.versions.append(version)
            drawn.append((turn, token, logprob))
        if output.finish_reason is not None:
            turn.finish = _FINISH.get(int(output.finish_reason))
    return (_frame(drawn, version) if drawn else None), prefilled, cached


def request_number(request_id: str) -> int:
    """The number that a request was given here; vLLM appends random characters to it."""
    return int(request_id.partition("-")[0])


def _frame(drawn: Sequence[tuple[Turn, int, float]], version: int) -> StepFrame:
    return StepFrame(
        [turn.session for turn, _, _ in drawn],
        [turn.number for turn, _, _ in drawn],
        np.array([token for _, token, _ in drawn], np.int32),
        np.array([logprob for _, _, logprob in drawn], np.float32),
        version,
    )
