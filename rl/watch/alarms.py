"""Alarms: what a person would look for in the curves, checked at every step.

An alarm speaks once when it starts and once when it ends. The rules look only at logged numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Level(StrEnum):
    """How bad it is: a notice asks for nothing."""

    NOTICE = "notice"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing that is wrong: its rule's name, what was seen, and what to look at."""

    name: str
    text: str
    level: Level = Level.WARNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an alarm goes off. Shares are of 1; `patience` is the number of steps in a row it must hold."""

    silence_s: float = 120.0
    errors: float = 0.05
    truncated: float = 0.3
    groups: float = 0.8
    entropy_drop: float = 0.5
    entropy_window: int = 20
    mismatch: float = 0.1
    mismatch_rise: float = 5.0
    grad_norm_rise: float = 10.0
    queue_empty: float = 0.5
    disk_free: float = 0.1
    eval_drop: float = 0.1
    collapse: float = 0.2
    patience: int = 5


@dataclass(slots=True)
class Alarms:
    """Checks numbers as they come. `active` holds what is wrong now, by name.

    `exact` says that trainer and sampler are to agree to the last bit.
    """

    limits: Limits = field(default_factory=Limits)
    staleness_bound: int = 1
    exact: bool = False
    active: dict[str, Alarm] = field(default_factory=dict)
    _streak: dict[str, int] = field(default_factory=dict)
    _history: dict[str, deque[float]] = field(default_factory=dict)
    _best_eval: dict[str, float] = field(default_factory=dict)
    _best_reward: float = -math.inf

    def check(self, metrics: Mapping[str, float]) -> list[str]:
        """Looks at one row of numbers; returns what started or ended, as lines."""
        news = self._not_a_number(metrics)
        news += self._share(
            "errors",
            metrics,
            "rollout/all/error",
            self.limits.errors,
            "samples fail; see rollouts/failed.jsonl",
        )
        news += self._share(
            "truncation",
            metrics,
            "rollout/all/truncated",
            self.limits.truncated,
            "samples are cut; raise engine.max_completion_tokens or engine.max_tokens",
        )
        news += self._share(
            "all_wrong",
            metrics,
            "rollout/all/group.all_bad",
            self.limits.groups,
            "groups have no right answer, so nothing is learned; warm up longer or take easier tasks",
        )
        news += self._share(
            "all_right",
            metrics,
            "rollout/all/group.all_good",
            self.limits.groups,
            "groups are all right: the task is nearly solved",
            Level.NOTICE,
        )
        news += self._share(
            "queue_empty",
            metrics,
            "sys/idle.trainer",
            self.limits.queue_empty,
            "of the time the trainer waits for samples; see sys/tok_s.gen and rollout.max_in_flight",
        )
        news += self._entropy(metrics) + self._grad_norm(metrics)
        news += self._mismatch(metrics) + self._inexact(metrics)
        news += self._collapse(metrics)
        news += self._staleness(metrics) + self._evaluation(metrics)
        return news

    def check_silence(self, seconds: float) -> list[str]:
        """Looks at the time since the last progress of any kind."""
        text = f"no progress for {seconds:.0f} s; look at the newest file in logs/"
        return self._set("silence", seconds > self.limits.silence_s, text)

    def check_disk(self, free: float) -> list[str]:
        """Looks at the free share of the disk that holds the run."""
        return self._set(
            "disk",
            free < self.limits.disk_free,
            f"the disk has only {free:.0%} free; make room before a checkpoint fails",
        )

    def _not_a_number(self, metrics: Mapping[str, float]) -> list[str]:
        bad = [
            name
            for name, value in metrics.items()
            if not math.isfinite(value) and name.startswith(("train/", "sft/"))
        ]
        if not any(name.startswith(("train/", "sft/")) for name in metrics):
            return []
        return self._set(
            "not_a_number", bool(bad), f"{', '.join(bad[:3])} not finite; lower the learning rate"
        )

    def _share(
        self,
        name: str,
        metrics: Mapping[str, float],
        metric: str,
        limit: float,
        text: str,
        level: Level = Level.WARNING,
    ) -> list[str]:
        if (value := metrics.get(metric)) is None:
            return []
        self._streak[name] = self._streak.get(name, 0) + 1 if value > limit else 0
        holds = self._streak[name] >= self.limits.patience
        return self._set(name, holds, f"{value:.0%} {text}", level)

    def _entropy(self, metrics: Mapping[str, float]) -> list[str]:
        if (value := metrics.get("train/entropy")) is None:
            return []
        seen = self._remember("entropy", value, self.limits.entropy_window)
        halved = len(seen) == self.limits.entropy_window and value < self.limits.entropy_drop * seen[0]
        solved = metrics.get("rollout/all/reward.mean", 0.0) > 0.9
        text = f"entropy fell from {seen[0]:.3f} to {value:.3f} within {len(seen)} steps"
        return self._set("entropy", halved, text, Level.NOTICE if solved else Level.WARNING)

    def _mismatch(self, metrics: Mapping[str, float]) -> list[str]:
        if (value := metrics.get("train/kl.mismatch")) is None:
            return []
        seen = list(self._remember("mismatch", value, 50))
        usual = statistics.median(seen[:-1]) if len(seen) > 5 else math.inf
        risen = usual > 1e-4 and value > self.limits.mismatch_rise * usual
        text = f"trainer and sampler differ by {value:.2g} a token (usually {usual:.2g}); equal weights?"
        return self._set("mismatch", value > self.limits.mismatch or risen, text)

    def _inexact(self, metrics: Mapping[str, float]) -> list[str]:
        value = metrics.get("train/kl.mismatch.own.max")
        if value is None or not self.exact:
            return []
        text = (
            f"exact mode is on, and trainer and sampler differ by up to {value:.2g} on tokens whose whole "
            "context is of their own version: do both run on one kind of device and one release of torch?"
        )
        return self._set("inexact", value > 0, text)

    def _grad_norm(self, metrics: Mapping[str, float]) -> list[str]:
        if (value := metrics.get("train/grad_norm")) is None:
            return []
        seen = list(self._remember("grad_norm", value, 50))
        usual = statistics.median(seen[:-1]) if len(seen) > 5 else math.inf
        text = f"gradient norm {value:.3g}, usually {usual:.3g}"
        return self._set("grad_norm", value > self.limits.grad_norm_rise * usual, text)

    def _collapse(self, metrics: Mapping[str, float]) -> list[str]:
        """The mean reward of the last steps against the best of any such number of steps."""
        if (value := metrics.get("rollout/all/reward.mean")) is None or not math.isfinite(value):
            return []
        seen = self._remember("reward", value, self.limits.patience)
        if len(seen) < self.limits.patience:
            return []
        now = statistics.fmean(seen)
        best = self._best_reward = max(self._best_reward, now)
        text = (
            f"the reward fell from {best:.3g} to {now:.3g}; go back to a checkpoint before it, with a lower "
            "learning rate or more warm-up steps"
        )
        return self._set("collapse", best > 0 and now < self.limits.collapse * best, text)

    def _staleness(self, metrics: Mapping[str, float]) -> list[str]:
        if (value := metrics.get("train/staleness.mean")) is None or self.staleness_bound == 0:
            return []
        self._streak["staleness"] = (
            self._streak.get("staleness", 0) + 1 if value >= self.staleness_bound else 0
        )
        text = (
            f"all samples are as old as the bound allows ({self.staleness_bound} steps): sampling is too slow"
        )
        return self._set("staleness", self._streak["staleness"] >= self.limits.patience, text, Level.NOTICE)

    def _evaluation(self, metrics: Mapping[str, float]) -> list[str]:
        news: list[str] = []
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/score.mean"):
                best = self._best_eval[name] = max(self._best_eval.get(name, value), value)
                text = f"{name} is {value:.2f}, it was {best:.2f}"
                news += self._set(f"eval_drop {name}", value < best - self.limits.eval_drop, text)
        return news

    def _remember(self, name: str, value: float, length: int) -> deque[float]:
        seen = self._history.setdefault(name, deque(maxlen=length))
        seen.append(value)
        return seen

    def _set(self, name: str, holds: bool, text: str, level: Level = Level.WARNING) -> list[str]:
        before = self.active.get(name)
        if holds:
            self.active[name] = Alarm(name, text, level)
            return [] if before else [f"{level} {name}: {text}"]
        if before is None:
            return []
        del self.active[name]
        return [f"{before.level} {name}: over"]
