"""Rewards that compare the answer with a task's reference: exactly, normalised, or as a number.

They are coroutines because they cannot hang: no process of their own is worth its cost here.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from envs.killable import VerifierError
from envs.types import Task, Trajectory
from rewards.base import reference

_NUMBER = re.compile(r"[+-]?(\d{1,400}(\.\d{0,400})?|\.\d{1,400})([eE][+-]?\d{1,3})?(/\d{1,400})?")


async def exact(task: Task, trajectory: Trajectory) -> float:
    """Returns 1 when the answer is the reference, apart from surrounding white space; else 0."""
    return float(trajectory.answer.strip() == reference(task).strip())


async def normalized(task: Task, trajectory: Trajectory) -> float:
    """Returns 1 when answer and reference agree in `normal_form`; an empty answer never does."""
    wanted, answer = normal_form(reference(task)), normal_form(trajectory.answer)
    return float(bool(answer) and answer == wanted)


@dataclass(frozen=True, slots=True)
class Numeric:
    """1 when the answer is a number within the tolerances of the reference; by default exactly equal."""

    relative: float = 0.0
    absolute: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.relative + self.absolute) and min(self.relative, self.absolute) >= 0):
            raise ValueError(f"tolerances are 0 or more, not {self.relative} and {self.absolute}")

    async def __call__(self, task: Task, trajectory: Trajectory) -> float:
        """Judges one trajectory. Raises `VerifierError` when the reference is no number."""
        wanted = number(reference(task))
        if wanted is None:
            raise VerifierError(f"the reference of task {task.id!r} is no number: {reference(task)!r}")
        given = number(trajectory.answer)
        if given is None:
            return 0.0
        allowed = max(Fraction(self.absolute), Fraction(self.relative) * abs(wanted))
        return float(abs(given - wanted) <= allowed)


def normal_form(text: str) -> str:
    """Returns text in compatibility form, small letters, single spaces, without a final full stop."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(folded.split()).removesuffix(".").rstrip()


def number(text: str) -> Fraction | None:
    """Reads an integer, decimal, power-of-ten or simple fraction exactly; None when it is none of them."""
    text = text.strip().replace("−", "-")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    if not _NUMBER.fullmatch(text):
        return None
    head, _, divisor = text.partition("/")
    if divisor and int(divisor) == 0:
        return None
    return Fraction(head) / int(divisor or 1)
