"""What the token log costs while it is written, and how fast it is read back.

    python -m benchmarks.wal [--seconds 5] [--tokens 400000] [--folder DIR]

Writing: `--concurrent` requests decode at `--rate` tokens a second in real time, each token with the ids of
its experts (`--layers` x `--experts` numbers, 400 bytes). Each sample has `--length` tokens, the mean of
lengths with a median of 2,000 and a log-normal sigma of 1; samples are of all ages at first, and where one
ends another begins. A step comes with arrays that were just made, as an engine's do. A round is as long as a
file of the log takes to fill, so that it closes one. Overhead is the CPU time that the log takes for the
tokens of a second, in its calls and in its own thread, less what the same measures of the same steps say
without a log; rounds with and without one take turns. The delay is what a step sees; its share is that of the
time between two steps. Other rows leave out the experts, or add the keys that `--sources` layers selected,
or the ids that top-p left. Reading: logs of which nothing is consumed are recovered, with wide and narrow
steps, with and without experts. Speeds are per second of one core's CPU time; of several rounds the best
counts, which a busy machine distorts least: while other programs use the cores, each call finds its code and
data out of the caches. The last line holds the figures of logs with experts; the exit status is 1 when
overhead or the delay's share is above 1 %, or recovery below 100 MB/s.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from envs.types import FinishReason, Message, Score, Status, StopReason, Task, Trajectory, TrajectoryKey, Turn
from model.choices import SamplingMask
from model.engine.columns import ExpertIds
from model.engine.sampler import SamplingParams
from rl.engines.base import Completion, StepFrame
from rl.rollout.assignment import Assignment
from rl.rollout.recorded import replay_of
from rl.rollout.wal import TokenLog

MAX_OVERHEAD, MIN_RECOVERY = 0.01, 100.0
VOCABULARY = 129_280
CONSUMED = 32
"""Samples that a checkpoint lets the log forget together."""


@dataclass(frozen=True)
class Shape:
    """What a token carries beside id and log-probability."""

    experts: tuple[int, int] | None = None
    selections: tuple[int, int] | None = None
    kept: int = 0

    def frame(self, sessions: list[str], seed: int = 0) -> StepFrame:
        """One decode step of all sessions."""
        rng, count = np.random.default_rng(seed), len(sessions)
        experts = mask = None
        if self.experts:
            experts = rng.integers(0, 256, (count, *self.experts), dtype=np.int16)
        if self.kept:
            ids = torch.from_numpy(rng.integers(0, VOCABULARY, count * self.kept))
            mask = SamplingMask(ids, torch.arange(count + 1) * self.kept)
        selections = None
        if self.selections:
            sources, keys = self.selections
            selections = {i: rng.integers(0, 1 << 20, (count, keys), dtype=np.int32) for i in range(sources)}
        return StepFrame(
            sessions,
            [0] * count,
            rng.integers(0, VOCABULARY, count, dtype=np.int32),
            -rng.random(count, dtype=np.float32),
            3,
            np.zeros(count, np.uint8),
            experts,
            mask,
            selections,
        )


class NoLog:
    """Stands where a log would: what its calls take is what measuring takes."""

    def start(self, assignment: Assignment) -> None: ...  # noqa: D102
    def begin(self, session: str, turn: int, prompt_ids: list[int], *, new_branch: bool) -> None: ...  # noqa: D102
    def turn(self, session: str, turn: int, tokens: int, finish: FinishReason) -> None: ...  # noqa: D102
    def end(self, session: str, trajectory: Trajectory) -> None: ...  # noqa: D102
    def consumed(self, keys: list[TrajectoryKey]) -> None: ...  # noqa: D102
    def on_step(self, frame: StepFrame) -> None: ...  # noqa: D102
    def flush(self) -> None: ...  # noqa: D102

    def stats(self) -> dict[str, float]:
        """As of a log that nothing was written to."""
        return {"bytes": 0.0}


@dataclass
class Traffic:
    """Samples that run, end and start again in a log; `cpu` counts what the log's calls for that take."""

    log: TokenLog | NoLog
    count: int
    shape: Shape
    length: int
    started: int = 0
    steps: int = 0
    cpu: float = 0.0
    running: list[Assignment] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    ends_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended: list[TrajectoryKey] = []
        experts = None
        if self.shape.experts:
            experts = ExpertIds(0, np.zeros((15 + self.length, *self.shape.experts), np.int16))
        turn = Turn(
            tuple(range(16)),
            tuple(range(self.length)),
            (-0.5,) * self.length,
            (3,) * self.length,
            FinishReason.STOP,
            Message("assistant", "42"),
            replay=replay_of(Completion(expert_ids=experts, states=(0,) * self.length)),
        )
        self._branches = ((turn,),)

    def begin(self) -> None:
        """All samples begin now."""
        while self.started < self.count:
            self._add()

    def fill(self) -> None:
        """Samples begin one after the other until the first has all its tokens; ids alone are logged."""
        frame = Shape().frame([""] * self.count)
        for step in range(self.length):
            while self.started * self.length <= step * self.count and self.started < self.count:
                self._add()
            n, sessions = self.started, list(self.sessions)
            ids, logprobs = frame.token_ids[:n], frame.logprobs[:n]
            self.on_step(StepFrame(sessions, [0] * n, ids, logprobs, 3, np.zeros(n, np.uint8)))

    def on_step(self, frame: StepFrame) -> None:
        """One token for every sample."""
        self.log.on_step(frame)
        self.steps += 1

    def renew(self) -> bool:
        """Ends the samples that have all their tokens and begins others; returns whether there are any."""
        ended = [place for place, step in enumerate(self.ends_at) if step <= self.steps]
        for place in ended:
            self._end(place)
            self.running[place] = self._start()
            self.sessions[place] = self.running[place].session
            self.ends_at[place] = self.steps + self.length
        return bool(ended)

    def _add(self) -> None:
        self.running.append(self._start())
        self.sessions.append(self.running[-1].session)
        self.ends_at.append(self.steps + self.length)

    def _start(self) -> Assignment:
        key = TrajectoryKey("bench", 50, "tools", self.started, 0)
        self.started += 1
        task = Task.ask("bench", "47*86=", gold="4042")
        assignment = Assignment(key=key, task=task, environment="calc", sampling=SamplingParams(), seed=0)
        session, prompt = assignment.session, list(range(16))
        cpu = time.thread_time()
        self.log.start(assignment)
        self.log.begin(session, 0, prompt, new_branch=True)
        self.cpu += time.thread_time() - cpu
        return assignment

    def _end(self, place: int) -> None:
        ended = self.running[place]
        result = Trajectory(ended.key, self._branches, Status.FINISHED, StopReason.ANSWER, Score(1.0))
        session, cpu = self.sessions[place], time.thread_time()
        self.log.turn(session, 0, self.length, FinishReason.STOP)
        self.log.end(session, result)
        self._ended.append(ended.key)
        if len(self._ended) == CONSUMED:
            self.log.consumed(self._ended)
            self._ended = []
        self.cpu += time.thread_time() - cpu


