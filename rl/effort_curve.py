"""What effort buys: quality against cost over a grid of efforts, every effort on the same tasks.

The curve of a run stands in its folder as `effort_curve.json` (one object a point), as `effort_curve.png`, in
metrics.jsonl as `eval/<environment>/effort.<b>/...`, and in W&B as a table with a plot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from envs.types import Score, Trajectory
from model.durable import publish
from rewards.length import LengthPenaltyConfig
from rl.rollout.buffer import outcome

DATA, PICTURE = "effort_curve.json", "effort_curve.png"


class CurveError(ValueError):
    """A file that holds no curve: which, and where curves come from."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What one effort cost and brought: `n` samples were asked for, `n_valid` have a score.

    `score` is the mean outcome of those and `stderr` its standard error; `reward` is the score with the
    length penalty after its warm-up; `tokens` and `calls` are what a sample took on average.
    """

    effort: int
    n: int
    n_valid: int
    score: float
    stderr: float
    reward: float
    tokens: float
    calls: float


def curve(trajectories: Sequence[Trajectory], penalty: LengthPenaltyConfig | None = None) -> list[CurvePoint]:
    """Returns a point for each effort among the trajectories, ascending.

    Samples without a score count in `n` and in nothing else; without any valid one the means are NaN.
    """
    efforts = sorted({t.key.effort for t in trajectories})
    return [_point(b, [t for t in trajectories if t.key.effort == b], penalty) for b in efforts]


def _point(effort: int, members: Sequence[Trajectory], penalty: LengthPenaltyConfig | None) -> CurvePoint:
    valid = [(t, outcome(t.score)) for t in members if isinstance(t.score, Score)]
    scores = [score for _, score in valid]
    mean = _mean(scores)
    price = [0.0 if penalty is None else penalty.penalty(effort, t.sampled_tokens) for t, _ in valid]
    return CurvePoint(
        effort=effort,
        n=len(members),
        n_valid=len(valid),
        score=mean,
        stderr=math.sqrt(_mean([(s - mean) ** 2 for s in scores]) / max(len(scores) - 1, 1)),
        reward=mean + _mean(price),
        tokens=_mean([float(t.sampled_tokens) for t, _ in valid]),
        calls=_mean([float(sum(len(turn.message.tool_calls) for turn in t.turns)) for t, _ in valid]),
    )


def metrics(points: Sequence[CurvePoint], prefix: str) -> dict[str, float]:
    """Returns the points as metrics: `<prefix>/effort.50/score.mean` and so on."""
    names = {
        "score.mean": "score",
        "score.stderr": "stderr",
        "reward.mean": "reward",
        "len.sampled.mean": "tokens",
        "tool_calls": "calls",
        "n": "n",
        "n_valid": "n_valid",
    }
    return {
        f"{prefix}/effort.{point.effort}/{name}": float(getattr(point, field))
        for point in points
        for name, field in names.items()
    }


def table(points: Sequence[CurvePoint]) -> str:
    """Returns the curve as text, a line an effort."""
    lines = ["effort    score  +-       reward   tokens   calls   samples"]
    for p in points:
        lines.append(
            f"{p.effort:6d}   {p.score:6.3f}  {p.stderr:5.3f}  {p.reward:7.3f}  {p.tokens:7.2f}  "
            f"{p.calls:6.2f}   {p.n_valid}/{p.n}"
        )
    return "\n".join(lines)


def columns(points: Sequence[CurvePoint]) -> tuple[list[str], list[list[Any]]]:
    """Returns names of columns, and rows of values."""
    names = [field.name for field in fields(CurvePoint)]
    return names, [[getattr(point, name) for name in names] for point in points]


def write(points: Sequence[CurvePoint], folder: Path) -> None:
    """Writes `effort_curve.json` and `effort_curve.png` into a folder; neither is ever half there."""
    text = json.dumps([asdict(point) for point in points], indent=1) + "\n"
    (folder / f".{DATA}").write_text(text, encoding="utf-8")
    draw({"": points}, folder / f".{PICTURE}")
    for name in (DATA, PICTURE):
        publish(folder / f".{name}", folder / name)


def read(folder: Path) -> list[CurvePoint]:
    """Reads what `write` wrote.

    Raises:
        CurveError: There is no curve, or it is damaged.
    """
    path = folder / DATA
    try:
        return [CurvePoint(**point) for point in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError as error:
        raise CurveError(f"{path} is missing: curves are measured with eval.efforts=[1,50,100]") from error
    except (ValueError, TypeError) as error:
        raise CurveError(f"{path} is no curve ({error}); measure it again with eval.efforts") from error


def draw(
    curves: Mapping[str, Sequence[CurvePoint]],
    path: Path,
    *,
    bound: Sequence[tuple[float, float]] = (),
) -> None:
    """Draws score against tokens, tokens against effort and reward against effort.

    Args:
        curves: by what the legend calls them.
        path: of the PNG.
        bound: (tokens, score) of the best possible policy, drawn dotted.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    quality, length, reward = figure.subplots(1, 3)
    quality.set(title="Quality against cost", xlabel="sampled tokens", ylabel="score")
    length.set(title="Cost", xlabel="effort", ylabel="sampled tokens")
    reward.set(title="Reward (score and length penalty)", xlabel="effort")
    for name, points in curves.items():
        efforts, tokens = [p.effort for p in points], [p.tokens for p in points]
        quality.errorbar(
            tokens, [p.score for p in points], [p.stderr for p in points], fmt="o-", label=name or None
        )
        for p in points:
            quality.annotate(str(p.effort), (p.tokens, p.score), textcoords="offset points", xytext=(4, -10))
        length.plot(efforts, tokens, "o-", label=name or None)
        reward.plot(efforts, [p.reward for p in points], "o-", label=name or None)
    if bound:
        quality.plot([t for t, _ in bound], [s for _, s in bound], "k:", label="best possible")
    for axes in (quality, length, reward):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=90, format="png")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
