"""The price of tokens ties length to effort: a tabular policy, trained by a run's rewards and advantages.

The table knows what the policy of `experiment=effort` has to find out (the effort, how often it asked, the
lead of one bit), so the lengths it learns are those that the rewards ask for.
"""

from itertools import islice

import numpy as np
import pytest

import envs.registry
from envs.probe import QUESTIONS, optimum, reading
from envs.types import Score
from rewards.length import LengthPenaltyConfig, apply
from rl.algorithms.advantages.registry import ADVANTAGES
from rl.launch.compose import load_config
from rl.rollout.efforts import Efforts

GROUP, STEPS, TASKS, RATE = 8, 700, 8, 4.0
CENTRED = ADVANTAGES.load("mean_centered")


class Table:
    """Logits of asking again by (what is known of the effort, questions asked, lead); answers by majority."""

    def __init__(self, rows: int) -> None:
        self.ask = np.full((rows, QUESTIONS + 1, QUESTIONS + 1), 0.5)

    def asks(self, row: int, leads: list[int]) -> np.ndarray:
        """The probability of asking again after each number of questions, for one task's leads."""
        logits = self.ask[row, np.arange(QUESTIONS), np.abs(leads[:-1])]
        return 1 / (1 + np.exp(-logits))


def leads_of(task) -> list[int]:
    signs = [1 if reading(task, i) == "+" else -1 for i in range(QUESTIONS)]
    return [0, *np.cumsum(signs).tolist()]


def group(table, row, task, effort, penalty, draw, step) -> tuple[list[int], np.ndarray]:
    """Samples a group and returns how much each member asked, and the advantages."""
    leads, gold = leads_of(task), task.gold == "+"
    asks = table.asks(row, leads)
    asked = [int(np.argmax(np.append(draw.random(QUESTIONS) >= asks, True))) for _ in range(GROUP)]
    signs = [leads[k] > 0 if leads[k] else draw.random() < 0.5 for k in asked]
    scored = apply(
        penalty,
        [Score(float(sign == gold)) for sign in signs],
        effort=effort,
        tokens=[3 * k + 3 for k in asked],
        truncated=[False] * GROUP,
        step=step,
    )
    rewards = [score.value for score in scored if isinstance(score, Score)]
    return asked, np.asarray(CENTRED(np.array(rewards)))


def update(table, row, task, asked, advantages, scale) -> None:
    leads = leads_of(task)
    asks = table.asks(row, leads)
    for k, advantage in zip(asked, advantages, strict=True):
        for n in range(min(k + 1, QUESTIONS)):
            table.ask[row, n, abs(leads[n])] += scale * advantage * (float(n < k) - asks[n])


def learn(penalty: LengthPenaltyConfig, efforts: Efforts, rows: dict[int, int]) -> Table:
    table, draw = Table(len(set(rows.values()))), np.random.default_rng(0)
    stream = envs.registry.load("probe").tasks("train", 0)
    for step in range(STEPS):
        for index, task in enumerate(islice(stream, TASKS)):
            for effort in efforts.of_task(step * TASKS + index):
                row = rows[effort]
                asked, advantages = group(table, row, task, effort, penalty, draw, step)
                update(table, row, task, asked, advantages, RATE / (GROUP * TASKS))
    return table


def greedy(table: Table, row: int, count: int = 1000) -> tuple[float, float]:
    """Mean questions and accuracy of the greedy policy on held-out tasks."""
    asked, right = [], []
    for task in islice(envs.registry.load("probe").tasks("eval", 1), count):
        leads = leads_of(task)
        k = int(np.argmax(np.append(table.asks(row, leads) < 0.5, True)))
        asked.append(k)
        right.append(0.5 if leads[k] == 0 else float((leads[k] > 0) == (task.gold == "+")))
    return float(np.mean(asked)), float(np.mean(right))


@pytest.mark.slow
def test_rewards_and_advantages_order_lengths_by_effort_only_when_it_is_known() -> None:
    effort = load_config(["experiment=effort"]).effort
    penalty, levels = effort.length_penalty, effort.levels
    assert penalty is not None
    efforts = Efforts.of(levels)
    shown = learn(penalty, efforts, {b: row for row, b in enumerate(levels)})
    found = {b: greedy(shown, row) for row, b in enumerate(levels)}
    questions = {b: asked for b, (asked, _) in found.items()}
    assert questions[1] < questions[50] < questions[100]
    assert 3 * questions[100] + 3 >= 2 * (3 * questions[1] + 3)
    assert found[100][1] - found[1][1] >= 0.08
    regrets = []
    for b, (asked, accuracy) in found.items():
        best = optimum(lambda tokens, b=b: penalty.penalty(b, tokens), question_tokens=3, answer_tokens=3)
        regrets.append(best.reward - (accuracy + penalty.penalty(b, round(3 * asked + 3))))
    assert sum(regrets) / len(regrets) <= 0.08
    hidden = learn(penalty, efforts, dict.fromkeys(levels, 0))
    assert len({greedy(hidden, 0) for _ in levels}) == 1
