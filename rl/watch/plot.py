"""The curves of a run as one picture, drawn from metrics.jsonl alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.watch.jsonl import Row, read_rows, series

FILE_NAME = "curves.png"


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: its title, and the metrics in it with their labels.

    `share` fixes the axis to 0..1, `window` is how many steps are averaged, `log` is the kind of axis.
    """

    title: str
    lines: Sequence[tuple[str, str]]
    axis: str = "optimiser step (RL)"
    share: bool = False
    window: int = 10
    log: bool = False


PANELS = (
    Panel("Reward of training samples", [("rollout/all/reward.mean", "reward")], share=True),
    Panel("Tool use", [("rollout/all/tool_use", "samples with a call")], share=True),
    Panel(
        "Groups",
        [
            ("rollout/all/group.mixed", "mixed"),
            ("rollout/all/group.all_good", "all right"),
            ("rollout/all/group.all_bad", "all wrong"),
        ],
        share=True,
    ),
    Panel(
        "Sampled tokens",
        [("rollout/all/len.sampled.mean", "mean"), ("rollout/all/len.sampled.p90", "90 % below")],
    ),
    Panel("Entropy", [("train/entropy", "nats a token")]),
    Panel(
        "Trainer against sampler",
        [("train/kl.mismatch", "mean difference"), ("train/kl.mismatch.max", "max")],
        log=True,
    ),
    Panel("Gradient norm", [("train/grad_norm", "norm")]),
    Panel("Idle share", [("sys/idle.trainer", "trainer"), ("sys/idle.rollout", "rollout")], share=True),
    Panel("Warm start", [("sft/loss", "loss")], axis="step (SFT)", window=1),
)


def draw(run: Path) -> Path:
    """Draws `curves.png` of a run folder and returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rows = read_rows(run / "metrics.jsonl")
    figure = Figure(figsize=(14, 10), layout="constrained")
    axes = figure.subplots(3, 3).flat
    for panel, place in zip(PANELS, axes, strict=True):
        _panel(place, panel, rows)
    evaluations = _evaluations(rows)
    _mark(figure.axes[0], evaluations)
    figure.suptitle(
        "  ".join([run.name, *(f"{name} {ys[0]:.2f} to {ys[-1]:.2f}" for name, _, ys in evaluations)])
    )
    path = run / FILE_NAME
    partial = run / f".{FILE_NAME}.partial"
    figure.savefig(partial, format="png", dpi=90)
    partial.replace(path)
    return path


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Returns the mean of the last `window` values (fewer at the start) at each place."""
    return [
        sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i + 1 - window) : i + 1])
    ]


def _panel(axes: Any, panel: Panel, rows: list[Row]) -> None:
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel(panel.axis, fontsize=9)
    axes.grid(alpha=0.3)
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
    for color, (name, label) in enumerate(panel.lines):
        steps, values = series(rows, name)
        if steps:
            axes.plot(steps, values, color=f"C{color}", alpha=0.25, linewidth=1)
            axes.plot(steps, smooth(values, panel.window), color=f"C{color}", linewidth=1.8, label=label)
    if panel.log and axes.lines:
        axes.set_yscale("log")
    if axes.lines:
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "no numbers", ha="center", transform=axes.transAxes, color="gray")


def _evaluations(rows: list[Row]) -> list[tuple[str, list[int], list[float]]]:
    names = sorted(
        {
            name
            for row in rows
            for name in row.metrics
            if name.startswith("eval/") and name.endswith("/score.mean")
        }
    )
    return [(name.split("/")[-2], *series(rows, name)) for name in names]


def _mark(axes: Any, evaluations: list[tuple[str, list[int], list[float]]]) -> None:
    for index, (name, steps, values) in enumerate(evaluations):
        axes.plot(steps, values, "o", color=f"C{index + 1}", label=f"evaluation, {name}", markersize=5)
    if evaluations:
        axes.legend(fontsize=8)
