import os
import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.types import (
    FinishReason,
    Message,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.engine.sampler import SamplingParams
from rl.engines.base import StepFrame
from rl.rollout.assignment import Assignment
from rl.rollout.frames import HEADER_BYTES
from rl.rollout.state import LoggedSample, Recovery
from rl.rollout.wal import TokenLog, TokenLogError

TASK = Task("47*86", (Message(Role.USER, "47*86="),), {"product": 4042})


def assignment(group: int, index: int = 0, attempt: int = 0) -> Assignment:
    key = TrajectoryKey("47*86", 50, "loop", group, index, attempt)
    return Assignment(key=key, task=TASK, environment="calc", sampling=SamplingParams(), seed=3)


def frame(sessions: list[str], tokens: list[int], turn: int = 0, version: int = 0) -> StepFrame:
    logprobs = np.array([-token / 7 for token in tokens], np.float32)
    return StepFrame(sessions, [turn] * len(tokens), np.array(tokens, np.int32), logprobs, version)


def result(a: Assignment, tokens: tuple[int, ...] = (1, 2)) -> Trajectory:
    turn = Turn(
        (9,), tokens, (-0.5,) * len(tokens), (0,) * len(tokens), FinishReason.STOP, Message("assistant")
    )
    return Trajectory(a.key, ((turn,),), Status.FINISHED, StopReason.ANSWER, Score(1.0))


def reopen(folder: Path) -> Recovery:
    log = TokenLog(folder)
    log.close()
    return log.recovery


def only(recovery: Recovery) -> LoggedSample:
    (sample,) = recovery.unfinished.values()
    return sample


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.wal"))


def test_a_partial_turn_comes_back_with_ids_logprobs_and_versions(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path), assignment(0)
    log.start(a)
    log.begin(a.session, 0, [5, 6, 7], new_branch=True)
    log.on_step(frame([a.session], [11], version=3))
    log.on_step(frame(["eval/other", a.session], [99, 12], version=4))
    log.close()
    (turn,) = only(reopen(tmp_path)).turns
    assert only(reopen(tmp_path)).assignment == a
    assert (turn.prompt_ids, turn.new_branch, turn.finish) == ((5, 6, 7), True, None)
    assert (turn.token_ids, turn.completion(3).policy_versions) == ((11, 12), (3, 4))
    assert turn.completion(3).logprobs == tuple(float(np.float32(-t / 7)) for t in (11, 12))


def test_several_turns_with_tool_results_come_back(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path), assignment(0)
    log.start(a)
    for turn in range(3):
        log.begin(a.session, turn, [turn], new_branch=turn == 0)
        for token in range(turn + 2):
            log.on_step(frame([a.session], [token], turn))
        if turn < 2:
            log.turn(a.session, turn, turn + 2, FinishReason.STOP)
            log.result(a.session, turn, 0, Message(Role.TOOL, f"obs {turn}"))
    log.close()
    turns = only(reopen(tmp_path)).turns
    assert [turn.token_ids for turn in turns] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    assert [turn.finish for turn in turns] == [FinishReason.STOP, FinishReason.STOP, None]
    assert [[m.content for m in turn.results] for turn in turns] == [["obs 0"], ["obs 1"], []]


def test_several_tokens_of_a_turn_in_one_step_keep_their_order(tmp_path: Path) -> None:
    log, a, b = TokenLog(tmp_path), assignment(0), assignment(1)
    for each in (a, b):
        log.start(each)
        log.begin(each.session, 0, [1], new_branch=True)
    log.on_step(frame([a.session, b.session, a.session, a.session], [1, 50, 2, 3]))
    log.on_step(frame([b.session, a.session], [51, 4]))
    log.close()
    found = {s.assignment.key.group: s.turns[0].token_ids for s in reopen(tmp_path).unfinished.values()}
    assert found == {0: (1, 2, 3, 4), 1: (50, 51)}


def test_a_finished_sample_comes_back_until_it_is_consumed(tmp_path: Path) -> None:
    log, a, b = TokenLog(tmp_path), assignment(0), assignment(1)
    for each in (a, b):
        log.start(each)
        log.end(each.session, result(each))
    log.consumed([b.key, assignment(77).key])
    log.close()
    assert list(reopen(tmp_path).finished.values()) == [result(a)]
    log = TokenLog(tmp_path)
    log.consumed([a.key])
    log.close()
    assert reopen(tmp_path).finished == {}


def test_tokens_count_when_flushed_and_flush_zero_writes_every_step(tmp_path: Path) -> None:
    for name, flush_ms, expected in (("late", 1e6, ()), ("zero", 0.0, (11,)), ("soon", 20.0, (11,))):
        log, a = TokenLog(tmp_path / name, flush_ms=flush_ms), assignment(0)
        log.start(a)
        log.begin(a.session, 0, [1], new_branch=True)
        log.flush()
        flushes = log.stats()["flushes"]
        log.on_step(frame([a.session], [11]))
        while name == "soon" and log.stats()["flushes"] == flushes:
            time.sleep(0.001)
        (tmp_path / f"{name}-copy").mkdir()
        for path in segments(tmp_path / name):
            (tmp_path / f"{name}-copy" / path.name).write_bytes(path.read_bytes())
        assert only(reopen(tmp_path / f"{name}-copy")).turns[0].token_ids == expected
        log.close()


def test_going_on_after_recovery_appends_to_the_same_turn(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path), assignment(0)
    log.start(a)
    log.begin(a.session, 0, [1], new_branch=True)
    log.on_step(frame([a.session], [11]))
    log.close()
    log = TokenLog(tmp_path)
    log.resume(only(log.recovery))
    log.on_step(frame([a.session], [12], version=1))
    log.turn(a.session, 0, 2, FinishReason.STOP)
    log.close()
    (turn,) = only(reopen(tmp_path)).turns
    assert (turn.token_ids, turn.completion(3).policy_versions, turn.finish) == (
        (11, 12),
        (0, 1),
        FinishReason.STOP,
    )


def test_what_a_resume_did_not_keep_is_void(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path), assignment(0)
    log.start(a)
    for turn in range(2):
        log.begin(a.session, turn, [1], new_branch=False)
        log.on_step(frame([a.session], [11], turn))
        log.on_step(frame([a.session], [12], turn))
        log.turn(a.session, turn, 2, FinishReason.STOP)
    log.close()
    log = TokenLog(tmp_path)
    sample = only(log.recovery)
    first = sample.turns[0]
    kept = LoggedSample(a, (replace(first, tokens=first.tokens[:1], finish=None),))
    log.resume(kept)
    log.on_step(frame([a.session], [77], 0))
    log.close()
    (turn,) = only(reopen(tmp_path)).turns
    assert (turn.token_ids, turn.finish) == ((11, 77), None)


def test_slots_are_never_used_again(tmp_path: Path) -> None:
    for group in range(4):
        log, a = TokenLog(tmp_path), assignment(group)
        log.start(a)
        log.begin(a.session, 0, [1], new_branch=True)
        log.on_step(frame([a.session], [group]))
        if group % 2:
            log.consumed([a.key])
        log.close()
    found = {s.assignment.key.group: s.turns[0].token_ids for s in reopen(tmp_path).unfinished.values()}
    assert found == {0: (0,), 2: (2,)}


def test_compaction_keeps_what_is_needed_and_nothing_else(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, segment_bytes=8192)
    all_ = [assignment(group) for group in range(40)]
    for a in all_:
        log.start(a)
        log.begin(a.session, 0, [1], new_branch=True)
    for token in range(200):
        log.on_step(frame([a.session for a in all_], [token] * 40))
        log.flush()
    for a in all_[:30]:
        log.end(a.session, result(a))
    log.consumed([a.key for a in all_[:20]])
    before = log.stats()["disk_bytes"]
    assert len(segments(tmp_path)) > 3
    assert log.wants_compaction
    log.compact()
    assert log.stats()["disk_bytes"] < before / 3
    assert not log.wants_compaction
    log.on_step(frame([all_[35].session], [200]))
    log.close()
    recovery = reopen(tmp_path)
    assert sorted(t.key.group for t in recovery.finished.values()) == list(range(20, 30))
    lengths = {s.assignment.key.group: len(s.turns[0].token_ids) for s in recovery.unfinished.values()}
    assert lengths == {group: 201 if group == 35 else 200 for group in range(30, 40)}
    assert len(segments(tmp_path)) <= 4


def test_a_sample_that_ends_while_compaction_begins_is_lost_by_no_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TokenLog(tmp_path / "log", flush_ms=1e6)
    a = assignment(0)
    log.start(a)
    log.begin(a.session, 0, [1], new_branch=True)
    log.on_step(frame([a.session], [7]))
    fsync, ended = os.fsync, list[int]()

    def slow(handle: int) -> None:
        if not ended:
            ended.append(handle)
            log.end(a.session, result(a))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", slow)
    log.compact()
    monkeypatch.undo()
    shutil.copytree(tmp_path / "log", tmp_path / "killed")
    assert only(reopen(tmp_path / "killed")).turns[0].token_ids == (7,)
    log.close()
    assert len(reopen(tmp_path / "log").finished) == 1


def test_a_crash_in_the_middle_of_compaction_leaves_old_or_new(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, segment_bytes=4096)
    a = assignment(0)
    log.start(a)
    log.begin(a.session, 0, [1], new_branch=True)
    for token in range(500):
        log.on_step(frame([a.session], [token]))
        log.flush()
    log.close()
    old = {path: path.read_bytes() for path in segments(tmp_path)}
    log = TokenLog(tmp_path)
    log.compact()
    log.close()
    for path, data in list(old.items())[:-1]:  # renamed, but the old files not yet removed
        path.write_bytes(data)
    (tmp_path / "00000099.partial").write_bytes(b"half")
    recovery = reopen(tmp_path)
    assert only(recovery).turns[0].token_ids == tuple(range(500))
    assert not list(tmp_path.glob("*.partial"))


def _random_log(folder: Path, seed: int) -> dict[TrajectoryKey, list[list[int]]]:
    """Writes a log of several samples in turns; returns their true tokens."""
    rng = random.Random(seed)
    log = TokenLog(folder, flush_ms=1e6)
    all_ = [assignment(group) for group in range(6)]
    truth: dict[TrajectoryKey, list[list[int]]] = {a.key: [] for a in all_}
    for a in all_:
        log.start(a)
    for turn in range(3):
        for a in all_:
            log.begin(a.session, turn, [turn], new_branch=turn == 0)
            truth[a.key].append([])
        for _ in range(rng.randrange(1, 8)):
            chosen = [a for a in all_ if rng.random() < 0.7]
            tokens = [rng.randrange(1000) for _ in chosen]
            for a, token in zip(chosen, tokens, strict=True):
                truth[a.key][-1].append(token)
            log.on_step(frame([a.session for a in chosen], tokens, turn))
            log.flush()
        for a in all_:
            log.turn(a.session, turn, len(truth[a.key][-1]), FinishReason.STOP)
            log.result(a.session, turn, 0, Message(Role.TOOL, "ok"))
    log.end(all_[0].session, result(all_[0]))
    log.close()
    return truth


def _check_prefixes(recovery: Recovery, truth: dict[TrajectoryKey, list[list[int]]]) -> None:
    for sample in recovery.unfinished.values():
        true = truth[sample.assignment.key]
        for number, turn in enumerate(sample.turns):
            assert list(turn.token_ids) == true[number][: len(turn.token_ids)]
            if number < len(sample.turns) - 1:
                assert list(turn.token_ids) == true[number]
                assert turn.finish is FinishReason.STOP


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_a_torn_tail_costs_only_what_it_tore(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at: float
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    truth = _random_log(folder, seed)
    (path,) = segments(folder)
    cut = HEADER_BYTES + round(at * (path.stat().st_size - HEADER_BYTES))
    os.truncate(path, cut)
    first, size = reopen(folder), path.stat().st_size
    _check_prefixes(first, truth)
    assert size == cut - first.damage.torn_bytes
    second = reopen(folder)
    assert (second.unfinished, second.finished) == (first.unfinished, first.finished)
    assert second.damage.torn_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_flipped_bits_never_yield_a_wrong_token(
    tmp_path_factory: pytest.TempPathFactory, seed: int, places: list[float]
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    truth = _random_log(folder, seed)
    (path,) = segments(folder)
    data = bytearray(path.read_bytes())
    for place in places:
        at = HEADER_BYTES + int(place * (len(data) - HEADER_BYTES - 1))
        data[at] ^= 1 << (seed % 8)
    changed = bytes(data) != path.read_bytes()
    path.write_bytes(data)
    recovery = reopen(folder)
    _check_prefixes(recovery, truth)
    if changed:
        assert recovery.damage.damaged_bytes + recovery.damage.torn_bytes > 0
    assert reopen(folder).unfinished == recovery.unfinished


def test_a_lost_frame_is_counted_and_its_samples_go_on_from_there(tmp_path: Path) -> None:
    log, a, b = TokenLog(tmp_path, flush_ms=0), assignment(0), assignment(1)
    for each in (a, b):
        log.start(each)
        log.begin(each.session, 0, [1], new_branch=True)
    (path,) = segments(tmp_path)
    for token in range(10):
        if token == 4:
            damaged = path.stat().st_size + 30
        log.on_step(
            frame([a.session] if token == 4 else [a.session, b.session], [token] * (1 + (token != 4)))
        )
    log.close()
    data = bytearray(path.read_bytes())
    data[damaged] ^= 4
    path.write_bytes(data)
    recovery = reopen(tmp_path)
    lengths = {s.assignment.key.group: len(s.turns[0].token_ids) for s in recovery.unfinished.values()}
    assert lengths == {0: 4, 1: 9}
    assert (recovery.damage.places, recovery.lost_tokens) == (1, 5)


def test_rows_of_which_it_is_not_known_whether_they_count_are_not_used(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path), assignment(0)
    log.start(a)
    for turn in range(2):
        log.begin(a.session, turn, [1], new_branch=False)
        for token in (11, 12):
            log.on_step(frame([a.session], [token], turn))
        log.turn(a.session, turn, 2, FinishReason.STOP)
    log.close()
    log = TokenLog(tmp_path)
    sample = only(log.recovery)
    second = replace(sample.turns[1], tokens=sample.turns[1].tokens[:1], finish=None)
    log.resume(replace(sample, turns=(sample.turns[0], second)))
    log.flush()
    path = segments(tmp_path)[-1]
    damaged = path.stat().st_size - 1
    log.on_step(frame([a.session], [77], 1))
    log.close()
    data = bytearray(path.read_bytes())
    data[damaged] ^= 1
    path.write_bytes(data)
    turns = only(reopen(tmp_path)).turns
    assert [turn.token_ids for turn in turns] == [(11, 12), ()]


def test_a_segment_with_a_damaged_header_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    for group in range(2):
        log, a = TokenLog(tmp_path), assignment(group)
        log.start(a)
        log.close()
    data = bytearray(segments(tmp_path)[0].read_bytes())
    data[9] ^= 1
    segments(tmp_path)[0].write_bytes(data)
    recovery = reopen(tmp_path)
    assert only(recovery).assignment.key.group == 1
    assert "00000000.wal is damaged" in recovery.damage.unreadable_segments[0]


def test_engine_thread_and_event_loop_may_write_at_once(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, flush_ms=1.0, segment_bytes=20_000)
    running = [assignment(1000 + i) for i in range(8)]
    for a in running:
        log.start(a)
        log.begin(a.session, 0, [1], new_branch=True)

    def decode() -> None:
        for token in range(400):
            log.on_step(frame([a.session for a in running], [token] * 8))

    thread = threading.Thread(target=decode)
    thread.start()
    for group in range(100):
        a = assignment(group)
        log.start(a)
        log.flush()
        log.end(a.session, result(a))
        if group % 2:
            log.consumed([a.key])
        if group % 30 == 29:
            log.compact()
    thread.join()
    log.close()
    recovery = reopen(tmp_path)
    assert recovery.lost_tokens == 0
    assert {s.turns[0].token_ids for s in recovery.unfinished.values()} == {tuple(range(400))}
    assert len(recovery.unfinished) == 8
    assert sorted(t.key.group for t in recovery.finished.values()) == list(range(0, 100, 2))


def test_a_second_writer_is_refused_and_told_who_holds_the_log(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    with pytest.raises(TokenLogError, match=f"process {os.getpid()} still writes the token log"):
        TokenLog(tmp_path)
    log.close()
    reopen(tmp_path)


def test_a_step_that_cannot_be_logged_is_an_error_at_the_next_calls(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path, flush_ms=1e6), assignment(0)
    log.start(a)
    log.begin(a.session, 0, [1], new_branch=True)
    log.on_step(frame([a.session], [11]))
    log.on_step(replace(frame([a.session], [12]), turns=[-1]))
    with pytest.raises(TokenLogError, match="mend what the engine reports of a step"):
        log.turn(a.session, 0, 2, FinishReason.STOP)
    with pytest.raises(TokenLogError, match="mend what the engine reports"):
        log.on_step(frame([a.session], [13]))
    with pytest.raises(TokenLogError):
        log.close()


def test_tokens_of_a_step_belong_to_the_turn_that_runs_when_it_is_handed_over(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path, flush_ms=1e6), assignment(0)
    log.start(a)
    for turn in range(3):
        log.begin(a.session, turn, [turn], new_branch=turn == 0)
        for token in range(2):
            log.on_step(frame([a.session], [10 * turn + token], turn))
        log.turn(a.session, turn, 2, FinishReason.STOP)
    log.on_step(frame([a.session], [99], 3))
    log.end(a.session, result(a))
    log.on_step(frame([a.session], [100], 3))
    assert log.stats()["tokens"] == 7
    log.consumed([a.key])
    log.close()
    assert log.stats()["tokens"] == 7


def test_a_full_disk_is_an_error_at_the_next_call(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path, flush_ms=1e6), assignment(0)
    log._file.close()
    log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    log.start(a)
    with pytest.raises(TokenLogError, match=r"No space left.*free space"):
        log.flush()
    with pytest.raises(TokenLogError, match="free space"):
        log.begin(a.session, 0, [1], new_branch=True)
    with pytest.raises(TokenLogError):
        log.close()


def test_space_is_reserved_ahead_and_given_back_after_a_crash_too(tmp_path: Path) -> None:
    log, a = TokenLog(tmp_path, flush_ms=1e6), assignment(0)
    (path,) = segments(tmp_path)

    def unused() -> int:
        status = path.stat()
        return status.st_blocks * 512 - status.st_size

    log.start(a)
    log.flush()
    size = path.stat().st_size
    assert size == log.stats()["bytes"] + HEADER_BYTES  # the length is that of the records
    assert unused() > 15 << 20
    log._guard.close()  # as the end of the process does
    crashed = TokenLog(tmp_path)
    assert only(crashed.recovery).assignment == a
    assert crashed.recovery.damage.torn_bytes == 0
    assert (path.stat().st_size, unused() < 1 << 16) == (size, True)
    crashed.close()
    log._file.close()
    log._closed = True
    assert log._flusher is not None
    log._flusher.close()
    path = segments(tmp_path)[-1]
    assert unused() < 1 << 16
