"""What the token log costs while it is written, and how fast it is read back.

    python -m benchmarks.wal [--seconds 5] [--tokens 5000000] [--folder DIR]

Writing: `--concurrent` requests decode at `--rate` tokens a second in real time; overhead is the CPU time
per second that the log takes in the engine's thread and in its own, and the delay that a step sees. Reading:
a log of `--tokens` tokens, none of them consumed, is recovered, once with wide and once with narrow steps.
Speeds are per second of one core's CPU time, which a busy machine distorts least. The last line holds the
figures; the exit status is 1 when overhead is above 1 % or recovery below 100 MB/s.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from envs.types import Task, TrajectoryKey
from model.engine.sampler import SamplingParams
from rl.engines.base import StepFrame
from rl.rollout.assignment import Assignment
from rl.rollout.wal import TokenLog

MAX_OVERHEAD, MIN_RECOVERY = 0.01, 100.0


def begin(log: TokenLog, count: int) -> list[str]:
    """Starts `count` samples, each in its first turn; returns their sessions."""
    sessions: list[str] = []
    for group in range(count):
        key = TrajectoryKey("bench", 50, "tools", group, 0)
        task = Task.ask("bench", "47*86=", gold="4042")
        assignment = Assignment(key=key, task=task, environment="calc", sampling=SamplingParams(), seed=0)
        log.start(assignment)
        log.begin(assignment.session, 0, list(range(16)), new_branch=True)
        sessions.append(assignment.session)
    return sessions


def frame(sessions: list[str], rng: np.random.Generator) -> StepFrame:
    """One decode step of all sessions."""
    count = len(sessions)
    ids = rng.integers(0, 129_280, count, dtype=np.int32)
    return StepFrame(sessions, [0] * count, ids, -rng.random(count, dtype=np.float32), 3)


def paced(log: TokenLog, sessions: list[str], rate: float, seconds: float) -> tuple[float, np.ndarray]:
    """Decodes in real time; returns CPU seconds that the log takes a second, and each step's delay [steps].

    Before each step the thread is busy, as an engine's is, with the softmax of some logits.
    """
    step = frame(sessions, np.random.default_rng(0))
    logits = np.random.default_rng(1).random((len(sessions), 256), np.float32)
    period, steps = len(sessions) / rate, int(seconds * rate / len(sessions))
    delays = np.zeros(steps)
    in_steps, others, started = 0.0, time.process_time() - time.thread_time(), time.monotonic()
    for number in range(steps):
        time.sleep(max(0.0, started + number * period - time.monotonic()))
        np.exp(logits).sum(axis=1)
        cpu, before = time.thread_time(), time.perf_counter()
        log.on_step(step)
        delays[number] = time.perf_counter() - before
        in_steps += time.thread_time() - cpu
    others = time.process_time() - time.thread_time() - others
    return (in_steps + others) / (time.monotonic() - started), delays


def written(folder: Path, concurrent: int, tokens: int) -> tuple[int, float]:
    """Writes `tokens` tokens as fast as it goes; returns bytes and seconds of one core."""
    log = TokenLog(folder, flush_ms=50.0)
    step = frame(begin(log, concurrent), np.random.default_rng(0))
    started = time.process_time()
    for _ in range(tokens // concurrent):
        log.on_step(step)
    log.close()
    return int(log.stats()["bytes"]), time.process_time() - started


def recovered(folder: Path, tokens: int) -> float:
    """Recovers a log and returns the seconds of one core that took."""
    started = time.process_time()
    log = TokenLog(folder)
    elapsed = time.process_time() - started
    log.close()
    found = sum(len(turn.tokens) for s in log.recovery.unfinished.values() for turn in s.turns)
    assert found == tokens, f"{found} of {tokens} tokens came back"
    return elapsed


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=30_000)
    parser.add_argument("--concurrent", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=5_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="wal-"))
    overhead, p99 = measure_writing(folder / "paced", args.rate, args.concurrent, args.seconds)
    speeds: list[float] = []
    per_token = 0.0
    for concurrent in (args.concurrent, 32):
        part, count = folder / f"fast-{concurrent}", args.tokens // concurrent * concurrent
        size, seconds = written(part, concurrent, count)
        speeds.append(size / 1e6 / min(recovered(part, count) for _ in range(2)))
        per_token = size / count
        print(
            f"steps of {concurrent} tokens: {per_token:.1f} bytes/token, written at "
            f"{size / 1e6 / seconds:.0f} MB/s ({count / seconds / 1e6:.2f} M tokens/s), "
            f"recovered at {speeds[-1]:.0f} MB/s"
        )
        shutil.rmtree(part)
    print(
        f"wal overhead {overhead:.2%} of a core at {args.rate:.0f} tokens/s, p99 {p99 * 1e3:.2f} ms a step, "
        f"recovery {min(speeds):.0f} MB/s, {per_token:.1f} bytes/token"
    )
    return int(overhead > MAX_OVERHEAD or min(speeds) < MIN_RECOVERY)


def measure_writing(folder: Path, rate: float, concurrent: int, seconds: float) -> tuple[float, float]:
    """Returns the log's CPU overhead (share of a core) and the p99 delay of a step in seconds."""
    log = TokenLog(folder, flush_ms=50.0)
    overhead, delays = paced(log, begin(log, concurrent), rate, seconds)
    log.close()
    shutil.rmtree(folder)
    return overhead, float(np.quantile(delays, 0.99))


if __name__ == "__main__":
    raise SystemExit(main())
