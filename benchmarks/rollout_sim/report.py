"""What the runs show: the table, the picture, and whether the targets are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rollout_sim.costs import Costs
from benchmarks.rollout_sim.stats import Result, ks_distance, ks_noise

OTHERS = ("one step off", "group async", "areal", "prompt level")
Curve = Mapping[str, Sequence[tuple[float, float]]]

_AGAINST_BARRIER, _AGAINST_OTHERS, _IDLE, _FAR = 4.0, 1.1, 0.05, 3.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures of the last line, and every missed target in words."""

    speedup: float
    best_other: str
    against_other: float
    idle: float
    ks: float
    ks_restart: float
    noise: float
    missed: tuple[str, ...]


def judge(results: Mapping[str, Result], source: np.ndarray, staleness: int) -> Verdict:
    """Compares the rules' runs, pooled over seeds, with the targets; `source` is the lengths' histogram."""
    ours, best = results["ours"], max(OTHERS, key=lambda rule: results[rule].tokens_per_s)
    speedup = ours.tokens_per_s / results["barrier"].tokens_per_s
    against = ours.tokens_per_s / results[best].tokens_per_s
    ks, ks_restart = ks_of(ours, source), ks_of(results["ours, restart"], source)
    noise = ks_noise(ours.samples, int(source.sum()))
    lag = max(max(result.lags, default=0) for result in results.values())
    targets = (
        (
            speedup >= _AGAINST_BARRIER,
            f"speedup {speedup:.2f} against the barrier, target {_AGAINST_BARRIER}",
        ),
        (against >= _AGAINST_OTHERS, f"speedup {against:.2f} against '{best}', target {_AGAINST_OTHERS}"),
        (ours.idle <= _IDLE, f"engine idle {ours.idle:.1%}, target {_IDLE:.0%}"),
        (lag <= staleness, f"a trained token is {lag} steps old, bound {staleness}"),
        (ks <= noise, f"ks {ks:.4f} of resume, sampling noise (1 %) {noise:.4f}"),
        (ks_restart >= _FAR * noise, f"ks {ks_restart:.4f} of restart, target {_FAR} x noise {noise:.4f}"),
    )
    missed = tuple(text for met, text in targets if not met)
    return Verdict(speedup, best, against, ours.idle, ks, ks_restart, noise, missed)


def ks_of(result: Result, source: np.ndarray) -> float:
    """Distance between trained and source lengths; 1 when nothing was trained."""
    return ks_distance(np.array(result.lengths), source) if result.samples else 1.0


def table(results: Mapping[str, Result], source: np.ndarray | None = None) -> str:
    """One row a rule: rates, idle times, lags in steps, waste, live samples, and length bias."""
    lines = [
        f"{'rule':<20}{'tok/s':>8}{'x':>6}{'smp/s':>7}{'idle%':>7}{'cv':>6}{'wait%':>7}{'lag95':>6}{'max':>4}"
        f"{'mask%':>7}{'waste%':>8}{'hit%':>6}{'live':>6}"
        + (f"{'ks':>8}{'early':>7}" if source is not None else "")
    ]
    base = next(iter(results.values())).tokens_per_s
    for rule, r in results.items():
        used = r.tokens + r.masked
        bias = ""
        if source is not None:
            bias = f"{ks_of(r, source):>8.4f}{ks_distance(np.array(r.early), source):>7.3f}"
        lines.append(
            f"{rule:<20}{r.tokens_per_s:>8.0f}{r.tokens_per_s / base:>6.2f}{r.samples / r.seconds:>7.2f}"
            f"{100 * r.idle:>7.1f}{r.variation:>6.2f}{100 * (1 - r.trainer_busy_s / r.seconds):>7.1f}"
            f"{r.lag(0.95):>6}{max(r.lags, default=0):>4}{100 * r.masked / used:>7.1f}"
            f"{100 * r.wasted / (used + r.wasted):>8.1f}"
            f"{100 * r.cached_tokens / max(1, r.cached_tokens + r.computed_tokens):>6.1f}{r.peak_live:>6}"
            f"{bias}"
        )
    return "\n".join(lines)


def draw(path: Path, results: Mapping[str, Result], tail: Curve, cap: Curve, costs: Costs) -> None:
    """Writes the picture: throughput of every rule, and the ratios over tail exponent and live samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    bars, left, right = figure.subplots(1, 3)
    bars.barh(list(results), [r.tokens_per_s for r in results.values()])
    bars.invert_yaxis()
    bars.set_xlabel(f"trained tokens/s within staleness {costs.staleness}")
    for axes, curve, label in ((left, tail, "tail exponent"), (right, cap, "limit on live samples")):
        for name, points in curve.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xlabel(label)
        axes.set_ylabel("ours / other, trained tokens/s")
        if curve:
            axes.legend()
    figure.savefig(path, dpi=120)
