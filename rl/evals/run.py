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

from model.durable import new_folder
from rl.evals.picture import draw_quality
from rl.evals.plan import EvalPlan, Identity, PlanError, make_plan
from rl.evals.prices import Prices, load_prices
from rl.evals.report import Report, make_report, write_report
from rl.evals.rows import Cell, DiskError, RowLog
from rl.evals.sampling import Progress, check_engine, open_sampler
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
            DiskError: Rows or the report cannot be written.
            PlanError: Samples are missing, and the weights are not kept any more.
        """
        with RowLog(self.folder / _ROWS) as log:
            try:
                if self._unfinished(log):
                    self._require_weights()
                    with guard():
                        asyncio.run(self._sample(log, progress_on(screen)))
            finally:
                report = self._report(log)
        if not self._unfinished(log):
            shutil.rmtree(self.folder / _PINNED, ignore_errors=True)
        return report

    def _report(self, log: RowLog) -> Report:
        report = make_report(self.plan, log.found, self.prices)
        try:
            write_report(report, self.folder)
            draw_quality(report.results, self.folder, self.plan.cells[0].identity.model)
        except OSError as error:
            raise DiskError(
                f"the report in {self.folder} cannot be written ({error.strerror}); every sample that is "
                f"done is kept. Make room, and `temper eval {self.folder}` goes on"
            ) from error
        return report

    def _require_weights(self) -> None:
        if not (self.folder / _PINNED).is_dir():
            raise PlanError(
                f"{self.folder} was finished, so that its weights are not kept any more, and now samples are "
                f"missing in {_ROWS}; begin a new evaluation"
            )

    def _unfinished(self, log: RowLog) -> bool:
        rows = log.found.rows
        return len(rows) < self.plan.samples or any(row.score is None for row in rows.values())

    async def _sample(self, log: RowLog, progress: Progress) -> None:
        policy = self.folder / _PINNED
        async with open_sampler(self.plan, policy, log, progress, self.folder) as sampler:
            await sampler.run(self.plan)


def begin(settings: EvalSettings, target: Target) -> Evaluation:
    """Makes the folder of an evaluation, with its plan and its pinned weights; it appears when it is whole.

    Raises:
        PlanError: The folder is taken or cannot be written, or an environment has too few tasks.
        TargetError: The checkpoint is gone.
        EngineStartError, ModelFolderError: The engine is not to be had, or does not serve this policy.
        PriceError: The price file cannot be used.
    """
    prices = _prices(settings)
    check_engine(settings, target.policy)
    digest = digest_of(target.policy)
    plan = make_plan(settings, target.name, target.step, digest)
    folder = Path(settings.out).expanduser() if settings.out else _default_folder(plan, target)
    if folder.exists():
        raise PlanError(
            f"{folder} exists; if it is an evaluation, `temper eval {folder}` goes on with it; else give "
            "another out="
        )
    try:
        with new_folder(folder) as partial:
            pin(target, partial / _PINNED)
            write_atomically(partial / PLAN, json.dumps(_stored(plan), indent=1))
            if digest_of(partial / _PINNED) != digest:
                raise PlanError(f"{target.name} changed while it was being linked; ask for it again")
    except OSError as error:
        raise PlanError(f"{folder} cannot be written ({error.strerror}); give another out=") from error
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
        model, settings = before[0], changed_settings(words, stored["settings"])
    except (OSError, LookupError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(
            f"{folder / PLAN} cannot be read ({type(error).__name__}: {error}); begin the evaluation anew"
        ) from error
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
