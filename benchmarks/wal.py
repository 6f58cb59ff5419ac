"""What the token log costs while it is written, and how fast it is read back.

    python -m benchmarks.wal [--seconds 5] [--tokens 5000000] [--folder DIR]

Writing: `--concurrent` requests decode at `--rate` tokens a second in real time; overhead is the CPU time of
this process per second with the log, less the same loop without it, and the delay that a step sees. Reading:
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


def paced(log: TokenLog | None, sessions: list[str], rate: float, seconds: float) -> tuple[float, np.ndarray]:
    """Decodes in real time; returns CPU seconds a second of this process and each step's delay [steps]."""
    step = frame(sessions, np.random.default_rng(0))
    period = len(sessions) / rate
    delays: list[float] = []
    cpu, started = time.process_time(), time.monotonic()
    for number in range(int(seconds / period)):
        before = time.perf_counter()
        if log is not None:
            log.on_step(step)
        delays.append(time.perf_counter() - before)
        time.sleep(max(0.0, started + (number + 1) * period - time.monotonic()))
    elapsed = time.monotonic() - started
    return (time.process_time() - cpu) / elapsed, np.array(delays)


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
    names = [f"session-{number}" for number in range(concurrent)]
    bare, _ = paced(None, names, rate, seconds)
    log = TokenLog(folder, flush_ms=50.0)
    busy, delays = paced(log, begin(log, concurrent), rate, seconds)
    log.close()
    shutil.rmtree(folder)
    print(f"CPU a second: {busy:.4f} with the log, {bare:.4f} without")
    return busy - bare, float(np.quantile(delays, 0.99))


if __name__ == "__main__":
    raise SystemExit(main())
