"""The source of a new environment: the shortest one that is complete, as a file to edit."""

from __future__ import annotations

import keyword
import re

_TEMPLATE = '''\
"""The environment {name}. Try it: `temper env check {function}.py`."""

import random

from envs import Task, env


@env("{name}", splits=("train", "eval"))
def {function}(split, seed, highest=99):
    draw = random.Random(f"{name}/{{split}}/{{seed}}")
    while True:
        a, b = draw.randint(1, highest), draw.randint(1, highest)
        if ((a + b) % 8 == 0) == (split == "eval"):
            yield Task.ask(f"{function}/{{a}}+{{b}}", f"{{a}}+{{b}}=", gold=str(a + b))


@{function}.reward
def exact(task, trajectory):
    return float(trajectory.answer == task.gold)
'''


def init_template(name: str) -> str:
    """Returns the source of a new environment called `name`, as `add` or `team/add`.

    Raises:
        ValueError: The name has characters that a name of an environment cannot have.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_-]*(/[a-z][a-z0-9_-]*)*", name):
        raise ValueError(
            f"{name!r} is no name of an environment; use small letters, digits, - and _, and / between "
            "parts, as in 'team/add'"
        )
    function = name.rpartition("/")[2].replace("-", "_")
    if keyword.iskeyword(function) or function in ("env", "exact", "random"):
        function += "_"
    return _TEMPLATE.format(name=name, function=function)
