"""An agent program that works inside its sample's sandbox, from which it reaches the model and nothing else.

    temper train experiment=calc env.name=examples/inside.py scaffold=external sandbox.backend=bubblewrap

What the model writes runs beside the program, in the sandbox. With `where="host"` the same program runs on
this machine, and so does what the model writes.
"""

import random
from pathlib import Path

from envs import Task, env
from envs.agents import ProcessAgent, result_of
from envs.calc import demonstrations as calculations
from envs.calc import factors


@env("examples/inside", splits=("train", "eval"))
def products(split, seed):
    pairs = list(factors(split))
    random.Random(f"inside/{split}/{seed}").shuffle(pairs)
    for a, b in pairs:
        yield Task.ask(f"inside/{a}*{b}", f"{a}*{b}=", gold=str(a * b))


FOLDER = str(Path(__file__).parent / "inside")
products.agent(ProcessAgent(["python3", "program.py"], cwd=FOLDER, where="sandbox"))


@products.reward
def right(task, trajectory):
    return float(result_of(trajectory) == task.gold)


@products.demonstrations
def demonstrations(split, seed):
    yield from calculations(split, seed)
