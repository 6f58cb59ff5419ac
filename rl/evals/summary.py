"""From rows to the figures of a cell. Every row is counted; one without a verdict is never taken for 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.evals.plan import Identity
from rl.evals.prices import Prices, Usage
from rl.evals.rows import Cell, Row
from rl.evals.settings import EvalSettings
from rl.evals.statistics import Estimate, average, by_deadline, estimate, pass_at_k, solved_by_one_of


@dataclass(frozen=True, slots=True)
class AtDeadline:
    """What stands at a wall-clock deadline: a sample still running then counts 0.

    `mean` is mean@k, the mean over tasks of the mean over their samples. `almost` is almost@k, the share of
    tasks of which one of the k samples reaches `almost` of EvalSettings.
    """

    seconds: float
    mean: Estimate
    almost: Estimate


@dataclass(frozen=True, slots=True)
class CellResult:
    """Figures of one cell. `n` samples were asked for, `n_done` have ended, `n_valid` have a score.

    `usage` is of all rows, scored or not; `per_solved` is it for each sample that solved its task, None when
    none did. A cost is None without prices.
    """

    cell: Cell
    identity: Identity
    n: int
    n_done: int
    n_valid: int
    missing: dict[str, int]
    avg: Estimate
    pass_at: dict[int, Estimate]
    deadlines: tuple[AtDeadline, ...]
    solved: int
    tokens: float
    turns: float
    tool_use: float
    truncated: float
    usage: Usage
    per_solved: Usage | None
    cost: float | None
    cost_per_solved: float | None
    scores: tuple[float | None, ...]
    """Mean score of each task, None where no sample has one; for comparisons of pairs."""

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values; what is not known is null."""
        return _finite(asdict(self))


def summarize_cell(
    cell: Cell,
    identity: Identity,
    rows: Sequence[Row],
    device_s: float,
    settings: EvalSettings,
    prices: Prices | None,
) -> CellResult:
    """Computes the figures of a cell from its rows."""
    valid = [row for row in rows if row.score is not None]
    tasks = _by_task(valid, identity.n)
    scores = [[score for score, _ in samples] for samples in tasks]
    usage = Usage(
        float(sum(row.input_tokens for row in rows)),
        float(sum(row.output_tokens for row in rows)),
        sum(row.sandbox_s for row in rows),
        device_s,
    )
    solved = sum(score >= settings.solved for values in scores for score in values)
    cost = None if prices is None else prices.cost(usage)
    return CellResult(
        cell=cell,
        identity=identity,
        n=identity.n * settings.k,
        n_done=len(rows),
        n_valid=len(valid),
        missing=dict(Counter(row.missing.partition(":")[0] for row in rows if row.score is None)),
        avg=average(scores),
        pass_at={k: solved_by_one_of(scores, k, settings.solved) for k in settings.passes},
        deadlines=tuple(_at_deadline(tasks, seconds, settings) for seconds in settings.deadlines_s),
        solved=solved,
        tokens=_mean([row.output_tokens for row in valid]),
        turns=_mean([row.turns for row in valid]),
        tool_use=_mean([row.tool_calls > 0 for row in valid]),
        truncated=_mean([row.status == "truncated" for row in valid]),
        usage=usage,
        per_solved=usage.per(solved) if solved else None,
        cost=cost,
        cost_per_solved=cost / solved if cost is not None and solved else None,
        scores=tuple(sum(values) / len(values) if values else None for values in scores),
    )


def _by_task(rows: Sequence[Row], tasks: int) -> list[list[tuple[float, float]]]:
    """(score, seconds) of the scored samples of each task."""
    found: list[list[tuple[float, float]]] = [[] for _ in range(tasks)]
    for row in rows:
        assert row.score is not None
        found[row.task].append((row.score, row.seconds))
    return found


def _at_deadline(
    tasks: Sequence[Sequence[tuple[float, float]]], seconds: float, settings: EvalSettings
) -> AtDeadline:
    scores = by_deadline(tasks, seconds)
    counts = [(len(values), sum(value >= settings.almost for value in values)) for values in scores]
    almost = [pass_at_k(samples, good, settings.k) for samples, good in counts if samples >= settings.k]
    return AtDeadline(seconds, average(scores), estimate(almost, binary=True))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
