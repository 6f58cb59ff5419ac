"""Momentum balanced by Sinkhorn steps, for embeddings, the head and n-gram tables.

A row of an embedding is learned as often as its token is read, and a column whenever anything is. Alternating
normalisations of rows and columns give all of them updates of one size, as Muon gives all directions of a
matrix. The rule and its constants are those published for DeepSeek-V4.1 (section 2.5 of the report).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl.trainers.muon import Layout

_ROUNDS = 11
_EPSILON = 1e-20
_SILENT = 1e-3
"""Rows below this part of the mean row norm are taken for not read and stay."""


def balance(update: Tensor, rounds: int = _ROUNDS) -> Tensor:
    """Balances [rows, columns]: silent rows to 0, then l2 norms of rows (first and last) and columns.

    The result is scaled by sqrt(columns), so that an element of a row that is read is about 1.
    """
    norms = update.norm(dim=1, keepdim=True)
    balanced = torch.where(norms <= _SILENT * norms.mean(), torch.zeros_like(update), update)
    for number in range(1, rounds + 1):
        balanced = balanced / (balanced.norm(dim=1 if number % 2 else 0, keepdim=True) + _EPSILON)
    return balanced * update.shape[1] ** 0.5


class BalancedMomentum:
    """Nesterov momentum, balanced; no weight decay.

    Args:
        tables: parameters [rows, columns] by name, or this rank's part of them.
        layouts: make the whole of a part, as [1, rows, columns], and back.
        factors: by name, what the learning rate is multiplied by; default 1.
        momentum: decay of the momentum.
        update_rms: root mean square of an element's update at learning rate 1.
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor],
        layouts: Mapping[str, Layout] | None = None,
        factors: Mapping[str, float] | None = None,
        *,
        momentum: float = 0.95,
        update_rms: float = 0.18,
    ) -> None:
        self.momentum, self.update_rms = momentum, update_rms
        self.tables, self._layouts, self._factors = dict(tables), dict(layouts or {}), dict(factors or {})
        self.momenta = {name: torch.zeros_like(table) for name, table in tables.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Updates the tables that have a gradient, dense or sparse."""
        for name, table in self.tables.items():
            if name not in gradients:
                continue
            grad = gradients[name]
            grad = grad.to_dense() if grad.is_sparse else grad
            momentum, layout = self.momenta[name], self._layouts.get(name, Layout())
            momentum.lerp_(grad, 1 - self.momentum)
            mixed = layout.stack(grad.lerp(momentum, self.momentum))
            update = layout.unstack(balance(mixed.flatten(0, -2)).view_as(mixed))
            rate = self.update_rms * learning_rate * self._factors.get(name, 1.0)
            table.sub_(update, alpha=rate)
