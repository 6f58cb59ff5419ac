"""What the model-level benchmarks on a GPU share: figures and bounds, the loop over sections, the table.

A section yields its figures, and each is printed as it comes: what was measured before a failure stands.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks import model_gpu_times as times
from benchmarks.kv_bytes import growth
from benchmarks.model_gpu_setup import cache_of, fill
from model.ops import dispatch
from model.policy import Policy

LONG, SHORT, MILLION = 65536, 4096, 1 << 20


@dataclass
class Figure:
    """One line of the table; `targets` are must, good and stretch."""

    what: str
    value: float
    unit: str = ""
    targets: tuple[float, float, float] | None = None
    least: bool = False
    """Whether the value must be at least the target; otherwise at most."""
    note: str = ""

    @property
    def reached(self) -> str:
        """The best target that is met."""
        if self.targets is None:
            return "-"
        met = [self.value >= t if self.least else self.value <= t for t in self.targets]
        names = [name for name, ok in zip(("must", "good", "stretch"), met, strict=True) if ok]
        return names[-1] if names else "MISSED"

    def line(self) -> str:
        """A row of the Markdown table."""
        targets = "-" if self.targets is None else " / ".join(f"{t:g}" for t in self.targets)
        return f"| {self.what} | {self.value:.4g} {self.unit} | {targets} | {self.reached} | {self.note} |"


Sections = Mapping[str, Callable[[Policy], Iterable[Figure]]]


def options(parser: argparse.ArgumentParser, sections: Sections) -> argparse.Namespace:
    """The command line, its `parts` as a list; ends the program for an unknown part or without CUDA."""
    parser.add_argument("--parts", default=",".join(sections), help="sections, separated by commas")
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    if unknown := [name for name in given.parts if name not in sections]:
        parser.error(f"unknown part {unknown[0]!r}: choose among {', '.join(sections)}")
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA device and there is none")
    return given


def run(sections: Sections, names: Sequence[str], policy: Policy) -> list[Figure]:
    """Run the named sections, and print their figures, seconds and the kernels' paths."""
    figures: list[Figure] = []
    for name in names:
        begin = time.perf_counter()
        for figure in sections[name](policy):
            figures.append(figure)
            print(figure.line(), flush=True)
        clean()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print("paths:", ", ".join(f"{op} {path}" for op, path in dispatch.paths().items()))
    return figures


def verdict(figures: Sequence[Figure], device: str) -> int:
    """Print the table of what was measured on `device`; 1 when a target is missed, else 0."""
    print(f"\n{device}, torch {torch.__version__}\n")
    print("| figure | ours | must / good / stretch | reached | note |\n| --- | --- | --- | --- | --- |")
    for figure in figures:
        print(figure.line())
    missed = sum(figure.reached == "MISSED" for figure in figures)
    print(f"\nmissed {missed} of {sum(figure.targets is not None for figure in figures)}")
    return int(missed > 0)


def clean() -> None:
    """Caches and the graphs over them hold each other: only the collector frees them."""
    gc.collect()
    torch.cuda.empty_cache()


def sites(errors: dict[str, float]) -> dict[str, float]:
    """Of errors by what is traced, those of the layers' attention and experts."""
    return {name: error for name, error in errors.items() if name.endswith(("attn_out", "ffn_out"))}


def cache_bytes(policy: Policy) -> Figure:
    """By how many bytes a token its packed cache grows."""
    sources = [policy.config.ratio(layer) for layer in policy.config.kv_source_layer_ids]
    note = f"records of 356 B in {len(sources)} source layers of ratios {sources}, and the table of pages"
    value, most = growth(policy.config, policy.device), (890.5, 890.5, 890.5)
    return Figure("cache bytes a token, from allocated memory", value, "B", most, note=note)


def decode_seconds(policy: Policy, steps: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, float]]:
    """Batch, context and seconds of a decode step for each (batch, context)."""
    for batch, context in steps:
        seconds = times.decode(policy, batch, context)
        clean()
        yield batch, context, seconds


def cost_of_context(seconds: dict[tuple[int, int], float]) -> Figure:
    """A step at a million tokens against one at 4K, from seconds by batch and context."""
    ratio = seconds[1, MILLION] / seconds[1, SHORT]
    return Figure("decode step at 1M / at 4K, batch 1", ratio, "x", (2.0, 1.6, 1.35))


def kernels_of_steps(policy: Policy, steps: Iterable[tuple[int, int]]) -> Iterator[Figure]:
    """Milliseconds of a decode step's kernels, by part of the step, for each (batch, context)."""
    for batch, context in steps:
        cache = cache_of(policy, batch, context)
        step = times.step_alone(policy, cache, fill(policy, cache, batch, context), context)
        parts = times.split(times.launches(step))
        note = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        yield Figure(f"kernels of a step, batch {batch} at {context}", sum(parts.values()), "ms", note=note)
        del cache, step
        clean()
