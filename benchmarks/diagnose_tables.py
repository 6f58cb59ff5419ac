"""The figures of the diagnostics as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from model.diagnostics.cache_bytes import Generation
from model.diagnostics.cache_error import LogitError
from model.diagnostics.drafter import DraftAcceptance
from model.diagnostics.experts import LayerLoad
from model.diagnostics.recall import LayerRecall
from model.diagnostics.replay_cost import TurnCost
from model.diagnostics.replay_error import ReplayError
from model.diagnostics.scales import ScaleCount


def print_all(figures: dict[str, Any]) -> None:
    """Every table of `figures`."""
    print_recall(figures["recall"])
    print_cache_error(figures["cache_error"])
    print_scales(figures["scales"])
    for name, turns in figures["turns"].items():
        print_turns(name, turns)
    if "replay_error" in figures:
        print_replay_error(figures["replay_error"])
    if "drafter" in figures:
        print_drafter(figures["drafter"])
    print_experts(figures["experts"])
    print_bytes(figures["cache_bytes"])


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints columns, the first to the left and the others to the right."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    print(f"\n{title}")
    for line in lines:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *rest]))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_recall(layers: Sequence[LayerRecall]) -> None:
    """Recall by layer, then by layer and distance."""
    table(
        "attention on main keys: mass (dense), and the share of it that is kept",
        ("layer", "mode", "chosen by", "mass", "selected", "best", "pool", "choices in pool", "missed"),
        (
            (
                f"{layer.layer}",
                layer.mode,
                f"{layer.selected_by}",
                *map(_share, (layer.mass, layer.selected, layer.best, layer.pool, layer.choices_in_pool)),
                _share(layer.missed),
            )
            for layer in layers
        ),
    )
    rows = []
    for layer in layers:
        for part in layer.by_distance:
            span = f"{part.begin}+" if part.end is None else f"{part.begin}-{part.end - 1}"
            rows.append((f"{layer.layer}", span, *map(_share, (part.mass, part.selected, part.pool))))
    table("the same by distance in tokens", ("layer", "distance", "mass", "selected", "pool"), rows)


def print_cache_error(variants: dict[str, LogitError]) -> None:
    """Logit errors by what is rounded."""
    table(
        "logits with rounded caches against exact ones",
        ("rounded", "relative rms", "largest", "kl nats", "same top token"),
        (
            (name, f"{e.rms:.2e}", f"{e.largest:.2e}", f"{e.kl:.2e}", _share(e.top))
            for name, e in variants.items()
        ),
    )


def print_scales(counts: Sequence[ScaleCount]) -> None:
    """Blocks at the limits of their scales."""
    names = ("blocks", "at floor", "at ceiling", "values", "clipped", "not finite")
    table(
        "block scales at the ends of their range, and values beyond the grid",
        ("layer", "what", *names),
        (
            (c.layer, c.kind, *map(str, (c.blocks, c.floor, c.ceiling, c.values, c.clipped, c.nonfinite)))
            for c in counts
        ),
    )


def print_turns(name: str, turns: Sequence[TurnCost]) -> None:
    """Replay's share over turn length and miss rate."""
    rates = sorted({turn.miss_rate for turn in turns})
    shares = {(turn.new, turn.miss_rate): turn.share for turn in turns}
    table(
        f"replay as a share of a turn, costs {name}",
        ("new tokens", *(f"{rate:.0%} lost" for rate in rates)),
        (
            (f"{new}", *(f"{shares[new, rate]:.2%}" for rate in rates))
            for new in sorted({turn.new for turn in turns})
        ),
    )


def print_replay_error(kinds: dict[str, ReplayError]) -> None:
    """Window keys and logits after a replay."""
    rows = []
    for name, error in kinds.items():
        for when, logits in (("last of prompt", error.first), ("after it", error.later)):
            figures = (f"{logits.rms:.2e}", f"{logits.largest:.2e}", f"{logits.kl:.2e}", _share(logits.top))
            rows.append((name, when, *figures))
    table(
        "logits after bounded replay against exact ones",
        ("replayed", "token", "relative rms", "largest", "kl nats", "same top token"),
        rows,
    )
    table(
        "window keys after bounded replay: relative rms by layer",
        ("replayed", *map(str, range(len(next(iter(kinds.values())).keys)))),
        ((name, *(f"{value:.1e}" for value in error.keys)) for name, error in kinds.items()),
    )


def print_drafter(result: DraftAcceptance) -> None:
    """Acceptance by slot, and calibration."""
    table(
        f"drafts: {result.drafts}, accepted a step {result.accepted_greedy:.2f} greedy, "
        f"{result.accepted_sampling:.2f} sampling",
        ("slot", "reached", "greedy", "sampling", "confidence"),
        (
            (f"{s.slot}", f"{s.reached}", *map(_share, (s.greedy, s.expected, s.confidence)))
            for s in result.slots
        ),
    )
    table(
        f"confidence against acceptance, mean distance {result.calibration_error:.3f}",
        ("confidence", "slots", "said", "accepted"),
        (
            (f"{b.low:.1f}-{b.high:.1f}", f"{b.count}", _share(b.confidence), _share(b.accepted))
            for b in result.bins
        ),
    )


def print_experts(layers: Sequence[LayerLoad]) -> None:
    """Load by layer."""
    table(
        "expert load",
        ("layer", "entropy", "max / mean", "dead", "experts"),
        (
            (
                f"{layer.layer}",
                _share(layer.entropy),
                f"{layer.largest:.2f}",
                f"{layer.dead}",
                f"{layer.experts}",
            )
            for layer in layers
        ),
    )


def print_bytes(rows: Sequence[Generation]) -> None:
    """Cache bytes of the generations."""
    ours = next(row.bytes_per_token for row in rows if row.name == "V4.1-Flash")
    table(
        "cache bytes a token, windows apart",
        ("model", "bytes", "times V4.1-Flash"),
        ((row.name, f"{row.bytes_per_token:,.0f}", f"{row.bytes_per_token / ours:.1f}") for row in rows),
    )
