"""The bytes of the token log: older formats stay readable, nothing that was recorded is lost or invented."""

import random
import shutil
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.types import (
    FinishReason,
    Message,
    Packed,
    Replay,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.choices import SamplingMask
from model.engine.sampler import SamplingParams
from rl.engines.base import StepFrame
from rl.rollout.assignment import Assignment
from rl.rollout.extras import Extras
from rl.rollout.frames import HEADER_BYTES, Damage
from rl.rollout.segments import list_segments
from rl.rollout.state import LoggedSample, Recovery, SandboxPlace, Tokens
from rl.rollout.wal import TokenLog

GOLDEN = Path(__file__).parents[2] / "data" / "token_log"
TASK = Task("47*86", (Message(Role.USER, "47*86="),), {"product": 4042})
LAYERS, CHOSEN = 3, 2


def assignment(group: int) -> Assignment:
    key = TrajectoryKey("47*86", 50, "loop", group, 0, 0)
    return Assignment(key=key, task=TASK, environment="calc", sampling=SamplingParams(), seed=3)


def truth_of(slot: int, turn: int, place: int) -> dict[str, np.ndarray]:
    """All that is recorded of one token, as a function of where it is."""
    rng = np.random.default_rng([slot, turn, place])
    kept = np.sort(rng.choice(70_000 if place % 3 else 500, int(rng.integers(0, 6)), replace=False))
    return {
        "token": rng.integers(0, 129_280, dtype=np.int32),
        "logprob": np.float32(-rng.random()),
        "state": rng.integers(0, 3, dtype=np.uint8),
        "experts": rng.integers(-1, 300, (LAYERS, CHOSEN), dtype=np.int16),
        "kept": kept,
        "selection": rng.integers(-1, 1 << 20, 4, dtype=np.int32),
    }


def step(places: Sequence[tuple[Assignment, int, int]], version: int) -> StepFrame:
    """The step that samples these tokens: (sample, turn, place)."""
    found = [truth_of(a.key.group, turn, place) for a, turn, place in places]
    return StepFrame(
        [a.session for a, _, _ in places],
        [turn for _, turn, _ in places],
        np.array([item["token"] for item in found]),
        np.array([item["logprob"] for item in found]),
        version,
        np.array([item["state"] for item in found]),
        np.stack([item["experts"] for item in found]),
        SamplingMask.of_rows([item["kept"].tolist() for item in found]),
        {1: np.stack([item["selection"] for item in found])},
    )


def check_tokens(tokens: Tokens, slot: int, turn: int) -> None:
    """Everything that came back of a turn is what was recorded."""
    true = [truth_of(slot, turn, place) for place in range(len(tokens))]
    extras = tokens.extras
    assert tokens.token_ids.tolist() == [item["token"] for item in true]
    assert tokens.logprobs.tolist() == [item["logprob"] for item in true]
    if not true:
        return
    assert extras.states is not None and extras.experts is not None
    assert extras.states.tolist() == [item["state"] for item in true]
    assert np.array_equal(extras.experts, np.stack([item["experts"] for item in true]))
    assert extras.selections is not None
    assert np.array_equal(extras.selections[1], np.stack([item["selection"] for item in true]))
    counts, ids = extras.kept or (np.zeros(len(true)), np.zeros(0))
    assert counts.tolist() == [len(item["kept"]) for item in true]
    assert ids.tolist() == [number for item in true for number in item["kept"].tolist()]


def write(folder: Path, seed: int, **options: int) -> dict[int, list[int]]:
    """Writes six samples of three turns; returns how many tokens each turn of each has."""
    rng, log = random.Random(seed), TokenLog(folder, flush_ms=1e6, **options)
    samples = [assignment(group) for group in range(6)]
    lengths: dict[int, list[int]] = {group: [] for group in range(6)}
    for a in samples:
        log.start(a)
    for turn in range(3):
        for a in samples:
            log.begin(a.session, turn, [turn], new_branch=turn == 0)
            lengths[a.key.group].append(0)
        for version in range(rng.randrange(1, 7)):
            places = []
            for a in rng.choices(samples, k=rng.randrange(1, 9)):
                places.append((a, turn, lengths[a.key.group][-1]))
                lengths[a.key.group][-1] += 1
            log.on_step(step(places, version))
            log.flush()
        for a in samples:
            log.turn(a.session, turn, lengths[a.key.group][-1], FinishReason.STOP, ((turn, turn + 1),))
            log.result(a.session, turn, 0, Message(Role.TOOL, "ok"))
            log.place(a.session, SandboxPlace(a.session, 0, turn))
    log.close()
    return lengths


def reopen(folder: Path) -> Recovery:
    log = TokenLog(folder)
    log.close()
    return log.recovery


def check_whole(recovery: Recovery, lengths: dict[int, list[int]]) -> None:
    found = {sample.assignment.key.group: sample for sample in recovery.unfinished.values()}
    assert {sample.place and sample.place.position for sample in found.values()} == {2}
    assert {group: [len(turn.tokens) for turn in sample.turns] for group, sample in found.items()} == lengths
    check_prefixes(recovery)


def check_prefixes(recovery: Recovery) -> None:
    for sample in recovery.unfinished.values():
        for number, turn in enumerate(sample.turns):
            check_tokens(turn.tokens, sample.assignment.key.group, number)
            if turn.finish is not None:
                assert turn.replay_starts == ((number, number + 1),)


@pytest.mark.parametrize("options", [{}, {"segment_bytes": 4096}])
def test_all_that_was_recorded_comes_back_also_over_several_files(tmp_path: Path, options) -> None:
    lengths = write(tmp_path, 1, **options)
    check_whole(reopen(tmp_path), lengths)


def test_compaction_keeps_what_was_recorded(tmp_path: Path) -> None:
    lengths = write(tmp_path, 2, segment_bytes=4096)
    log = TokenLog(tmp_path)
    log.consumed([assignment(0).key, assignment(3).key])
    log.compact()
    log.compact()
    log.close()
    kept = {group: turns for group, turns in lengths.items() if group not in (0, 3)}
    check_whole(reopen(tmp_path), kept)


damages = st.lists(
    st.tuples(
        st.sampled_from(["flip", "zero", "cut", "repeat", "tear"]), st.floats(0, 1), st.integers(0, 200)
    ),
    min_size=1,
    max_size=4,
)


def damaged(data: bytes, kind: str, at: float, size: int) -> bytes:
    place = HEADER_BYTES + int(at * (len(data) - HEADER_BYTES))
    behind = data[place + size :]
    if kind == "flip":
        changed = bytearray(data)
        changed[min(place, len(data) - 1)] ^= 1 << (size % 8)
        return bytes(changed)
    if kind == "zero":
        return data[:place] + bytes(len(data[place : place + size])) + behind
    if kind == "cut":
        return data[:place] + behind
    return data[: place + size] + data[place:] if kind == "repeat" else data[:place]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), damages)
