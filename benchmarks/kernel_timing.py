"""How kernels are timed on a GPU, and the table that says what was reached.

A time is taken with a cold L2 for kernels of a millisecond, and by replaying a graph for short ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from triton.testing import do_bench

BYTES = "x the ideal's bytes"
"""Unit of a figure for which lower is better, as it is for times."""
HEADER = ["kernel", "speed against", "figure", "time", "must / good / stretch", "reached", "error", "note"]


@dataclass
class Peer:
    """What else does a row's work: its microseconds, or why there are none."""

    name: str
    time_us: float = 0.0
    reason: str = ""

    def cell(self, time_us: float) -> str:
        """How many times faster than it a kernel of `time_us` is."""
        if self.reason:
            return f"{self.name}: {self.reason}"
        return f"{self.time_us / time_us:.2f}x {self.name}"


def measured(name: str, time: Callable[[], float]) -> Peer:
    """A peer that may not be installed, or not run here: then the reason stands in the table."""
    try:
        return Peer(name, time())
    except ImportError as error:
        return Peer(name, reason=f"{error.name} is not installed" if error.name else str(error)[:120])
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"{name}: {type(error).__name__}: {error}"[:2000], flush=True)
        return Peer(name, reason=f"{type(error).__name__}: {first}"[:120].replace("|", "/"))
    finally:
        torch.cuda.empty_cache()


@dataclass
class Row:
    """One line of the table; `targets` are must, good, stretch in `unit`, and lower is better for times."""

    what: str
    value: float
    unit: str
    time_us: float
    error: float
    targets: tuple[float, float, float] | None = None
    peer: str = ""
    peer_us: float = 0.0
    note: str = ""
    others: list[Peer] = field(default_factory=list)
    """Peers beside the first."""

    def met(self, target: float) -> bool:
        """Whether the value reaches a target."""
        return self.value <= target if self.unit in ("us", BYTES) else self.value >= target

    @property
    def level(self) -> str:
        """The best target that the value reaches."""
        if self.targets is None:
            return "-"
        names = [n for n, t in zip(("must", "good", "stretch"), self.targets, strict=True) if self.met(t)]
        return names[-1] if names else "MISSED"

    def cells(self) -> list[str]:
        """Cells of the table, the ratio to the peer first."""
        first = [Peer(self.peer, self.peer_us)] if self.peer_us else []
        ratios = "; ".join(peer.cell(self.time_us) for peer in first + self.others)
        targets = " / ".join(f"{t:g}" for t in self.targets) if self.targets else "-"
        return [
            self.what,
            ratios or "-",
            f"{self.value:.4g} {self.unit}",
            f"{self.time_us:.1f} us",
            targets,
            self.level,
            f"{self.error:.1e}",
            self.note,
        ]


def timed(run: Callable[[], object], repeat: int = 100) -> float:
    """Median microseconds with a cold L2, for kernels of a millisecond."""
    return 1000 * do_bench(run, warmup=25, rep=repeat, return_mode="median")  # type: ignore[operator]


def replayed(runs: list[Callable[[], object]]) -> float:
    """Median microseconds a call in a CUDA graph over several input sets, for short kernels."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for run in runs:
                run()
        times = []
        for _ in range(24):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return sorted(times[4:])[10] * 1000 / len(runs)


def peak(run: Callable[[], object]) -> float:
    """GiB that a call takes beyond what is held."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 error; NaN counts as infinite."""
    value = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    return value if value == value else float("inf")


def table(rows: list[Row]) -> str:
    """A Markdown table."""
    lines = [HEADER, ["---"] * len(HEADER), *(r.cells() for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
