"""What the token log costs while it is written, and how fast it is read back.

    python -m benchmarks.wal [--seconds 2] [--tokens 400000] [--folder DIR]

Writing: `--concurrent` requests decode at `--rate` tokens a second in real time, each token with the ids of
its experts (`--layers` x `--experts` numbers, 400 bytes). Samples end and others take their places, so that
one has `--length` tokens in the mean: that of lengths with a median of 2,000 and a log-normal sigma of 1.
Overhead is the CPU time that the log takes a second, in the thread of the engine and in its own: what it adds
to the same steps without a log. The delay is what a step sees. Other rows leave out the experts, or add the
keys that `--sources` layers selected, or the ids that top-p left. Reading: logs of which nothing is consumed
are recovered, with wide and narrow steps, with and without experts. Speeds are per second of one core's CPU
time; of several rounds the best counts, which a busy machine distorts least. The last line holds the figures
of logs with experts; the exit status is 1 when overhead is above 1 % or recovery below 100 MB/s.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Shape:
    """What a token carries beside id and log-probability."""

    experts: tuple[int, int] | None = None
    selections: tuple[int, int] | None = None
    kept: int = 0

    def frame(self, sessions: list[str]) -> StepFrame:
        """One decode step of all sessions."""
        rng, count = np.random.default_rng(0), len(sessions)
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


@dataclass
class Traffic:
    """Samples that run, end and start again in a log."""

    log: TokenLog
    count: int
    shape: Shape
    length: int
    started: int = 0
    cpu: float = 0.0
    running: list[Assignment] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(self.count):
            self.running.append(self._start())
        self.sessions = [assignment.session for assignment in self.running]
        turn = Turn(
            tuple(range(16)),
            tuple(range(self.length)),
            (-0.5,) * self.length,
            (3,) * self.length,
            FinishReason.STOP,
            Message("assistant", "42"),
            replay=replay_of(Completion(expert_ids=self._experts())),
        )
        self._branches = ((turn,),)

    def _experts(self) -> ExpertIds | None:
        shape = self.shape.experts
        """The prompt's: those of sampled tokens stay in their steps."""
        return ExpertIds(0, np.zeros((16, *shape), np.int16)) if shape else None

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

    def replace(self, place: int) -> None:
        """One sample ends, another takes its place; `cpu` counts what the log's calls take."""
        ended = self.running[place]
        result = Trajectory(ended.key, self._branches, Status.FINISHED, StopReason.ANSWER, Score(1.0))
        session, cpu = self.sessions[place], time.thread_time()
        self.log.turn(session, 0, self.length, FinishReason.STOP)
        self.log.end(session, result)
        self.log.consumed([ended.key])
        self.cpu += time.thread_time() - cpu
        self.running[place] = self._start()
        self.sessions[place] = self.running[place].session


@dataclass(frozen=True)
class Written:
    """CPU seconds that a log takes a second, the p99 delay of a step in seconds, bytes a token."""

    overhead: float
    p99: float
    bytes_a_token: float


def paced(folder: Path, shape: Shape, args: argparse.Namespace) -> Written:
    """Decodes in real time; before each step the thread is busy with a softmax, as an engine's is."""
    log = TokenLog(folder, flush_ms=50.0)
    traffic = Traffic(log, args.concurrent, shape, args.length)
    log.flush()
    frame = shape.frame(list(traffic.sessions))
    logits = np.random.default_rng(1).random((args.concurrent, 256), np.float32)
    period, steps = args.concurrent / args.rate, int(args.seconds * args.rate / args.concurrent)
    delays, calls, ends, traffic.cpu = np.zeros(steps), 0.0, 0.0, 0.0
    size, others, begun = log.stats()["bytes"], time.process_time() - time.thread_time(), time.monotonic()
    for number in range(steps):
        time.sleep(max(0.0, begun + number * period - time.monotonic()))
        np.exp(logits).sum(axis=1)
        ends += args.concurrent / args.length
        while ends >= 1:
            traffic.replace(int(number * 97 + ends) % args.concurrent)
            ends -= 1
        frame = StepFrame(list(traffic.sessions), *(getattr(frame, name) for name in _COLUMNS))
        cpu, before = time.thread_time(), time.perf_counter()
        log.on_step(frame)
        delays[number] = time.perf_counter() - before
        calls += time.thread_time() - cpu
    log.flush()
    others = time.process_time() - time.thread_time() - others
    seconds, size = time.monotonic() - begun, log.stats()["bytes"] - size
    log.close()
    shutil.rmtree(folder)
    return Written(
        (calls + traffic.cpu + others) / seconds,
        float(np.quantile(delays, 0.99)),
        size / (steps * args.concurrent),
    )


_COLUMNS = (
    "turns",
    "token_ids",
    "logprobs",
    "policy_version",
    "states",
    "expert_ids",
    "sampling_mask",
    "selections",
)


@contextmanager
def stored(folder: Path, concurrent: int, tokens: int, shape: Shape) -> Iterator[int]:
    """A log of `tokens` tokens, none consumed; yields its bytes."""
    log = TokenLog(folder, flush_ms=50.0)
    traffic = Traffic(log, concurrent, shape, 1)
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
    """Prints a row for each shape; returns the best round of the first, which is gated."""
    experts = (args.layers, args.experts)
    kinds = {
        "experts": Shape(experts),
        "ids only": Shape(),
        "experts and selections": Shape(experts, (args.sources, 64)),
        "experts and top-p": Shape(experts, kept=32),
    }
    best: dict[str, Written] = {}
    for name, shape in kinds.items():
        rounds = [paced(folder / "paced", shape, args) for _ in range(6 if name == "experts" else 2)]
        best[name] = min(rounds, key=lambda r: r.overhead)
        row = best[name]
        print(
            f"written, {name:22s} {row.overhead:7.2%} of a core ({row.overhead * 1e3:.2f} CPU ms a second), "
            f"p99 {row.p99 * 1e3:.3f} ms a step, {row.bytes_a_token:.0f} bytes/token"
        )
    return best["experts"]


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
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="wal-"))
    written = measure_writing(folder, args)
    speed = measure_reading(folder, args)
    print(
        f"wal overhead {written.overhead:.2%} of a core at {args.rate:.0f} tokens/s, "
        f"p99 {written.p99 * 1e3:.2f} ms a step, recovery {speed:.0f} MB/s, "
        f"{written.bytes_a_token:.0f} bytes/token"
    )
    return int(written.overhead > MAX_OVERHEAD or speed < MIN_RECOVERY)


if __name__ == "__main__":
    raise SystemExit(main())