@dataclass(frozen=True)
class Written:
    """CPU seconds a second in the log's calls and its thread, p99 delay of a step (s), bytes a token."""

    cpu: float
    p99: float
    bytes_a_token: float


def decoded(frame: StepFrame, logits: np.ndarray) -> StepFrame:
    """A step of an engine: a softmax, and what was sampled in new arrays, as engines hand it over."""
    np.exp(logits).sum(axis=1)
    return replace(
        frame,
        token_ids=frame.token_ids.astype(np.int32),
        logprobs=frame.logprobs.astype(np.float32),
        states=None if frame.states is None else frame.states.copy(),
        expert_ids=None if frame.expert_ids is None else frame.expert_ids.copy(),
        selections=frame.selections and {layer: keys.copy() for layer, keys in frame.selections.items()},
    )


def paced(log: TokenLog | NoLog, shape: Shape, args: argparse.Namespace) -> Written:
    """Decodes in real time."""
    traffic = Traffic(log, args.concurrent, shape, args.length)
    traffic.fill()
    log.flush()
    sessions, turns = list(traffic.sessions), [0] * args.concurrent
    frames = [shape.frame(sessions, seed) for seed in range(8)]
    logits = np.random.default_rng(1).random((args.concurrent, 256), np.float32)
    period, steps = args.concurrent / args.rate, int(args.seconds * args.rate / args.concurrent)
    delays, calls, traffic.cpu = np.zeros(steps), 0.0, 0.0
    size, others, begun = log.stats()["bytes"], time.process_time() - time.thread_time(), time.monotonic()
    for number in range(steps):
        time.sleep(max(0.0, begun + number * period - time.monotonic()))
        if traffic.renew():
            sessions, turns = list(traffic.sessions), [0] * args.concurrent
        frame = decoded(replace(frames[number % len(frames)], sessions=sessions, turns=turns), logits)
        cpu, before = time.thread_time(), time.perf_counter()
        traffic.on_step(frame)
        delays[number] = time.perf_counter() - before
        calls += time.thread_time() - cpu
    cpu = time.thread_time()
    log.flush()
    calls += time.thread_time() - cpu
    others = time.process_time() - time.thread_time() - others
    size = log.stats()["bytes"] - size
    cpu = (calls + traffic.cpu + others) / (steps * period)
    return Written(cpu, float(np.quantile(delays, 0.99)), size / (steps * args.concurrent))


