"""The trace finds what it is to find, in the shape that is asked for."""

import random

import pytest

from benchmarks.prefix import Session, Trace, print_trace


def test_pauses_reach_from_seconds_to_three_days_and_reading_is_thirty_times_writing():
    session = Session(random.Random(0), 100, [])
    pauses = [session.pause() for _ in range(5000)]
    assert min(pauses) < 3 and 60 * 3600 < max(pauses) <= 72 * 3600
    written = 0
    for _ in range(1000):
        session.read()
        written += len(session.write())
    assert len(session.history) / written == pytest.approx(30, rel=0.02)


def test_a_short_trace_finds_what_was_seen_before(memory_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.prefix._TURNS", (5, 8))
    trace = Trace(3, memory_folder, tmp_path / "disk")
    trace.open(host_bytes=1 << 20, window_bytes=1 << 18)
    lengths = trace.run(2)
    assert print_trace(trace, lengths, [store.stats() for store in trace.stores]) > 0.95
    counts = trace.counts
    assert counts["turns"] == counts["with windows"] + counts["without windows"] + 1
