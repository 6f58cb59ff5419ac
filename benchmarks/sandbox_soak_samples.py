"""What `sandbox_soak` looks at: samples of two processes and of the machine, their growth, and its bounds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.sandbox_traces import traces

_HOUR_S = 3600.0
_PATIENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What there is while no sandbox is wanted: of the node, of the client, and of what sandboxes leave."""

    at_s: float
    node_memory_mib: float
    client_memory_mib: float
    node_fds: float
    client_fds: float
    node_threads: float
    client_threads: float
    node_tasks: float
    client_tasks: float
    processes: float
    containers: float
    cgroups: float
    mounts: float
    sockets: float
    disk_mib: float


_WIDE = {"node_memory_mib": 8.0, "client_memory_mib": 8.0, "node_fds": 4.0, "client_fds": 4.0}
BOUNDS = {field.name: _WIDE.get(field.name, 2.0) for field in fields(Sample) if field.name != "at_s"}
"""How much the line through the second half of the samples may rise from its one end to the other."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The line through the second half of a figure: how much it rises in that half, and an hour."""

    name: str
    rise: float
    per_hour: float

    @property
    def holds(self) -> bool:
        """Whether it is within its bound."""
        return self.rise <= BOUNDS[self.name]


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Returns the growth of every figure, by least squares over the second half of the samples."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        raise ValueError(f"{len(samples)} samples are too few for a line: run longer")
    times = np.array([sample.at_s for sample in half])
    found: list[Growth] = []
    for name in BOUNDS:
        slope = float(np.polyfit(times - times[0], [getattr(sample, name) for sample in half], 1)[0])
        found.append(Growth(name, slope * float(times[-1] - times[0]), slope * _HOUR_S))
    return found


class Sampler:
    """Takes samples of a node that `sandbox_soak --node` runs, and of this process."""

    def __init__(self, state_dir: Path, node_pid: int, docker: Any):
        self._state_dir, self._docker = state_dir, docker
        self._node, self._client = psutil.Process(node_pid), psutil.Process()
        self._start = time.monotonic()
        self.samples: list[Sample] = []

    async def take(self) -> Sample:
        """Takes a sample once sandboxes that have been deleted are gone, or should be."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            there = await asyncio.to_thread(traces, self._state_dir, [self._node.pid], (), self._docker)
            if not there.live().total or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        tasks = await self._node_tasks()
        sample = Sample(
            time.monotonic() - self._start, _mib(self._node), _mib(self._client), self._node.num_fds(),
            self._client.num_fds(), self._node.num_threads(), self._client.num_threads(), tasks,
            len(asyncio.all_tasks()), len(there.processes), len(there.containers), len(there.cgroups),
            len(there.mounts), len(there.sockets),
            _disk(self._state_dir),
        )  # fmt: skip
        self.samples.append(sample)
        return sample

    async def _node_tasks(self) -> float:
        path = self._state_dir / "observed"
        path.unlink(missing_ok=True)
        os.kill(self._node.pid, signal.SIGUSR1)
        while not path.exists():  # noqa: ASYNC110 (another process writes it)
            await asyncio.sleep(0.01)
        return float(path.read_text())

    def save(self, path: Path) -> None:
        """Writes the samples as JSON lines."""
        path.write_text("".join(json.dumps(asdict(sample)) + "\n" for sample in self.samples))


def _mib(process: psutil.Process) -> float:
    return process.memory_full_info().uss / (1 << 20)


def _disk(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total / (1 << 20)


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Draws all figures over time to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    groups = {
        "memory, MiB": ("node_memory_mib", "client_memory_mib"),
        "open files": ("node_fds", "client_fds"),
        "threads": ("node_threads", "client_threads"),
        "tasks": ("node_tasks", "client_tasks"),
        "of deleted sandboxes": ("processes", "containers", "cgroups", "mounts", "sockets"),
        "disk, MiB": ("disk_mib",),
    }
    figure = Figure(figsize=(12, 7), layout="constrained")
    minutes = [sample.at_s / 60 for sample in samples]
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, groups.items(), strict=True):
        axes.set(title=title, xlabel="minutes")
        for name in names:
            axes.plot(minutes, [getattr(sample, name) for sample in samples], label=name)
        axes.axvline(minutes[len(samples) // 2], color="grey", linestyle=":")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
