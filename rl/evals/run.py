"""One evaluation from its settings to its result: a folder that can be interrupted and continued."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.evals.picture import draw_quality
from rl.evals.plan import EvalPlan, Identity, PlanError, make_plan
from rl.evals.prices import Prices, load_prices
from rl.evals.report import Report, make_report, write_report
from rl.evals.rows import Cell, RowLog
from rl.evals.sampling import Progress, open_sampler
from rl.evals.settings import EvalSettings, changed_settings
from rl.evals.target import Target, digest_of, pin
from rl.launch.run import write_atomically
from rl.watch.console import Screen

PLAN = "plan.json"
_ROWS, _PINNED = "rows.jsonl", "policy"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation in `folder`, where its weights are pinned until every sample has a score."""

    plan: EvalPlan
    folder: Path
    prices: Prices | None

    def run(self, screen: Screen, guard: Callable[[], AbstractContextManager[None]]) -> Report:
        """Draws what is missing and writes the report, also of a part when it is interrupted.

        Args:
            screen: is told how far it is.
            guard: makes signals to end into KeyboardInterrupt while samples are drawn.

        Raises:
            KeyboardInterrupt: It was interrupted; what had finished is kept and reported.
        """
        with RowLog(self.folder / _ROWS) as log:
            try:
                if self._unfinished(log):
                    with guard():
                        asyncio.run(self._sample(log, progress_on(screen)))
            finally:
                report = make_report(self.plan, log.found, self.prices)
                write_report(report, self.folder)
                draw_quality(report.results, self.folder, self.plan.cells[0].identity.model)
        if not self._unfinished(log):
            shutil.rmtree(self.folder / _PINNED, ignore_errors=True)
        return report

    def _unfinished(self, log: RowLog) -> bool:
        rows = log.found.rows
        return len(rows) < self.plan.samples or any(row.score is None for row in rows.values())

    async def _sample(self, log: RowLog, progress: Progress) -> None:
        policy = self.folder / _PINNED
        async with open_sampler(self.plan, policy, log, progress, self.folder) as sampler:
            await sampler.run(self.plan)


def begin(settings: EvalSettings, target: Target) -> Evaluation:
    """Makes the folder of an evaluation, with its plan and its pinned weights.

    Raises:
        PlanError: The folder is taken or cannot be written, or an environment has too few tasks.
        TargetError: The checkpoint is gone.
        PriceError: The price file cannot be used.
    """
    prices = _prices(settings)
    digest = digest_of(target.policy)
    plan = make_plan(settings, target.name, target.step, digest)
    folder = Path(settings.out).expanduser() if settings.out else _default_folder(plan, target)
    if folder.exists():
        raise PlanError(
            f"{folder} exists; if it is an evaluation, `temper eval {folder}` goes on with it; else give "
            "another out="
        )
    try:
        folder.mkdir(parents=True)
        pin(target, folder / _PINNED)
        write_atomically(folder / PLAN, json.dumps(_stored(plan), indent=1))
    except OSError as error:
        raise PlanError(f"{folder} cannot be written ({error.strerror}); give another out=") from error
    if digest_of(folder / _PINNED) != digest:
        shutil.rmtree(folder)
        raise PlanError(f"{target.name} changed while it was being linked; ask for it again")
    return Evaluation(plan, folder, prices)


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is one that `begin` made."""
    return (folder / PLAN).is_file()


def go_on(folder: Path, words: Sequence[str]) -> Evaluation:
    """Continues an evaluation, or reports a finished one anew; `words` may change what no sample needs.

    Raises:
        PlanError: The plan cannot be read, or an environment or the pinned weights are not what they were.
        SettingsError: A setting cannot be changed, or is wrong.
        PriceError: The price file cannot be used.
    """
    try:
        stored = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        before = [Identity(**identity) for _, identity in stored["cells"]]
        settings = changed_settings(words, stored["settings"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise PlanError(
            f"{folder / PLAN} cannot be read ({type(error).__name__}: {error}); begin the evaluation anew"
        ) from error
    model = before[0]
    digest = digest_of(folder / _PINNED) if (folder / _PINNED).is_dir() else model.digest
    plan = make_plan(settings, model.model, model.step, digest)
    changed = [
        f"{planned.cell}: {gap}"
        for planned, old in zip(plan.cells, before, strict=True)
        for gap in planned.identity.differences(old) + _other_weights(planned.identity, old)
    ]
    if changed:
        raise PlanError(
            f"{folder} cannot be continued: since it was begun this has changed: {'; '.join(changed)}; "
            "begin a new "
            "evaluation"
        )
    return Evaluation(plan, folder, _prices(settings))


def _other_weights(now: Identity, old: Identity) -> list[str]:
    return [] if now.digest == old.digest else [f"weights: {now.digest} and {old.digest}"]


def _stored(plan: EvalPlan) -> dict[str, Any]:
    settings = plan.settings.model_dump(mode="json")
    return {"settings": settings, "cells": [[asdict(p.cell), asdict(p.identity)] for p in plan.cells]}


def _prices(settings: EvalSettings) -> Prices | None:
    return load_prices(Path(settings.prices).expanduser()) if settings.prices else None


def _default_folder(plan: EvalPlan, target: Target) -> Path:
    place = target.run / "evals" if target.run is not None else Path("evals")
    label = f"step-{target.step}" if target.run is not None else target.name
    short = hashlib.sha256(json.dumps(_stored(plan)["cells"]).encode()).hexdigest()[:6]
    return place / f"{label}-{short}"


def progress_on(screen: Screen) -> Progress:
    """Returns what tells a screen how far an evaluation is."""

    def tell(cell: Cell, done: int, total: int) -> None:
        screen.phase(f"evaluate {cell}", done, total)

    return tell
