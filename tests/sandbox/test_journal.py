"""The journal's file: what is written is read again, what a crash tears is cut off, damage is an error."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.errors import InfrastructureError, JournalError, JournalMismatchError, RefusedError
from sandbox.journal import BUDGET, Journal
from sandbox.journal_file import START, VERSION, encode, scan, version_of
from sandbox.outcome import Outcome
from sandbox.recovery import replay
from sandbox.types import ExecResult

GOLDEN = Path(__file__).parents[1] / "data/journals"
HEAD = {"sandbox": "a-1", "owner": "me"}
COMMAND = {
    "op": "exec",
    "argv": ["/bin/sh", "-c", "make"],
    "env": {},
    "cwd": "/w",
    "timeout_s": 1,
    "limit": 9,
}
RESULT = Outcome(ExecResult(3, b"out", b"error", truncated=True, oom=True, duration_s=0.5), b"more")


def filled(path: Path, commands: int = 3) -> Journal:
    journal = Journal.create(path, HEAD)
    for number in range(commands):
        seq = journal.intend({**COMMAND, "cwd": str(number)}, b"in", idempotent=number == 1)
        journal.finish(seq, RESULT)
    return journal


def test_commands_and_results_come_back(tmp_path: Path) -> None:
    filled(tmp_path / "j").close()
    journal = Journal.open(tmp_path / "j")
    assert (journal.head, journal.last, journal.generation, journal.torn) == (HEAD, 3, 1, 0)
    assert [journal.result(seq) for seq in (1, 2, 3)] == 3 * [RESULT]
    assert journal.command(2) == ({**COMMAND, "cwd": "1"}, b"in")
    assert [journal.entries[seq].idempotent for seq in (1, 2, 3)] == [False, True, False]
    journal.close()


def test_what_did_not_run_fails_again_in_the_same_way(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", 0)
    journal.fail(journal.intend(COMMAND, b"", idempotent=False), RefusedError("later", "busy"))
    journal.close()
    journal = Journal.open(tmp_path / "j")
    with pytest.raises(RefusedError, match="later") as caught:
        journal.result(1)
    assert caught.value.reason == "busy"
    journal.close()


def test_an_intent_without_result_stays_unknown(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", 1)
    journal.intend(COMMAND, b"", idempotent=True)
    journal.close()
    journal = Journal.open(tmp_path / "j")
    assert journal.entries[1].result and not journal.entries[2].result
    journal.rerun(2)
    journal.renew(1)
    journal.close()
    journal = Journal.open(tmp_path / "j")
    assert (journal.entries[2].runs, journal.generation, journal.last) == (2, 2, 2)
    journal.close()


def test_another_command_does_not_match(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", 1)
    same = {**COMMAND, "cwd": "0"}
    assert journal.match(1, {**same, "timeout_s": 77, "limit": 1}, b"in").result
    for command, body in (
        ({**same, "argv": ["ls"]}, b"in"),
        ({**same, "env": {"A": "b"}}, b"in"),
        (same, b""),
    ):
        with pytest.raises(JournalMismatchError, match=r"is not the one that ran \(exec make"):
            journal.match(1, command, body)
    with pytest.raises(JournalMismatchError, match="1 commands, not a command 2"):
        journal.match(2, same, b"in")
    journal.close()


def test_every_torn_tail_is_cut_off(tmp_path: Path) -> None:
    """Cut at every byte: what was whole before the cut is there, and the journal goes on from there."""
    filled(tmp_path / "j", 2).close()
    data = (tmp_path / "j").read_bytes()
    ends = [found.end for found in scan(tmp_path / "j")]
    for size in range(ends[0], len(data)):
        path = tmp_path / "cut"
        path.write_bytes(data[:size])
        journal = Journal.open(path)
        whole = sum(end <= size for end in ends)
        assert len(list(scan(path))) == whole
        assert path.stat().st_size == ends[whole - 1] == size - journal.torn
        finished = [seq for seq, entry in journal.entries.items() if entry.result]
        journal.finish(journal.intend(COMMAND, b"", idempotent=False), RESULT)
        journal.close()
        again = Journal.open(path)
        assert [seq for seq, entry in again.entries.items() if entry.result] == [*finished, again.last]
        again.close()


HALF = encode({"kind": "rerun", "seq": 1})[:30]


@pytest.mark.parametrize(
    "tail", [bytes(4000), encode({"kind": "rerun"})[:-1] + b"!", b"\0\0", HALF, HALF + bytes(4000)]
)
def test_a_tail_half_on_disk_is_torn(tmp_path: Path, tail: bytes) -> None:
    filled(tmp_path / "j").close()
    with (tmp_path / "j").open("ab") as file:
        file.write(tail)
    journal = Journal.open(tmp_path / "j")
    assert (journal.torn, journal.last) == (len(tail), 3)
    journal.close()


def test_damage_in_the_middle_is_an_error_and_stays(tmp_path: Path) -> None:
    filled(tmp_path / "j").close()
    good = (tmp_path / "j").read_bytes()
    second = list(scan(tmp_path / "j"))[1]
    for place in (second.offset + 8, second.offset + 20, second.end - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        (tmp_path / "j").write_bytes(bad)
        with pytest.raises(JournalError, match=f"damaged at byte {second.offset}"):
            Journal.open(tmp_path / "j")
        assert (tmp_path / "j").read_bytes() == bad


@pytest.mark.parametrize("place", range(8))
def test_a_length_that_lies_in_the_middle_loses_nothing(tmp_path: Path, place: int) -> None:
    """It says that the record goes on beyond the end of the file, as a torn one does; whole ones follow."""
    filled(tmp_path / "j").close()
    second = list(scan(tmp_path / "j"))[1]
    bad = bytearray((tmp_path / "j").read_bytes())
    bad[second.offset + place] ^= 0x40
    (tmp_path / "j").write_bytes(bad)
    with pytest.raises(JournalError, match=f"damaged at byte {second.offset}"):
        Journal.open(tmp_path / "j")
    assert (tmp_path / "j").read_bytes() == bad


@pytest.mark.parametrize(
    "record",
    [
        encode({"kind": "result", "seq": 99}), encode({"kind": "intent"}), encode({"no": 1}),
        encode({"kind": "generation"}), encode({"kind": "rerun", "seq": []}),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_an_error(tmp_path: Path, record: bytes) -> None:
    filled(tmp_path / "j").close()
    with (tmp_path / "j").open("ab") as file:
        file.write(record)
    with pytest.raises(JournalError, match="none of a journal"):
        Journal.open(tmp_path / "j")


def test_a_file_cut_under_an_open_journal_is_an_error(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j")
    for size in (journal.entries[3].result + 20, journal.entries[3].result + 5, START):
        os.truncate(tmp_path / "j", size)
        with pytest.raises(JournalError, match="has changed at byte"):
            journal.result(3)
    journal.close()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not a journal"),
        (b"GET / HTTP/1.1\r\n", "not a journal"),
        (b"TMPRJRNL" + struct.pack("!H", 99), "format 99"),
        (b"TMPRJRNL" + struct.pack("!H", 0), "format 0"),
    ],
)
def test_what_is_not_read(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(JournalError, match=why):
        Journal.open(tmp_path / "j")


def test_a_journal_without_its_start(tmp_path: Path) -> None:
    filled(tmp_path / "j", 0).close()
    os.truncate(tmp_path / "j", START)
    with pytest.raises(JournalError, match="whose it is"):
        Journal.open(tmp_path / "j")


def test_beyond_its_budget_it_keeps_hashes(tmp_path: Path) -> None:
    journal = filled(tmp_path / "j", 0)
    large = Outcome(ExecResult(0, bytes(BUDGET // 2), b""))
    for _ in range(3):
        journal.finish(journal.intend(COMMAND, bytes(BUDGET // 4), idempotent=False), large)
    assert (tmp_path / "j").stat().st_size < BUDGET
    assert journal.result(1) == large
    with pytest.raises(JournalError, match="hash of its output"):
        journal.result(2)
    with pytest.raises(JournalError, match="cannot be run again"):
        journal.command(3)
    assert isinstance(JournalError(""), InfrastructureError)
    assert journal.match(3, COMMAND, bytes(BUDGET // 4)).result
    journal.close()


@settings(max_examples=50, deadline=None)
@given(
    records=st.lists(st.tuples(st.dictionaries(st.text(), st.integers(), max_size=3), st.binary(max_size=40)))
)
def test_records_round_trip(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[dict[str, int], bytes]]
) -> None:
    path = tmp_path_factory.mktemp("j") / "j"
    Journal.create(path, HEAD).close()
    with path.open("ab") as file:
        for record, body in records:
            file.write(encode(record, body))
    assert [(found.record, found.body) for found in scan(path)][1:] == records


@pytest.mark.parametrize("version", [1, 2])
def test_journals_of_this_version_and_the_one_before_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "j"
    shutil.copy(GOLDEN / f"version_{version}.journal", path)
    journal = Journal.open(path)
    assert (journal.head["sandbox"], journal.head["owner"]) == ("ab12-34", "run-7")
    assert (journal.last, journal.generation, journal.torn) == (4, 2, 0)
    make = {"op": "exec", "argv": ["/bin/sh", "-c", "make"], "env": {"A": "b"}, "cwd": "/workspace"}
    journal.match(1, make, b"in\n")
    assert journal.result(1) == Outcome(ExecResult(0, b"built\n", b"warning\n", duration_s=0.25))
    with pytest.raises(RefusedError, match="1024 commands wait"):
        journal.result(2)
    assert journal.entries[3].runs == 2 and journal.result(3).result.timed_out
    assert not journal.entries[4].result and journal.command(4)[0]["argv"][2] == "git push"
    journal.finish(journal.intend(make, b"", idempotent=False), RESULT)
    journal.close()
    assert version_of(path.read_bytes(), path) == VERSION
    assert Journal.open(path).result(5) == RESULT


def test_what_a_full_disk_took_of_a_record_is_not_left_behind_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, pwrite = filled(tmp_path / "j"), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:4500], at))
    with pytest.raises(JournalError, match="cannot be written: the disk is full"):
        journal.intend(COMMAND, bytes(4000) + b"x" * 2000, idempotent=False)
    monkeypatch.undo()
    journal.fail(journal.intend(COMMAND, b"", idempotent=False), RefusedError("later", "busy"))
    journal.close()
    journal = Journal.open(tmp_path / "j")
    assert (journal.last, journal.torn) == (4, 0)
    journal.close()


async def test_processes_have_their_numbers_again_after_a_start_that_did_not_run(
    tmp_path: Path,
) -> None:
    journal = Journal.create(tmp_path / "j", HEAD)
    start = {**COMMAND, "op": "start"}
    journal.finish(journal.intend(start, b"", idempotent=False), RESULT)
    journal.fail(journal.intend(start, b"", idempotent=False), RefusedError("no room", "processes"))
    journal.intend(start, b"", idempotent=False)  # under way when the node was killed
    journal.finish(journal.intend(COMMAND, b"", idempotent=False), RESULT)
    journal.finish(journal.intend(start, b"", idempotent=False), RESULT)
    numbers: list[int] = []
    done: list[tuple[str, int]] = []

    async def run(command: dict[str, Any], body: bytes) -> Outcome:
        numbers.extend([1] * (command["op"] == "start"))
        done.append((command["op"], len(numbers)))
        return RESULT

    replayed = await replay(journal, run, 0, lambda count: numbers.extend([0] * count))
    assert done == [("start", 1), ("exec", 3), ("start", 4)] and replayed.commands == 3
    journal.close()
