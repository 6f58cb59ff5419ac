"""Two results side by side: paired by task, and refused when they are not of the same thing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.evals.plan import Identity
from rl.evals.report import FORMAT, RESULT
from rl.evals.rows import Cell
from rl.evals.statistics import Estimate, paired_difference


class CompareError(ValueError):
    """Results that cannot be compared: where they differ, and what can be done."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One cell in both results: `difference` is second - first over the tasks both have a score of."""

    cell: Cell
    first: float | None
    second: float | None
    difference: Estimate

    def __str__(self) -> str:
        gap = self.difference
        if not gap.n:
            return f"{self.cell}: no task has a score in both"
        word = "better" if gap.low > 0 else "worse" if gap.high < 0 else "no difference shown"
        return (
            f"{self.cell}: {_number(self.first)} to {_number(self.second)}, {gap.mean:+.3f} "
            f"[{gap.low:+.3f}, {gap.high:+.3f}] on {gap.n} tasks ({word})"
        )


def compare(first: Path, second: Path, *, force: bool) -> list[str]:
    """Returns the lines of a comparison; `force` compares also what differs, and says how.

    Raises:
        CompareError: A result cannot be read, is not complete, or the two differ in effort, scaffold, n,
            environment or sampling.
    """
    a, b = _cells(first), _cells(second)
    problems = _problems(a, b) + [
        f"{path} is not complete; go on with `temper eval {path}`"
        for path, cells in ((first, a), (second, b))
        if any(cell["n_done"] < cell["n"] for cell in cells.values())
    ]
    if problems and not force:
        raise CompareError(
            "\n".join(
                [
                    "these results are not of the same samples:",
                    *problems,
                    "compare them all the same with --force",
                ]
            )
        )
    shared = sorted(a.keys() & b.keys())
    if not shared and len(a) == len(b) == 1:
        pairs = [(next(iter(b)), next(iter(a.values())), next(iter(b.values())))]
    else:
        pairs = [(cell, a[cell], b[cell]) for cell in shared]
    if not pairs:
        raise CompareError(
            "these results have no environment, effort and scaffold in common; nothing can be paired"
        )
    names = [f"{label}: {_model(cells)}" for label, cells in (("first", a), ("second", b))]
    warned = [f"forced: {problem}" for problem in problems]
    return [*names, *warned, *(str(_compared(cell, x, y)) for cell, x, y in pairs)]


def _problems(a: Mapping[Cell, Any], b: Mapping[Cell, Any]) -> list[str]:
    problems = [f"{cell} is only in the first" for cell in sorted(a.keys() - b.keys())]
    problems += [f"{cell} is only in the second" for cell in sorted(b.keys() - a.keys())]
    for cell in sorted(a.keys() & b.keys()):
        gaps = Identity(**a[cell]["identity"]).differences(Identity(**b[cell]["identity"]))
        problems += [f"{cell} differs in {gap}" for gap in gaps]
    return problems


def _compared(cell: Cell, a: Mapping[str, Any], b: Mapping[str, Any]) -> Compared:
    pairs = [
        (x, y) for x, y in zip(a["scores"], b["scores"], strict=False) if x is not None and y is not None
    ]
    gap = paired_difference([x for x, _ in pairs], [y for _, y in pairs])
    return Compared(cell, a["avg"]["mean"], b["avg"]["mean"], gap)


def _cells(folder: Path) -> dict[Cell, Any]:
    file = folder if folder.is_file() else folder / RESULT
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']} is not {FORMAT}")
        if not data["cells"]:
            raise ValueError("it has no cell")
        return {Cell(**cell["cell"]): _whole(cell) for cell in data["cells"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CompareError(
            f"{file} is no result of `temper eval` ({type(error).__name__}: {error}); give the folder it "
            "printed last"
        ) from error


def _whole(cell: Mapping[str, Any]) -> Mapping[str, Any]:
    """The cell, when it has what is compared."""
    Identity(**cell["identity"])
    if absent := {"n", "n_done", "avg", "scores"} - cell.keys():
        raise ValueError(f"a cell has no {min(absent)}")
    return cell


def _model(cells: Mapping[Cell, Any]) -> str:
    identity = Identity(**next(iter(cells.values()))["identity"])
    return f"{identity.model} (step {identity.step}, weights {identity.digest})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
