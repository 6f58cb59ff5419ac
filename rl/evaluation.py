"""Evaluation: the same sampling path as training, on tasks that training never sees, every row counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from envs.types import Score, Status, StopReason, Trajectory
from rl.rollout.buffer import outcome


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found: `n` samples were asked for, `n_valid` have a score.

    `score` is the mean outcome over the valid ones and `stderr` its standard error, `tool_use` the share of
    valid samples that called a tool, `tokens` the mean number of sampled tokens, `truncated` the share cut by
    a limit. With no valid sample the means are NaN.
    """

    n: int
    n_valid: int
    score: float
    stderr: float
    tool_use: float
    tokens: float
    truncated: float

    def metrics(self, prefix: str) -> dict[str, float]:
        """Returns the fields as metrics under `prefix` (`eval/calc/sampled`)."""
        return {
            f"{prefix}/score.mean": self.score,
            f"{prefix}/score.stderr": self.stderr,
            f"{prefix}/n": self.n,
            f"{prefix}/n_valid": self.n_valid,
            f"{prefix}/tool_use": self.tool_use,
            f"{prefix}/len.sampled.mean": self.tokens,
            f"{prefix}/truncated": self.truncated,
        }


def summarize(trajectories: Sequence[Trajectory]) -> EvalResult:
    """Summarises one evaluation. Samples without a score count in `n` and in nothing else."""
    valid = [(t, t.score) for t in trajectories if isinstance(t.score, Score)]
    scores = [outcome(score) for _, score in valid]
    mean = _mean(scores)
    return EvalResult(
        n=len(trajectories),
        n_valid=len(valid),
        score=mean,
        stderr=math.sqrt(_mean([(s - mean) ** 2 for s in scores]) / max(len(scores) - 1, 1)),
        tool_use=_mean([float(any(turn.message.tool_calls for turn in t.turns)) for t, _ in valid]),
        tokens=_mean([float(t.sampled_tokens) for t, _ in valid]),
        truncated=_mean([float(t.status is Status.TRUNCATED) for t, _ in valid]),
    )


def errors(trajectories: Sequence[Trajectory]) -> int:
    """Counts the trajectories that failed for a reason outside the policy."""
    return sum(t.status is Status.FAILED or t.stop is StopReason.ERROR for t in trajectories)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
