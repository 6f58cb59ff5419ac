"""Score against effort and against tokens, one line for each environment and scaffold, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.evals.summary import CellResult

PICTURE = "quality.png"


def draw_quality(results: Sequence[CellResult], folder: Path, title: str) -> Path:
    """Draws `quality.png` and returns its path. Cells without a score are left out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    known = [result for result in results if result.avg.n]
    for color, name in enumerate(sorted({(r.cell.env, r.cell.scaffold) for r in known})):
        line = sorted(
            (r for r in known if (r.cell.env, r.cell.scaffold) == name), key=lambda r: r.cell.effort
        )
        _line(left, [r.cell.effort for r in line], line, color, ", ".join(name))
        _line(right, [r.tokens for r in line], line, color, ", ".join(name))
    _axes(left, "effort", bool(known))
    _axes(right, "sampled tokens", bool(known))
    left.set_ylabel("score, mean and 95 % interval")
    figure.suptitle(title)
    path = folder / PICTURE
    partial = folder / f".{PICTURE}.partial"
    try:
        figure.savefig(partial, format="png", dpi=90)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _line(axes: Any, places: Sequence[float], results: Sequence[CellResult], color: int, label: str) -> None:
    means = [r.avg.mean for r in results]
    below = [max(r.avg.mean - r.avg.low, 0.0) for r in results]
    above = [max(r.avg.high - r.avg.mean, 0.0) for r in results]
    axes.errorbar(places, means, [below, above], color=f"C{color}", marker="o", capsize=3, label=label)


def _axes(axes: Any, name: str, filled: bool) -> None:
    axes.set_xlabel(name)
    axes.grid(alpha=0.3)
    if filled:
        axes.legend(fontsize=8)
    else:
        axes.text(0.5, 0.5, "no scores", ha="center", transform=axes.transAxes, color="gray")