def written(folder: Path, shape: Shape, rounds: int, args: argparse.Namespace) -> Written:
    """The best of several rounds with a log, less the best without one: they take turns."""
    with_log, without = [], []
    for _ in range(rounds):
        without.append(paced(NoLog(), shape, args).cpu)
        log = TokenLog(folder, flush_ms=50.0)
        with_log.append(paced(log, shape, args))
        log.close()
        shutil.rmtree(folder)
    cpu = min(r.cpu for r in with_log) - min(without)
    return Written(cpu, min(r.p99 for r in with_log), with_log[0].bytes_a_token)


@contextmanager
def stored(folder: Path, concurrent: int, tokens: int, shape: Shape) -> Iterator[int]:
    """A log of `tokens` tokens, none consumed; yields its bytes."""
    log = TokenLog(folder, flush_ms=50.0)
    traffic = Traffic(log, concurrent, shape, 1)
    traffic.begin()
    frame = shape.frame(list(traffic.sessions))
    for _ in range(tokens // concurrent):
        log.on_step(frame)
    log.close()
    try:
        yield int(log.stats()["bytes"])
    finally:
        shutil.rmtree(folder)


def recovered(folder: Path, tokens: int) -> float:
    """Recovers a log and returns the seconds of one core that took."""
    started = time.process_time()
    log = TokenLog(folder)
    elapsed = time.process_time() - started
    log.close()
    found = sum(len(turn.tokens) for s in log.recovery.unfinished.values() for turn in s.turns)
    assert found == tokens, f"{found} of {tokens} tokens came back"
    return elapsed


def measure_writing(folder: Path, args: argparse.Namespace) -> Written:
    """Prints a row for each shape; returns the first, which is gated."""
    experts = (args.layers, args.experts)
    kinds = {
        "experts": Shape(experts),
        "ids only": Shape(),
        "experts and selections": Shape(experts, (args.sources, 64)),
        "experts and top-p": Shape(experts, kept=32),
    }
    rows: dict[str, Written] = {}
    for name, shape in kinds.items():
        rows[name] = row = written(folder / "paced", shape, 4 if name == "experts" else 1, args)
        print(
            f"written, {name:22s} {row.cpu:7.2%} of a core ({row.cpu * 1e3:.2f} CPU ms a second), "
            f"p99 {row.p99 * 1e3:.3f} ms a step ({share(row, args):.2%}), {row.bytes_a_token:.0f} bytes/token"
        )
    return rows["experts"]


def share(row: Written, args: argparse.Namespace) -> float:
    """The p99 delay as a part of the time between two steps."""
    return row.p99 * args.rate / args.concurrent


def measure_reading(folder: Path, args: argparse.Namespace) -> float:
    """Prints a row for each kind of log; returns the lower speed of those with experts, in MB/s."""
    speeds: list[float] = []
    for name, shape, factor in (
        ("experts", Shape((args.layers, args.experts)), 1),
        ("ids only", Shape(), 10),
    ):
        for concurrent in (args.concurrent, 32):
            count = factor * args.tokens // concurrent * concurrent
            with stored(folder / "stored", concurrent, count, shape) as size:
                seconds = min(recovered(folder / "stored", count) for _ in range(3))
            speeds.append(size / 1e6 / seconds)
            print(
                f"recovered, {name:9s} steps of {concurrent:4d}: {speeds[-1]:6.0f} MB/s "
                f"({count / seconds / 1e6:.2f} M tokens/s)"
            )
    return min(speeds[:2])


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=30_000)
    parser.add_argument("--concurrent", type=int, default=1000)
    parser.add_argument("--length", type=int, default=3300)
    parser.add_argument("--layers", type=int, default=25)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="wal-"))
    row = measure_writing(folder, args)
    speed = measure_reading(folder, args)
    print(
        f"wal overhead {row.cpu:.2%} of a core at {args.rate:.0f} tokens/s, "
        f"p99 {row.p99 * 1e3:.2f} ms a step ({share(row, args):.2%}), recovery {speed:.0f} MB/s, "
        f"{row.bytes_a_token:.0f} bytes/token"
    )
    return int(max(row.cpu, share(row, args)) > MAX_OVERHEAD or speed < MIN_RECOVERY)


if __name__ == "__main__":
    raise SystemExit(main())
