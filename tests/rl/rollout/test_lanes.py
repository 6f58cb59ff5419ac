"""Which sample, turn and place each token of a step is logged at, whatever happens between the steps."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.engines.base import StepFrame
from rl.rollout.lanes import Lanes, PendingStep
from rl.rollout.steps import HEAD


@dataclass
class Truth:
    """What is to be logged, kept in the plainest way."""

    slots: dict[str, int] = field(default_factory=dict)
    turns: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)

    def rows(self, sessions: list[str]) -> list[tuple[int, int, int]]:
        found = []
        for session in sessions:
            if session in self.slots:
                found.append((self.slots[session], self.turns[session], self.places[session]))
                self.places[session] += 1
        return found


def rows_of(step: PendingStep | None) -> list[tuple[int, int, int]]:
    if step is None:
        return []
    payload = step.record().buffers[1][8:]
    count = int(np.frombuffer(payload, HEAD, 1)["rows"][0])
    assert count == step.count
    columns = np.frombuffer(payload, "<u4", 3 * count, HEAD.itemsize).reshape(3, count)
    return [(int(slot), int(turn), int(place)) for slot, turn, place in columns.T]


def frame(sessions: list[str], turns: list[int]) -> StepFrame:
    count = len(sessions)
    return StepFrame(sessions, turns, np.zeros(count, np.int32), np.zeros(count, np.float32), 0)


def change(rng: random.Random, lanes: Lanes, truth: Truth, running: list[str], number: int) -> None:
    """A session begins, ends, takes another's place or its next turn; some are not logged at all."""
    kind = rng.choice(["open", "close", "swap", "turn", "other", "order"])
    if kind == "open" or not running:
        name, start = f"s{number}", rng.randrange(3)
        truth.slots[name], truth.turns[name], truth.places[name] = number, 0, start
        lanes.open(name, number, start)
        running.append(name)
    elif kind == "other":
        running.append(f"other{number}")
    elif kind == "order":
        rng.shuffle(running)
    else:
        place = rng.randrange(len(running))
        session = running[place]
        if session not in truth.slots:
            running.pop(place)
        elif kind == "turn":
            lanes.end_turn(session, truth.turns[session], truth.places[session])
            assert lanes.logged_turns(session)[truth.turns[session]] == truth.places[session]
            lanes.begin_turn(session)
            truth.turns[session], truth.places[session] = truth.turns[session] + 1, 0
        else:
            assert lanes.close(session) == truth.slots.pop(session)
            if kind == "swap":
                name = f"s{number}"
                truth.slots[name], truth.turns[name], truth.places[name] = number, 0, 0
                lanes.open(name, number)
                running[place] = name
            elif rng.random() < 0.7:  # otherwise the engine still samples it
                running.pop(place)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 5, 90]), st.booleans())
def test_every_token_gets_its_sample_turn_and_place(seed: int, sessions: int, twins: bool) -> None:
    rng, lanes, truth = random.Random(seed), Lanes(), Truth()
    running: list[str] = []
    number = 0
    while number < sessions:
        change(rng, lanes, truth, running, number)
        number += 1
    steps: list[PendingStep | None] = []
    expected: list[list[tuple[int, int, int]]] = []
    names, turns = list(running), [truth.turns.get(session, 0) for session in running]
    for _ in range(25):
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            change(rng, lanes, truth, running, number)
            number += 1
        now = running + (rng.choices(running, k=2) if twins and running and rng.random() < 0.3 else [])
        turns_now = [truth.turns.get(session, 0) for session in now]
        if now != names or turns_now != turns or rng.random() < 0.2:
            names, turns = now, turns_now
        steps.append(lanes.step(frame(names, turns)))
        expected.append(truth.rows(names))
    assert [rows_of(step) for step in steps] == expected  # made only now: nothing of a step changes later


@pytest.mark.parametrize("changed", [1, 64, 65, 200])
def test_steps_go_on_when_few_or_many_sessions_change_places(changed: int) -> None:
    lanes, truth = Lanes(), Truth()
    running = [f"s{i}" for i in range(200)]
    for i, session in enumerate(running):
        lanes.open(session, i)
        truth.slots[session], truth.turns[session], truth.places[session] = i, 0, 0
    turns = [0] * 200
    for _ in range(3):
        assert rows_of(lanes.step(frame(running, turns))) == truth.rows(running)
        running = running[:changed][::-1] + running[changed:]
