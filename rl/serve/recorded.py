"""What a session recorded, as the branches of a trajectory: for rewards, and for training.

A branch is a run of turns whose tokens were only appended to. One that leaves another in its middle repeats
that one's ids in its prompt, so that every sampled token stands in one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.types import (
    FinishReason,
    Missing,
    Score,
    Status,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.chat import Prompt
from rl.rollout.messages import from_chat
from rl.rollout.pictures import images_of
from rl.rollout.recorded import replay_of
from rl.serve.conversations import Conversations, Node


@dataclass(frozen=True, slots=True)
class Branch:
    """A run of turns, and all its tokens with the images among them."""

    turns: tuple[Turn, ...]
    history: Prompt


def branches(conversations: Conversations) -> list[Branch]:
    """Returns the branches of a session that has forgotten nothing, by their first turn."""
    nodes = sorted(conversations, key=lambda node: node.number)
    runs: dict[str, list[Node]] = {}
    for node in nodes:
        runs.setdefault(node.branch, []).append(node)
    return [Branch(tuple(map(_turn, run)), run[-1].history()) for run in runs.values()]


def trajectory(
    key: TrajectoryKey,
    recorded: Sequence[Branch],
    score: Score | Missing,
    stop: StopReason = StopReason.ANSWER,
) -> Trajectory:
    """Returns what was recorded as one trajectory with its verdict."""
    status = Status.FINISHED if stop in (StopReason.ANSWER, StopReason.PARSE_ERROR) else Status.TRUNCATED
    return Trajectory(key, tuple(branch.turns for branch in recorded), status, stop, score)


def _turn(node: Node) -> Turn:
    continues = node.parent is not None and node.parent.branch == node.branch
    prompt = node.prompt if continues or node.parent is None else node.before()
    done = node.completion
    return Turn(
        tuple(prompt.token_ids),
        done.token_ids,
        done.logprobs,
        done.policy_versions,
        FinishReason.LENGTH if done.finish is FinishReason.ABORT else done.finish,
        from_chat(node.message),
        parse_error=node.message.get("parse_error", ""),
        replay_starts=done.replay_starts,
        replay=replay_of(done),
        images=images_of(prompt.types, prompt.images),
    )
