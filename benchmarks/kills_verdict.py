"""What a run that was killed has to show: samples, tokens, order of tasks, accuracy."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rl.watch.jsonl import FILE_NAME, read_rows, series


@dataclass(slots=True)
class Tally:
    """What the kills came to. `tokens` are those sampled again, `interval` the most that ever waited."""

    kills: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    resumed: int = 0
    tokens: int = 0
    worst: int = 0
    over: int = 0
    interval: int = 0

    def died(self, regenerated: int, waited: int, deaths: int = 1) -> None:
        """Books the tokens of processes that have died since the last call."""
        self.tokens += regenerated
        self.worst = max(self.worst, regenerated)
        self.interval = max(self.interval, waited)
        self.over += regenerated > self.interval * max(deaths, 1)


def samples(run: Path, expected: int) -> tuple[int, int]:
    """Returns how many samples are missing from the record of all steps, and how many stand there twice."""
    keys: Counter[tuple[int, int]] = Counter()
    for file in run.glob("rollouts/step-*.jsonl"):
        for line in file.read_text().splitlines():
            group, index = json.loads(line)["trajectory"]["key"][3:5]
            keys[group, index] += 1
    return max(expected - len(keys), 0), sum(number - 1 for number in keys.values())


def retried(run: Path) -> int:
    """Returns how many attempts failed for infrastructure and were made again."""
    file = run / "rollouts" / "failed.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def order(run: Path) -> list[tuple[int, str, int]]:
    """Returns group, task and effort in the order of dispatch; a group that was announced again counts once.

    Raises:
        ValueError: A group had two tasks.
    """
    found: dict[int, tuple[int, str, int]] = {}
    for line in (run / "rollouts" / "dispatched.jsonl").read_text().splitlines():
        row = json.loads(line)
        entry = (row["group"], row["task"], row["effort"])
        if found.setdefault(row["group"], entry) != entry:
            raise ValueError(f"group {row['group']} had {found[row['group']]}, and then {entry}")
    return list(found.values())


def same_order(killed: Path, calm: Path, groups: int) -> bool:
    """Whether both dispatched the same tasks in the same order, as far as both came and at least `groups`."""
    first, second = order(killed), order(calm)
    common = min(len(first), len(second))
    return common >= groups and first[:common] == second[:common]


def accuracy(run: Path) -> float:
    """Returns the share of right answers, sampled, in the run's last evaluation."""
    return series(read_rows(run / FILE_NAME), "eval/calc/sampled/score.mean")[1][-1]
