"""`temper run`: which runs there are, how one stands, and the samples it learned from."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from rich.console import Console

from rl.launch.config import RunConfig
from rl.launch.run import describe, read_driver
from rl.watch import rollouts, viewer


class NoSuchRunError(ValueError):
    """A run that is not there: its name, the nearest one, and what there is."""


def list_runs(root: Path) -> list[str]:
    """Returns one line a run, the newest first."""
    found = [(record.started, path) for path in _runs(root) if (record := read_driver(path)) is not None]
    lines = [f"{path.name:<32} {describe(path)}" for _, path in sorted(found, reverse=True)]
    return lines or [f"no runs in {root.resolve()}; start one with: temper train experiment=calc"]


def find_run(name: str, root: Path) -> Path:
    """Returns the folder of a run, given by name or by path.

    Raises:
        NoSuchRunError: There is none.
    """
    for path in (root / name, Path(name)):
        if read_driver(path) is not None:
            return path
    names = [path.name for path in _runs(root)]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise NoSuchRunError(f"there is no run {name!r} in {root.resolve()}; {hint}`temper run list` shows all")


def show_run(path: Path) -> list[str]:
    """Returns how a run stands, and where its things are."""
    status = path / "STATUS.md"
    text = [status.read_text(encoding="utf-8")] if status.is_file() else []
    steps = rollouts.steps(path)
    samples = f"steps {steps[0]} to {steps[-1]}" if steps else "none yet"
    files = [name for name in ("curves.png", "metrics.jsonl", "resolved.yaml") if (path / name).is_file()]
    return [
        f"{path.name}: {describe(path)}",
        *text,
        f"samples: {samples} (temper run show {path.name} --step N)",
        f"files in {path}: {', '.join(files)}",
    ]


def show_samples(path: Path, step: int | None, *, failed: bool, order: str, limit: int) -> None:
    """Prints samples of a step (the last one by default), or the failed ones.

    Raises:
        NoRolloutsError: There are none.
    """
    console = Console(highlight=False)
    samples = rollouts.read(path, step, failed=failed)
    if not samples:
        console.print("no sample failed")
        return
    viewer.show(console, samples, _decoder(path), order=order, limit=limit)


def _decoder(path: Path) -> Callable[[Sequence[int]], str]:
    from rl import build

    config = RunConfig.model_validate(yaml.safe_load((path / "resolved.yaml").read_text()))
    tokenizer = build.chat_format(config).tokenizer
    return lambda ids: tokenizer.decode(list(ids))


def _runs(root: Path) -> list[Path]:
    return sorted(record.parent for record in root.glob("*/driver.json"))