def test_damage_anywhere_costs_records_and_never_invents_any(
    tmp_path_factory: pytest.TempPathFactory, seed: int, harm: list[tuple[str, float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    lengths = write(folder, seed)
    (path,) = folder.glob("*.wal")
    before = data = path.read_bytes()
    for kind, at, size in harm:
        data = damaged(data, kind, at, size) if len(data) > HEADER_BYTES else data
    path.write_bytes(data)
    first = reopen(folder)
    check_prefixes(first)
    written = sum(map(sum, lengths.values()))
    back = sum(len(turn.tokens) for sample in first.unfinished.values() for turn in sample.turns)
    if all(kind != "repeat" for kind, _, _ in harm):
        assert first.tokens == back + first.lost_tokens <= written
    if data == before:
        check_whole(first, lengths)
    second = reopen(folder)
    assert (second.unfinished, second.damage.torn_bytes) == (first.unfinished, 0)
    assert second.lost_tokens == first.lost_tokens


def golden_samples() -> tuple[LoggedSample, Trajectory]:
    """What every golden file holds: a sample in its second turn, and a finished one."""
    a, b = assignment(0), assignment(1)
    turn = Turn(
        (5, 6, 7), (21, 22), (-21 / 8, -22 / 8), (3, 4), FinishReason.STOP, Message("assistant", "4042"),
        replay_starts=((0, 1),),
    )  # fmt: skip
    ended = Trajectory(b.key, ((turn,),), Status.FINISHED, StopReason.ANSWER, Score(1.0, {"right": 1.0}))
    return LoggedSample(a, ()), ended


def golden_tokens(ids: list[int], versions: list[int]) -> Tokens:
    logprobs = np.array([-number / 8 for number in ids], np.float32)
    return Tokens(np.array(ids, np.int32), logprobs, np.array(versions, np.int32))


def write_golden(folder: Path) -> None:
    """Writes the golden file of this format; format 1 had the same without extras."""
    log = TokenLog(folder, flush_ms=1e6)
    a, b, c = (assignment(group) for group in range(3))

    def frame(samples: list[Assignment], ids: list[int], turn: int, version: int) -> StepFrame:
        logprobs = np.array([-number / 8 for number in ids], np.float32)
        experts = np.array(ids, np.int16)[:, None, None] + np.arange(6, dtype=np.int16).reshape(3, 2)
        return StepFrame(
            [sample.session for sample in samples],
            [turn] * len(ids),
            np.array(ids, np.int32),
            logprobs,
            version,
            np.array([number % 3 for number in ids], np.uint8),
            experts,
            SamplingMask.of_rows([[number, 70_000 + number] if number % 2 else [] for number in ids]),
            {2: np.array(ids, np.int32)[:, None] - np.arange(4, dtype=np.int32)},
        )

    for sample in (a, b, c):
        log.start(sample)
        log.begin(sample.session, 0, [5, 6, 7], new_branch=True)
    log.on_step(frame([a, b, c], [11, 21, 31], 0, 3))
    log.on_step(frame([a, b, a], [12, 22, 13], 0, 4))
    log.turn(a.session, 0, 3, FinishReason.STOP)
    log.result(a.session, 0, 0, Message(Role.TOOL, "4042", (), "call"))
    log.begin(a.session, 1, [8, 9], new_branch=False)
    log.on_step(frame([a], [14], 1, 4))
    log.end(b.session, golden_samples()[1])
    log.consumed([c.key])
    log.close()


def check_golden(folder: Path, number: int) -> None:
    recovery = reopen(folder)
    (sample,) = recovery.unfinished.values()
    assert list(recovery.finished.values()) == [golden_samples()[1]]
    assert sample.assignment == assignment(0)
    first, second = sample.turns
    assert (first.prompt_ids, second.prompt_ids) == ((5, 6, 7), (8, 9))
    assert (first.finish, second.finish) == (FinishReason.STOP, None)
    assert first.results == (Message(Role.TOOL, "4042", (), "call"),)
    for turn, ids, versions in ((first, [11, 12, 13], [3, 4, 4]), (second, [14], [4])):
        assert turn.token_ids == tuple(ids)
        assert turn.tokens.versions.tolist() == versions
        assert turn.tokens.logprobs.tolist() == [-number / 8 for number in ids]
        extras = turn.tokens.extras
        if number == 1:
            assert extras.same(Extras())
            continue
        assert extras.states is not None and extras.experts is not None and extras.selections is not None
        assert extras.states.tolist() == [number % 3 for number in ids]
        assert extras.experts[:, 1, 0].tolist() == [number + 2 for number in ids]
        assert extras.selections[2][:, 3].tolist() == [number - 3 for number in ids]
        assert extras.kept is not None
        assert extras.kept[0].tolist() == [2 * (number % 2) for number in ids]
        assert extras.kept[1].tolist() == [n + add for n in ids if n % 2 for add in (0, 70_000)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_format_so_far_is_read_and_rewritten_in_the_newest(tmp_path: Path, number: int) -> None:
    shutil.copy(GOLDEN / f"format{number}.wal", tmp_path / "00000000.wal")
    (segment,) = list_segments(tmp_path, Damage())
    assert segment.format == number
    check_golden(tmp_path, number)
    log = TokenLog(tmp_path)
    log.compact()
    log.close()
    assert {segment.format for segment in list_segments(tmp_path, Damage())} == {3}
    check_golden(tmp_path, number)


def test_the_format_is_written_byte_for_byte_as_it_was(tmp_path: Path) -> None:
    write_golden(tmp_path)
    assert (tmp_path / "00000000.wal").read_bytes() == (GOLDEN / "format3.wal").read_bytes()


def test_a_format_of_the_future_is_named_and_left_alone(tmp_path: Path) -> None:
    write_golden(tmp_path)
    data = bytearray((tmp_path / "00000000.wal").read_bytes())
    data[8] = 4
    data[20:24] = struct.pack("<I", zlib.crc32(data[:20]))
    (tmp_path / "00000000.wal").write_bytes(data)
    recovery = reopen(tmp_path)
    assert recovery.damage.unreadable_segments == ["00000000.wal has format 4; this version reads 1, 2 and 3"]
    assert (tmp_path / "00000000.wal").read_bytes() == data


def test_a_finished_sample_keeps_what_training_repeats(tmp_path: Path) -> None:
    a = assignment(0)
    experts = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    replay = Replay(
        0,
        Packed("i2", (4, 3, 2), experts.tobytes()),
        {1: Packed("i4", (4, 1), np.arange(4, dtype=np.int32).tobytes())},
        Packed("u4", (2,), np.array([1, 0], np.uint32).tobytes()),
        Packed("i4", (1,), np.array([7], np.int32).tobytes()),
        Packed("u1", (2,), bytes([0, 1])),
    )
    turn = Turn(
        (1, 2, 3), (7, 8), (-0.1, -0.25), (0, 1), FinishReason.STOP, Message("assistant"), replay=replay
    )
    whole = Trajectory(a.key, ((turn,),), Status.FINISHED, StopReason.ANSWER, Score(1.0))
    log = TokenLog(tmp_path)
    log.start(a)
    log.end(a.session, whole)
    log.close()
    assert list(reopen(tmp_path).finished.values()) == [whole]
    log = TokenLog(tmp_path)
    log.compact()
    log.close()
    assert list(reopen(tmp_path).finished.values()) == [whole]


def ended(a: Assignment, versions: list[list[int]]) -> Trajectory:
    """The result of a sample whose turns were logged as `truth_of` says, with experts of prompts too."""
    turns = []
    for number, sampled in enumerate(versions):
        length = len(sampled)
        true = [truth_of(a.key.group, number, place) for place in range(length)]
        experts = np.stack([np.full((LAYERS, CHOSEN), 9, np.int16), *(item["experts"] for item in true)])
        keys = np.stack([np.full(4, 8, np.int32), *(item["selection"] for item in true)])
        replay = Replay(
            number,
            Packed("i2", experts.shape, experts.tobytes()),
            {1: Packed("i4", keys.shape, keys.tobytes())},
        )
        ids = tuple(int(item["token"]) for item in true)
        logprobs = tuple(float(item["logprob"]) for item in true)
        turns.append(
            Turn(
                (1, 2), ids, logprobs, tuple(sampled), FinishReason.STOP, Message("assistant"), replay=replay
            )
        )
    return Trajectory(
        a.key, (tuple(turns[:2]), tuple(turns[2:])), Status.FINISHED, StopReason.ANSWER, Score(1.0)
    )


def test_a_finished_sample_takes_its_tokens_from_its_steps_and_still_comes_back_whole(
    tmp_path: Path,
) -> None:
    write(tmp_path, 3)
    log = TokenLog(tmp_path)
    samples = {sample.assignment.key.group: sample for sample in log.recovery.unfinished.values()}
    whole = [
        ended(assignment(group), [turn.tokens.versions.tolist() for turn in samples[group].turns])
        for group in (0, 1, 2)
    ]
    before = log.stats()["bytes"]
    for trajectory in whole:
        sample = samples[trajectory.key.group]
        log.resume(sample)
        log.end(sample.assignment.session, trajectory)
    log.flush()
    choices = sum(
        len(turn.replay.experts.data)
        for trajectory in whole
        for turn in trajectory.turns
        if turn.replay is not None and turn.replay.experts is not None
    )
    assert choices > 0 and log.stats()["bytes"] - before < 15_000
    log.consumed([whole[0].key])
    log.close()
    for _ in range(2):
        recovery = reopen(tmp_path)
        assert {t.key: t for t in recovery.finished.values()} == {t.key: t for t in whole[1:]}
        log = TokenLog(tmp_path)
        log.compact()
        log.close()


@pytest.mark.parametrize("compacted", [False, True])
def test_a_finished_sample_goes_on_from_a_step_that_was_lost(tmp_path: Path, compacted: bool) -> None:
    log, a = TokenLog(tmp_path, flush_ms=0), assignment(0)
    log.start(a)
    log.begin(a.session, 0, [1, 2], new_branch=True)
    log.on_step(step([(a, 0, 0)], 0))
    place = (tmp_path / "00000000.wal").stat().st_size
    log.on_step(step([(a, 0, 1)], 0))
    log.turn(a.session, 0, 2, FinishReason.STOP)
    whole = ended(a, [[0, 0]])
    log.end(a.session, whole)
    log.close()
    data = bytearray((tmp_path / "00000000.wal").read_bytes())
    data[place + 40] ^= 1
    (tmp_path / "00000000.wal").write_bytes(data)
    for _ in range(2):
        log = TokenLog(tmp_path)
        if compacted:
            log.compact()
        log.close()
        assert not log.recovery.finished
        (sample,) = log.recovery.unfinished.values()
        assert (sample.assignment, len(sample.turns), sample.turns[0].finish) == (a, 1, None)
        assert len(sample.turns[0].tokens) == 1
    log = TokenLog(tmp_path)
    log.resume(sample)
    log.on_step(step([(a, 0, 1)], 0))
    log.turn(a.session, 0, 2, FinishReason.STOP)
    log.close()
    (again,) = reopen(tmp_path).unfinished.values()
    assert again.turns[0].finish is FinishReason.STOP
    log = TokenLog(tmp_path)
    log.resume(again)
    log.end(a.session, whole)
    log.close()
    assert list(reopen(tmp_path).finished.values()) == [whole]
