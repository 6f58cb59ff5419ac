"""Samples in the terminal, every token coloured by what the loss does with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from envs.types import Missing, Trajectory
from rl.watch.rollouts import Sample

GIVEN, TRAINED, STALE = "dim", "bold green", "yellow"
Decode = Callable[[Sequence[int]], str]
_ORDERS: dict[str, Callable[[Sample], float]] = {
    "reward": lambda sample: -math.inf if math.isnan(sample.reward) else sample.reward,
    "length": lambda sample: float(sample.trajectory.sampled_tokens),
    "group": lambda sample: float(sample.trajectory.key.group),
}
ORDERS = tuple(_ORDERS)


def show(console: Console, samples: Sequence[Sample], decode: Decode, *, order: str, limit: int) -> None:
    """Prints samples, least first, and what the colours mean."""
    console.print(
        Text.assemble(("given", GIVEN), "  ", ("trained", TRAINED), "  ", ("too old, no loss", STALE))
    )
    chosen = sorted(samples, key=_ORDERS[order])
    for sample in chosen[:limit]:
        console.print(headline(sample), tokens(sample, decode), sep="\n  ")
    if len(chosen) > limit:
        console.print(f"{len(chosen) - limit} more; --limit {len(chosen)} shows all")


def headline(sample: Sample) -> Text:
    """Returns one line about a sample: task, verdict, how it ended."""
    trajectory = sample.trajectory
    key = trajectory.key
    text = Text(f"{key.task}  effort {key.effort}  group {key.group}.{key.index}  ")
    text.append(_verdict(trajectory), style="green" if sample.reward > 0 else "red")
    text.append(f"  {trajectory.stop}  {len(trajectory.turns)} turns  {trajectory.sampled_tokens} tokens")
    versions = trajectory.policy_versions
    if versions:
        text.append(f"  weights {versions[0]}" + (f" to {versions[-1]}" if len(versions) > 1 else ""))
    if trajectory.error is not None:
        error = trajectory.error
        text.append(f"\n  {error.boundary}: {error.type}: {error.message}", style="red")
    return text


def tokens(sample: Sample, decode: Decode) -> Text:
    """Returns the text of a sample: dim was given, green was trained on, yellow was too old to be."""
    text = Text()
    for turn in sample.trajectory.turns:
        text.append(decode(turn.prompt_ids), style=GIVEN)
        run: list[int] = []
        style = TRAINED
        for token, version in zip(turn.completion_ids, turn.policy_versions, strict=True):
            own = TRAINED if version >= sample.min_version else STALE
            if own != style and run:
                text.append(decode(run), style=style)
                run = []
            run, style = [*run, token], own
        text.append(decode(run), style=style)
    return text


def _verdict(trajectory: Trajectory) -> str:
    score = trajectory.score
    if isinstance(score, Missing):
        return f"no score ({score.boundary}: {score.reason})"
    parts = " ".join(f"{name} {value:g}" for name, value in score.parts.items() if name != "outcome")
    return f"reward {score.value:g}" + (f" ({parts})" if parts else "")
