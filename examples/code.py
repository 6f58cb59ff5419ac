"""A coding environment: the policy writes a function, hidden tests judge it in a sandbox of their own.

The prompt shows two cases; others, and random ones by a checker, are hidden. `temper env check` proves the
tests with the gold answer, garbage and the usual cheats (give `--tasks 2`: each answer runs in a sandbox).
"""

import random

from envs import Task, env

PROBLEMS = {
    "evens": ("keeps the even numbers", "[x for x in numbers if x % 2 == 0]"),
    "doubled": ("doubles each number", "[2 * x for x in numbers]"),
    "backwards": ("reverses the order", "numbers[::-1]"),
    "distinct": ("keeps the first of equal numbers", "list(dict.fromkeys(numbers))"),
    "running": ("gives the running sums", "[sum(numbers[: i + 1]) for i in range(len(numbers))]"),
}
CHECKER = """
def test_random(call, draw):
    for _ in range(5):
        numbers = [draw.randint(-9, 9) for _ in range(draw.randint(0, 12))]
        assert call({name!r}, numbers) == {right}
"""


@env("examples/code", splits=("train", "eval"), reward="unit_tests")
def code(split, seed):
    draw = random.Random(f"code/{split}/{seed}")
    number = 0 if split == "train" else 1
    while True:
        name, (what, right) = draw.choice(list(PROBLEMS.items()))
        cases = [case(name, right, n, [draw.randint(-9, 9) for _ in range(6)]) for n in range(4)]
        shown = "\n".join(f"{name}({c['args'][0]}) == {c['expected']}" for c in cases[:2])
        tests = {
            "cases": [*cases, case(name, right, 4, [])],
            "visible": cases[:2],
            "checker": CHECKER.format(name=name, right=right),
            "checks": ["test_random"],
        }
        question = f"Write a Python function {name}(numbers) that {what}.\n{shown}"
        gold = f"def {name}(numbers):\n    return {right}"
        yield Task.ask(f"code/{split}/{seed}/{number}", question, gold=gold, tests=tests)
        number += 2


def case(name, right, number, numbers):
    expected = eval(right, {"numbers": numbers})
    return {"id": f"case {number}", "function": name, "args": [numbers], "expected": expected}
