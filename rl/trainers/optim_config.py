"""Settings of the optimisers: rates, decay, schedule, and what is not trained."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


class OptimizerError(ValueError):
    """Optimiser settings, gradients or a stored state that cannot be used: what, why, and what to do."""


def require_at_least(settings: object, least: float, *names: str) -> None:
    """Refuses settings that are not finite, or below `least`.

    Raises:
        OptimizerError: One is; the message names it.
    """
    for name in names:
        value = getattr(settings, name)
        if not least <= value < math.inf:
            raise OptimizerError(f"{name}={value}: set it to {least:g} or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Learning rates, decay and schedule.

    Attributes:
        learning_rate: of AdamW.
        muon_learning_rate: of Muon; None gives the matrices to AdamW too.
        betas: of AdamW.
        epsilon: of AdamW.
        weight_decay: decoupled, for both; not for vectors and scalars.
        warmup_steps: steps over which the rates rise linearly.
        decay: `constant`, or `cosine` or `linear` down to `final_fraction`.
        decay_from: share of the steps after which the decay begins; until then the rates stay.
        decay_to: share of the steps at which it is over.
        final_fraction: what is left of the rates at the end of the decay.
        max_grad_norm: gradients are scaled down to this global norm.
        head_wise: Muon orthogonalises query weights head by head.
        muon_steps: Newton-Schulz steps of Muon.
        muon_polish: further ones that converge; DeepSeek-V4 takes 8 steps and 2 of these.
        balanced_learning_rate: of Sinkhorn-balanced momentum for embeddings, head and n-gram tables; None
            gives them to AdamW.
        table_factor: by which the rate of n-gram tables is larger under it.
        frozen: patterns (searched in parameter names) of what is not trained.
    """

    learning_rate: float
    muon_learning_rate: float | None = None
    balanced_learning_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 10
    decay: str = "constant"
    decay_from: float = 0.0
    decay_to: float = 1.0
    final_fraction: float = 0.1
    max_grad_norm: float = 1.0
    head_wise: bool = False
    muon_steps: int = 5
    muon_polish: int = 0
    table_factor: float = 5.0
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rates = ("learning_rate", "weight_decay", "warmup_steps", "muon_polish", "final_fraction")
        optional = ("muon_learning_rate", "balanced_learning_rate")
        require_at_least(self, 0, *rates, *(name for name in optional if getattr(self, name) is not None))
        require_at_least(self, 1, "muon_steps")
        if not self.max_grad_norm > 0:
            raise OptimizerError(f"max_grad_norm is {self.max_grad_norm}; it must be positive")
        if self.table_factor <= 0 or not math.isfinite(self.table_factor):
            raise OptimizerError(f"table_factor is {self.table_factor}; it must be positive")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise OptimizerError(f"betas={list(self.betas)}: both are from 0 to below 1")
        if not 0 < self.epsilon < math.inf:
            raise OptimizerError(f"epsilon is {self.epsilon}; it must be positive and finite")
        self._check_frozen()
        self._check_decay()
        self._check_effect()

    def _check_frozen(self) -> None:
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise OptimizerError(
                    f"frozen: {pattern!r} is no pattern ({error}); it is a regular expression that is "
                    "searched in parameter names, as in embed or layers\\.0\\."
                ) from error

    def _check_decay(self) -> None:
        if self.decay not in ("constant", "cosine", "linear"):
            raise OptimizerError(f"decay is {self.decay!r}; it is 'constant', 'cosine' or 'linear'")
        if not 0 <= self.decay_from < self.decay_to <= 1:
            raise OptimizerError(
                f"decay_from={self.decay_from} and decay_to={self.decay_to} are shares of the steps: the "
                "first is below the second, both from 0 to 1"
            )
        if self.decay == "constant" and (self.decay_from, self.decay_to) != (0.0, 1.0):
            raise OptimizerError("decay_from and decay_to have no effect with decay=constant; leave them out")
        if self.decay == "constant" and self.final_fraction != 0.1:
            raise OptimizerError(
                "final_fraction has no effect with decay=constant; set decay to cosine or linear, or leave "
                "it out"
            )

    def _check_effect(self) -> None:
        """Refuses settings of an optimiser that is not used."""
        plain = {"muon_steps": 5, "muon_polish": 0, "head_wise": False}
        changed = [name for name, value in plain.items() if getattr(self, name) != value]
        if self.muon_learning_rate is None and changed:
            raise OptimizerError(
                f"{', '.join(changed)} belongs to Muon, which is off: set muon_learning_rate, or leave it out"
            )
        if self.balanced_learning_rate is None and self.table_factor != 5.0:
            raise OptimizerError(
                "table_factor belongs to balanced momentum, which is off: set balanced_learning_rate, or "
                "leave it out"
            )

    def fraction(self, step: int, total_steps: int) -> float:
        """The part of the learning rates in force at `step` (from 0)."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay == "constant":
            return warm
        done = step / max(total_steps, 1)
        progress = min(1.0, max(0.0, (done - self.decay_from) / (self.decay_to - self.decay_from)))
        left = 1 - progress if self.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return warm * (self.final_fraction + (1 - self.final_fraction) * left)
