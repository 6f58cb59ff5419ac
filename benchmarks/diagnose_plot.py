"""The figures of the diagnostics as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draws recall, logit error, replay share and expert load to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    recall, distance, replay, load = figure.subplots(2, 2).flat
    _recall(recall, figures["recall"])
    _distance(distance, figures["recall"])
    _replay(replay, figures["turns"]["parameters"])
    _load(load, figures["experts"])
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)


def _recall(axes: Any, layers: Any) -> None:
    axes.set(title="Attention mass on main keys that is kept", xlabel="layer", ylim=(-0.03, 1.03))
    numbers = [layer.layer for layer in layers]
    axes.plot(numbers, [layer.selected for layer in layers], "o-", label="selected")
    axes.plot(numbers, [layer.best for layer in layers], "s--", label="as many, with hindsight")
    pooled = [layer for layer in layers if layer.pool is not None]
    axes.plot([layer.layer for layer in pooled], [layer.pool for layer in pooled], "^:", label="pool")


def _distance(axes: Any, layers: Any) -> None:
    axes.set(title="Kept by distance", xlabel="tokens from the query, at least", ylim=(-0.03, 1.03))
    for layer in layers:
        begins = [part.begin + 1 for part in layer.by_distance]
        kept = [part.selected for part in layer.by_distance]
        axes.plot(begins, kept, "o-", label=f"layer {layer.layer}")
    axes.set_xscale("log")


def _replay(axes: Any, turns: Any) -> None:
    axes.set(title="Replay as a share of a turn", xlabel="new tokens", ylim=(-0.03, 1.03), xscale="log")
    for rate in sorted({turn.miss_rate for turn in turns}):
        chosen = [turn for turn in turns if turn.miss_rate == rate]
        news, shares = [turn.new for turn in chosen], [turn.share for turn in chosen]
        axes.plot(news, shares, "o-", label=f"{rate:.0%} of windows lost")


def _load(axes: Any, layers: Any) -> None:
    axes.set(title="Expert load", xlabel="layer")
    numbers = [layer.layer for layer in layers]
    axes.plot(numbers, [layer.largest for layer in layers], "o-", label="busiest over mean")
    axes.plot(numbers, [layer.entropy for layer in layers], "s-", label="entropy, share of its maximum")
