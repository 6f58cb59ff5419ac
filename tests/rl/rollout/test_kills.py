import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from envs.types import Group, Score, TrajectoryKey, Turn
from rl.rollout import codec
from rl.rollout.wal import TokenLog
from tests.rl.rollout import killable_run

Tokens = tuple[tuple[int, ...], tuple[float, ...]]


def start(folder: Path, kind: str, steps: int) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rl.rollout.killable_run"])
    process = context.Process(target=killable_run.main, args=(str(folder), kind, steps), daemon=True)
    process.start()
    return process


def finish(folder: Path, kind: str, steps: int) -> list[Group]:
    process = start(folder, kind, steps)
    process.join(280)
    ended = process.exitcode
    process.kill()
    assert ended == 0
    assert (folder / "done").exists()
    state = json.loads((folder / "checkpoint.json").read_text())
    return [codec.group_from_json(group) for group in state["trained"]]


def progress(folder: Path) -> int:
    size = 0
    for path in (folder / "log").glob("*.wal"):
        with suppress(FileNotFoundError):  # compaction replaced it
            size += path.stat().st_size
    return size


def kill_after_progress(folder: Path, kind: str, steps: int, amount: int) -> bool:
    """Kills the run once its log has grown by `amount` bytes; returns False when it ended before."""
    process = start(folder, kind, steps)
    goal, deadline = progress(folder) + amount, time.monotonic() + 280
    while progress(folder) < goal and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)
    ended = not process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    return not ended


def logged(folder: Path, copy: Path) -> dict[TrajectoryKey, list[Tokens]]:
    """What a copy of the log holds of unfinished samples."""
    shutil.copytree(folder / "log", copy)
    log = TokenLog(copy)
    log.close()
    assert log.recovery.lost_tokens == 0
    return {
        sample.assignment.key: [
            (turn.token_ids, tuple(turn.tokens.logprobs.tolist())) for turn in sample.turns
        ]
        for sample in log.recovery.unfinished.values()
    }


def turns_by_key(groups: list[Group]) -> dict[TrajectoryKey, tuple[Turn, ...]]:
    return {t.key: t.turns for group in groups for t in group.trajectories}


def kill_and_compare(tmp_path: Path, kind: str, steps: int, kills: int, amounts: tuple[int, int]) -> int:
    """Returns how many kills struck a running process."""
    rng = random.Random(5)
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    calm = turns_by_key(finish(tmp_path / "calm", kind, steps))
    seen: list[dict[TrajectoryKey, list[Tokens]]] = []
    for number in range(kills):
        if not kill_after_progress(tmp_path / "killed", kind, steps, rng.randint(*amounts)):
            break
        seen.append(logged(tmp_path / "killed", tmp_path / f"copy{number}"))
    groups = finish(tmp_path / "killed", kind, steps)
    killed = turns_by_key(groups)
    assert len(killed) == len(calm) == steps * killable_run.PER_STEP * killable_run.SIZE
    assert len({group.id for group in groups}) == len(groups)
    assert all(isinstance(t.score, Score) for group in groups for t in group.trajectories)
    for key, turns in killed.items():
        if key in calm:
            assert [t.completion_ids for t in turns] == [t.completion_ids for t in calm[key]]
            assert [t.prompt_ids for t in turns] == [t.prompt_ids for t in calm[key]]
        for earlier in seen:
            for turn, (ids, logprobs) in zip(turns, earlier.get(key, []), strict=False):
                assert turn.completion_ids[: len(ids)] == ids
                assert turn.logprobs[: len(ids)] == logprobs
    return len(seen)


def test_a_killed_run_goes_on_without_losing_or_changing_a_sample(tmp_path: Path) -> None:
    assert kill_and_compare(tmp_path, "scripted", steps=4, kills=3, amounts=(2_000, 9_000)) >= 2


@pytest.mark.slow
def test_a_killed_run_of_the_real_engine_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    assert kill_and_compare(tmp_path, "native", steps=12, kills=10, amounts=(3_000, 30_000)) >= 6
