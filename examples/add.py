"""The shortest complete environment: one file. Check it: `temper env check examples/add.py`."""

import random

from envs import Task, env


@env("examples/add", splits=("train", "eval"))
def add(split, seed, highest=99):
    draw = random.Random(f"add/{split}/{seed}")
    while True:
        a, b = draw.randint(1, highest), draw.randint(1, highest)
        if ((a + b) % 8 == 0) == (split == "eval"):
            yield Task.ask(f"add/{a}+{b}", f"{a}+{b}=", gold=str(a + b))


@add.reward
def exact(task, trajectory):
    return float(trajectory.answer == task.gold)
