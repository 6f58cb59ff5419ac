"""The terminal: one live screen, or plain lines where there is no terminal. Never silent for long.

Both show the same numbers, and are told the same: a phase and how far it is, new numbers, lines to keep.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_S = 3.0
_BARS = "▁▂▃▄▅▆▇█"
FIGURES = (
    ("reward", "rollout/all/reward.mean"),
    ("tool use", "rollout/all/tool_use"),
    ("errors", "rollout/all/error"),
    ("length", "rollout/all/len.sampled.mean"),
    ("entropy", "train/entropy"),
    ("mismatch", "train/kl.mismatch"),
    ("queue", "sys/queue.depth"),
    ("tok/s", "sys/tok_s.gen"),
    ("trainer idle", "sys/idle.trainer"),
    ("rollout idle", "sys/idle.rollout"),
    ("loss", "sft/loss"),
    ("teacher KL", "opd/kl"),
)


class Screen(Protocol):
    """What a run tells the terminal."""

    def phase(self, name: str, done: int, total: int) -> None:
        """Says what is going on, and how far it is (`total` 0: unknown)."""
        ...

    def figures(self, metrics: Mapping[str, float]) -> None:
        """Shows the newest numbers of the present phase."""
        ...

    def note(self, text: str) -> None:
        """Shows a line that stays."""
        ...

    def close(self) -> None:
        """Gives the terminal back."""
        ...


def open_screen(kind: str, title: str) -> Screen:
    """Returns the live screen (`rich`), plain lines (`plain`), or what the terminal allows (`auto`)."""
    live = kind == "rich" or (kind == "auto" and sys.stdout.isatty())
    return LiveScreen(title) if live else PlainScreen(title)


class Clock:
    """Estimates the time left of a phase from the time its steps took."""

    def __init__(self) -> None:
        self.name, self._start, self._first = "", time.monotonic(), 0

    def left(self, name: str, done: int, total: int) -> float:
        """Returns seconds left; NaN while unknown."""
        if name != self.name:
            self.name, self._start, self._first = name, time.monotonic(), done
        taken = done - self._first
        spent = time.monotonic() - self._start
        return spent / taken * (total - done) if taken > 0 and total else math.nan


class PlainScreen:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, title: str) -> None:
        self._clock, self._last, self._figures = Clock(), -math.inf, ""
        self.note(title)

    def phase(self, name: str, done: int, total: int) -> None:
        """Prints a line when the phase is new or complete, or some seconds have passed."""
        fresh = name != self._clock.name
        if fresh:
            self._figures = ""
        left = self._clock.left(name, done, total)
        if fresh or (total and done >= total) or time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._last = time.monotonic()
            self.note(f"{progress_text(name, done, total, left)}{self._figures}")

    def figures(self, metrics: Mapping[str, float]) -> None:
        """Keeps numbers for the next line."""
        shown = "  ".join(f"{label} {figure(value)}" for label, value in chosen(metrics))
        self._figures = f"  {shown}" if shown else ""

    def note(self, text: str) -> None:
        """Prints the line."""
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def close(self) -> None:
        """Has nothing to give back."""


class LiveScreen:
    """A few lines that stay in place: phase, bar, reward, numbers; notes scroll above them."""

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._clock, self._title = Clock(), title
        self._phase = ("starting", 0, 0)
        self._left = math.nan
        self._figures: dict[str, float] = {}
        self._newest: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=60)
        self._live = Live(get_renderable=self.render, console=console or Console(), refresh_per_second=4)
        self._live.start()

    def phase(self, name: str, done: int, total: int) -> None:
        """Shows the phase and its bar."""
        self._figures = self._newest if name != self._phase[0] else self._figures | self._newest
        self._newest = {}
        self._left = self._clock.left(name, done, total)
        self._phase = (name, done, total)

    def figures(self, metrics: Mapping[str, float]) -> None:
        """Shows the newest numbers; the reward also as a small curve."""
        self._newest |= metrics
        if (reward := metrics.get("rollout/all/reward.mean")) is not None:
            self._rewards.append(reward)

    def note(self, text: str) -> None:
        """Prints the line above the screen."""
        self._live.console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the last state on the terminal."""
        self._live.stop()

    def render(self) -> Group:
        """Returns the screen as it is now."""
        name, done, total = self._phase
        table = Table.grid(padding=(0, 3))
        cells = [f"[dim]{label}[/] {figure(value)}" for label, value in chosen(self._figures)]
        for start in range(0, len(cells), 5):
            table.add_row(*cells[start : start + 5])
        parts = [Text(self._title, style="bold"), Text(progress_text(name, done, total, self._left))]
        bar = ProgressBar(total=total or None, completed=done, width=60, pulse=not total)
        curve = Text(f"reward {sparkline(list(self._rewards))}") if self._rewards else Text("")
        return Group(*parts, bar, curve, table)


def progress_text(name: str, done: int, total: int, left: float) -> str:
    """Returns `imitate 120/250, 1:05 left`."""
    count = f" {done}/{total}" if total else ""
    rest = f", {int(left) // 60}:{int(left) % 60:02d} left" if math.isfinite(left) and done < total else ""
    return f"{name}{count}{rest}"


def sparkline(values: list[float]) -> str:
    """Returns values from 0 to 1 as a row of little bars."""
    top = len(_BARS) - 1
    return "".join(_BARS[min(max(round(value * top), 0), top)] if value == value else " " for value in values)


def chosen(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns the numbers that the terminal shows, with their labels."""
    return [(label, metrics[name]) for label, name in FIGURES if name in metrics]


def figure(value: float) -> str:
    """Returns a number with as many digits as help."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.1e}"
