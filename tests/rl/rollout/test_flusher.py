"""When the token log is written: nothing waits for longer than it may, and no more often than it must."""

import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.rollout.flusher import Flusher, Pace

LONGEST = 0.05


def simulate(
    arrivals: list[float], forced: list[float], until: float, steps: Sequence[float] = ()
) -> tuple[list[float], int, int]:
    """Appends, steps and flushes by others at these times; returns all waits, own flushes, and wakes."""
    pace = Pace(LONGEST, 0.0)
    waiting: list[float] = []
    waits: list[float] = []
    flushes = wakes = 0

    def take(now: float) -> None:
        pace.taken()
        waits.extend(now - since for since in waiting)
        waiting.clear()

    def rest(now: float) -> float:
        nonlocal flushes
        while (seconds := pace.sleep(now)) == 0.0:
            take(now)
            flushes += 1
        return now + seconds

    wakes_at = rest(0.0)
    events = {"append": arrivals, "step": steps, "take": forced}
    for now, kind in sorted((at, kind) for kind, times in events.items() for at in times):
        while wakes_at <= now:
            wakes_at = rest(wakes_at)
        if kind == "take":
            take(now)
            continue
        waiting.append(now)
        if pace.stepped(now) if kind == "step" else pace.appended(now):
            wakes += 1
            wakes_at = rest(now)
    while waiting or wakes_at < until:
        wakes_at = rest(wakes_at)
    return waits, flushes, wakes


times = st.lists(st.floats(0, 3), max_size=60)


@given(times, times, times)
def test_nothing_waits_for_longer_than_it_may(
    arrivals: list[float], forced: list[float], steps: list[float]
) -> None:
    waits, _, _ = simulate(arrivals, forced, 3.0, steps)
    assert len(waits) == len(arrivals) + len(steps)
    assert max(waits, default=0.0) <= LONGEST + 1e-9


@pytest.mark.parametrize(("period", "steps_a_flush"), [(1 / 30, 2), (0.1, 1), (0.005, 9)])
def test_steps_are_written_with_the_last_for_which_the_next_would_be_too_late(
    period: float, steps_a_flush: int
) -> None:
    count = 600
    waits, flushes, wakes = simulate([], [], 0.0, [period * (n + 1) for n in range(count)])
    assert waits.count(0.0) == pytest.approx(flushes, abs=2)  # the newest is written as it comes
    assert max(waits[10:-10]) == pytest.approx((steps_a_flush - 1) * period, abs=period / 2)
    assert flushes == pytest.approx(count / steps_a_flush, rel=0.02) and wakes <= flushes + 2


@pytest.mark.parametrize(("period", "steps_a_flush"), [(1 / 30, 2), (0.1, 1)])
def test_steps_that_fit_in_the_time_are_written_at_once(period: float, steps_a_flush: int) -> None:
    count = 600
    waits, flushes, wakes = simulate([period * (n + 1) for n in range(count)], [], count * period)
    assert max(waits) <= LONGEST + 1e-9
    assert flushes == pytest.approx(count / steps_a_flush, rel=0.02)
    assert wakes <= 2


@given(st.floats(0.001, 0.2), st.floats(0, 0.2))
def test_a_timer_of_that_period_would_flush_as_often_or_more(period: float, first: float) -> None:
    until = first + 400 * period
    waits, flushes, wakes = simulate([first + period * n for n in range(400)], [], until)
    assert max(waits) <= LONGEST + 1e-9
    assert flushes <= until / LONGEST + 3
    assert wakes <= 0.3 * 400


def test_steps_that_come_a_little_early_or_late_wake_nobody() -> None:
    arrivals = [(n + 1) / 30 + (0.004 if n % 3 else -0.001) for n in range(600)]
    waits, flushes, wakes = simulate(arrivals, [], 20.0)
    assert max(waits) <= LONGEST + 1e-9
    assert (flushes, wakes) == (pytest.approx(300, rel=0.05), pytest.approx(0, abs=6))


def test_an_idle_log_sleeps_ever_longer_and_is_woken_in_time() -> None:
    waits, flushes, wakes = simulate([100.0], [], 100.0)
    assert (flushes, wakes) == (1, 1)
    assert waits[0] <= LONGEST + 1e-9


def test_the_thread_flushes_by_itself_and_ends_with_close_or_an_error() -> None:
    flushed = threading.Event()
    flusher = Flusher(flushed.set, 0.02, OSError)
    time.sleep(0.3)  # by now it sleeps for longer than it may take
    assert not flushed.is_set()
    flusher.appended()
    assert flushed.wait(5)
    flusher.close()
    assert not any(thread.name == "token-log" for thread in threading.enumerate())

    def fail() -> None:
        raise OSError("no space")

    flusher = Flusher(fail, 0.02, OSError)
    flusher.appended()
    flusher._thread.join(5)
    assert not flusher._thread.is_alive()
    flusher.close()
