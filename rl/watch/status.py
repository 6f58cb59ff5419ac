"""STATUS.md: how a run stands, for a person who only has a file browser."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rl.watch.alarms import Alarms
from rl.watch.console import chosen, figure

FILE_NAME = "STATUS.md"


@dataclass(slots=True)
class Status:
    """The newest state of a run: its phase, numbers, failed samples and last notes."""

    run: str
    phase: str = "starting"
    done: int = 0
    total: int = 0
    failed: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=10))

    def update(self, phase: str, done: int, total: int, metrics: Mapping[str, float]) -> None:
        """Takes over where the run is and its newest numbers."""
        self.phase, self.done, self.total = phase, done, total
        self.figures |= dict(chosen(metrics))


def write_status(run: Path, status: Status, alarms: Alarms) -> None:
    """Replaces STATUS.md."""
    count = f" {status.done}/{status.total}" if status.total else ""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [
        f"# {status.run}",
        "",
        f"{status.phase}{count}, seen {now}. Failed samples: {status.failed}.",
        "",
    ]
    lines += [f"- {label}: {figure(value)}" for label, value in status.figures.items()]
    lines += ["", "## Alarms", "", *(f"- {a.level} {a.name}: {a.text}" for a in alarms.active.values())]
    lines += [] if alarms.active else ["None."]
    lines += ["", "## Notes", "", *(f"- {note}" for note in status.notes)]
    partial = run / f".{FILE_NAME}.{os.getpid()}.partial"
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(run / FILE_NAME)
