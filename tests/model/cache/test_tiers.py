"""A shared folder of entries: bounded, ageing, and unharmed by broken files, other processes and kills."""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest

from model.cache.page_file import HEADER_BYTES, Entry, Kind
from model.cache.tiers import Address, FileTier, memory_backed

SIZE = 1000 - HEADER_BYTES


class Clock:
    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def address(name):
    key = hashlib.sha256(str(name).encode()).digest()
    return Address(Kind.PAGE, key, key.hex()[:2])


def entry(name, size=SIZE):
    return Entry(str(name).encode().ljust(size, b"."), 0)


def tier(folder, clock=time.time, **changes):
    options = {"max_bytes": 10_000, "ttl_s": 100.0, "durable": True, "family": "f", "version": 0} | changes
    return FileTier(folder, clock=clock, **options)


def put(tier, *names):
    return tier.put([(address(name), entry(name)) for name in names])


def there(tier, names):
    return [name for name in names if tier.has(address(name))]


def size_of(folder):
    return sum(path.stat().st_size for path in folder.glob("v1/**/*.*"))


def test_entries_come_back_here_and_in_another_process_of_the_folder(tmp_path):
    ours, theirs = tier(tmp_path), tier(tmp_path)
    assert put(ours, 1, 2) == 2
    assert theirs.get(address(1)) == entry(1) and theirs.get(address(3)) is None
    assert ours.nbytes == theirs.nbytes == size_of(tmp_path) == 2000
    assert put(theirs, 2) == 1 and ours.nbytes == 2000


def test_the_least_recently_used_go_first_and_the_budget_holds(tmp_path, clock):
    store = tier(tmp_path, clock)
    for name in range(10):
        clock.now += 1
        assert put(store, name) == 1
    clock.now += 1
    store.get(address(0))
    clock.now += 1
    put(store, 10)
    assert there(store, range(11)) == [0, *range(3, 11)]
    assert store.counters.evicted == 2 and store.nbytes == size_of(tmp_path) == 9000


def test_of_entries_used_at_once_the_deeper_goes_first(tmp_path, clock):
    store = tier(tmp_path, clock)
    put(store, *range(8))
    clock.now += 1
    put(store, 8, 9, 10)
    assert there(store, range(11)) == [0, 1, 2, 3, 4, 5, 8, 9, 10]


def test_more_than_the_budget_at_once(tmp_path):
    store = tier(tmp_path)
    assert put(store, *range(100)) == 100
    assert store.nbytes == size_of(tmp_path) <= 10_000 and len(there(store, range(100))) >= 7
    assert store.put([(address("big"), entry("big", 9_900))]) == 0 and store.counters.refused == 1


def test_entries_expire_after_their_last_use(tmp_path, clock):
    store = tier(tmp_path, clock)
    put(store, 1, 2)
    clock.now += 60
    assert store.get(address(1)) is not None
    clock.now += 60
    assert there(store, [1, 2]) == [1] and store.get(address(2)) is None
    assert store.counters.expired == 1 and store.nbytes == 1000
    clock.now += 60
    put(store, 3)
    assert store.nbytes == size_of(tmp_path) == 1000 and store.counters.expired == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "grow"])
def test_a_broken_file_is_dropped_and_counted(tmp_path, damage):
    store = tier(tmp_path)
    put(store, 1, 2)
    (path,) = tmp_path.glob(f"v1/f/0/*/{address(1).name}")
    data = path.read_bytes()
    flipped = data[:500] + bytes([data[500] ^ 64]) + data[501:]
    path.write_bytes({"flip": flipped, "cut": data[:-1], "empty": b"", "grow": data + b"x"}[damage])
    assert store.get(address(1)) is None and not path.exists()
    assert store.get(address(2)) == entry(2)
    assert (store.counters.corrupt, store.counters.foreign) == (1, 0)
    store.sweep()
    assert store.nbytes == 1000


def test_a_foreign_file_is_dropped_and_counted(tmp_path):
    store = tier(tmp_path)
    put(store, 1, 2, 3)
    one, two = (next(tmp_path.glob(f"v1/f/0/*/{address(name).name}")) for name in (1, 2))
    one.write_bytes(two.read_bytes())
    two.write_bytes(b"#!/bin/sh\n" * 100)
    assert store.get(address(1)) is None and store.get(address(2)) is None
    assert store.counters.foreign == 2 and store.get(address(3)) is not None


def test_versions_and_families_do_not_meet_and_old_versions_are_collected(tmp_path):
    store, other = tier(tmp_path), tier(tmp_path, family="g")
    put(store, 1, 2)
    put(other, 1)
    store.move_to(3)
    assert there(store, [1, 2]) == [] and store.counters.outdated == 2
    assert there(other, [1]) == [1] and store.nbytes == size_of(tmp_path) == 1000
    put(store, 1)
    later = tier(tmp_path, version=4)
    assert there(later, [1]) == [] and there(store, [1]) == [1]


def test_a_full_file_system_refuses_entries_and_nothing_else(tmp_path, monkeypatch):
    store = tier(tmp_path)
    put(store, 1)

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert put(store, 2, 3) == 0
    assert store.counters.refused == 2 and store.nbytes == size_of(tmp_path) == 1000
    assert put(store, 2, 3) == 2 and there(store, range(4)) == [1, 2, 3]


def test_left_over_temporary_files_go(tmp_path):
    store = tier(tmp_path)
    put(store, 1)
    (folder,) = tmp_path.glob("v1/f/0/*")
    (folder / "0123.tmp").write_bytes(b"half an ent")
    tier(tmp_path)
    assert (folder / "0123.tmp").exists(), "someone may be writing it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.cache.tiers.time.time", lambda real=time.time: real() + 7200)
        tier(tmp_path, ttl_s=1e6)
    assert not (folder / "0123.tmp").exists() and store.nbytes == 1000


_WRITER = """
import sys
sys.path.insert(0, "tests/model/cache")
from pathlib import Path
from test_tiers import address, entry, tier
store, names = tier(Path(sys.argv[1]), max_bytes=200_000, durable=False), int(sys.argv[2])
print("ready", flush=True)
while True:
    names += 1
    store.put([(address((names * 7 + i) % 3000), entry((names * 7 + i) % 3000)) for i in range(7)])
    store.get(address(names % 3000))
"""


def test_processes_killed_while_they_write_leave_whole_entries_and_a_held_budget(memory_folder):
    for round_ in range(2):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITER, str(memory_folder), str(1000 * i + round_)],
                stdout=subprocess.PIPE,
            )
            for i in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(0.6)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.communicate()
        store = tier(memory_folder, max_bytes=200_000, durable=False)
        held = there(store, range(3000))
        assert len(held) > 50
        assert all(store.get(address(name)) == entry(name) for name in held)
        assert store.counters.corrupt == store.counters.foreign == 0
        assert (
            store.nbytes == sum(path.stat().st_size for path in memory_folder.glob("v1/**/*.page")) <= 200_000
        )


def test_memory_is_told_from_disk(tmp_path, memory_folder):
    assert memory_backed(memory_folder / "not" / "yet") and not memory_backed(tmp_path)


def test_senseless_limits_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs bytes and a lifetime"):
        tier(tmp_path, max_bytes=0)
