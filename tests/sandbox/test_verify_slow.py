"""Every canary on every tier of this machine, and the gate of tasks, sound and unsound."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import sandbox_canaries
from benchmarks.sandbox_canary_cases import CANARIES
from benchmarks.sandbox_canary_task import CANARY, STUB, exercise
from sandbox.client import Fleet
from sandbox.verify import Exercise, gate
from sandbox.verify.flags import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_kind_of_flag_has_a_canary() -> None:
    assert {canary.flag for canary in CANARIES} == set(KINDS)
    assert len({canary.name for canary in CANARIES}) == len(CANARIES)


def test_every_canary_is_scored_0_and_flagged(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(sandbox_canaries.run(backend, "")), capsys.readouterr().out
    count = len(CANARIES)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"canaries scored 0: {count}/{count} flagged: {count}/{count}"


@pytest.fixture
async def light(state_dir: Path):
    async with await Fleet.connect(state_dir=state_dir, owner="gate", backend="bubblewrap") as fleet:
        yield fleet


@pytest.mark.parametrize("kind", ["functions", "unittest", "pytest"])
async def test_the_gate_lets_a_sound_task_through(light: Fleet, kind: str) -> None:
    report = await gate(light, exercise(kind))
    assert report.passed, str(report)
    assert {"no-op", "gold", "empty"} <= set(report.reports)
    assert sum(name.startswith("cheat ") for name in report.reports) == 5


async def test_the_gate_names_what_is_wrong(light: Fleet) -> None:
    task = exercise("functions")
    wrong_gold = await gate(light, replace(task, gold={"solution.py": STUB.encode()}))
    assert set(wrong_gold.wrong) == {"gold"}
    solved = replace(task.plan, base={**task.plan.base, **task.gold})
    assert "no-op" in (await gate(light, Exercise(solved, task.gold))).wrong
    leaking = replace(task.plan, base={**task.plan.base, "notes.txt": CANARY.encode()})
    report = await gate(light, Exercise(leaking, task.gold))
    assert set(report.wrong) == {"gold", "leak"}
    assert "notes.txt" in str(report)
