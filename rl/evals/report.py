"""The result of an evaluation as `result.json` and as a table; always made from the rows anew."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.evals.grid import Enough, Fall, enough, falls
from rl.evals.plan import EvalPlan
from rl.evals.prices import Prices
from rl.evals.rows import Rows
from rl.evals.summary import CellResult, summarize_cell
from rl.launch.run import write_atomically

FORMAT = 1
RESULT, TABLE = "result.json", "table.txt"


@dataclass(frozen=True, slots=True)
class Report:
    """All cells of a result, and what the grid of efforts and scaffolds says."""

    results: tuple[CellResult, ...]
    falls: tuple[Fall, ...]
    enough: tuple[Enough, ...]
    currency: str

    @property
    def complete(self) -> bool:
        """Whether every planned sample has ended."""
        return all(result.n_done == result.n for result in self.results)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "format": FORMAT,
            "complete": self.complete,
            "currency": self.currency,
            "cells": [result.to_json() for result in self.results],
            "non_monotone": [{**asdict(fall), "significant": fall.significant} for fall in self.falls],
            "enough": [asdict(item) for item in self.enough],
        }

    def lines(self) -> list[str]:
        """The report as lines of text."""
        rows = [_HEAD, *([*map(str, _row(result, self.currency))] for result in self.results)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        table = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        below = [
            *_details(self.results),
            *(f"not monotone: {fall}" for fall in self.falls),
            *map(str, self.enough),
        ]
        return table + below


def make_report(plan: EvalPlan, rows: Rows, prices: Prices | None) -> Report:
    """Summarises the rows of all cells."""
    results = tuple(
        summarize_cell(
            planned.cell,
            planned.identity,
            rows.of(planned.cell),
            rows.device_s.get(planned.cell, 0.0),
            plan.settings,
            prices,
        )
        for planned in plan.cells
    )
    currency = "" if prices is None else prices.currency
    return Report(results, tuple(falls(results)), tuple(enough(results)), currency)


def write_report(report: Report, folder: Path) -> None:
    """Writes `result.json` and `table.txt`."""
    write_atomically(folder / RESULT, json.dumps(report.to_json(), indent=1, allow_nan=False))
    write_atomically(folder / TABLE, "\n".join(report.lines()) + "\n")


_HEAD = [
    "env",
    "effort",
    "scaffold",
    "avg",
    "95 %",
    "pass@k",
    "valid",
    "tokens",
    "turns",
    "tools",
    "cut",
    "per solved",
]


def _row(result: CellResult, currency: str) -> list[str]:
    cell, avg = result.cell, result.avg
    return [
        cell.env,
        str(cell.effort),
        cell.scaffold,
        number(avg.mean),
        f"{number(avg.low)}..{number(avg.high)}",
        " ".join(f"{number(item.mean)}@{k}" for k, item in result.pass_at.items()),
        f"{result.n_valid}/{result.n}",
        number(result.tokens, 1),
        number(result.turns, 1),
        number(result.tool_use, 2),
        number(result.truncated, 2),
        _per_solved(result, currency),
    ]


def _per_solved(result: CellResult, currency: str) -> str:
    used = result.per_solved
    if used is None:
        return "none solved"
    seconds = f"{used.sandbox_s:.2g} sandbox s, {used.device_s:.2g} device s"
    cost = "" if result.cost_per_solved is None else f", {result.cost_per_solved:.3g} {currency}"
    return f"{used.output_tokens:.1f} tokens, {seconds}{cost}"


def _details(results: Sequence[CellResult]) -> list[str]:
    lines: list[str] = []
    for result in results:
        lines += [
            f"{result.cell}: after {item.seconds:g} s mean@{_k(result)} {item.mean}, almost@{_k(result)} "
            f"{item.almost}"
            for item in result.deadlines
        ]
        if result.missing:
            why = ", ".join(f"{count} {boundary}" for boundary, count in sorted(result.missing.items()))
            lines.append(f"{result.cell}: {result.n_done - result.n_valid} samples have no score ({why})")
        if result.n_done < result.n:
            lines.append(f"{result.cell}: {result.n - result.n_done} of {result.n} samples are not drawn yet")
    return lines


def _k(result: CellResult) -> int:
    return result.n // result.identity.n


def number(value: float, digits: int = 3) -> str:
    """A number for a table, a dash when it is not known."""
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
