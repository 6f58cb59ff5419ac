"""AdamW for tables of which a step touches a few rows: work and memory traffic of those rows alone.

The momenta of a row are those of dense AdamW at every step that touches it, for what they decay while its
gradient is zero is made up when it is touched again. What dense AdamW does to a row in between (drift along
the old momentum, weight decay) is left out: a row that is not read does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class RowState:
    """Of one table: float32 momenta [rows, width], the last step that touched each row, steps so far."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    last: Tensor
    step: int = 0

    @staticmethod
    def of(table: Tensor) -> RowState:
        """The state before the first step, in the memory where the table is."""
        momentum = torch.zeros(table.shape, dtype=torch.float32, device=table.device)
        last = torch.zeros(table.shape[0], dtype=torch.int64, device=table.device)
        return RowState(momentum, momentum.clone(), last)

    def to_dict(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {
            "exp_avg": self.exp_avg.clone(),
            "exp_avg_sq": self.exp_avg_sq.clone(),
            "last": self.last.clone(),
            "step": torch.tensor(self.step),
        }

    def copy_(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what `to_dict` gave."""
        for name in ("exp_avg", "exp_avg_sq", "last"):
            getattr(self, name).copy_(state[name])
        self.step = int(state["step"])


class RowAdamW:
    """Row-wise AdamW with decoupled weight decay of the touched rows.

    Args:
        tables: parameters [rows, width] by name.
        betas: decay of the two momenta.
        epsilon: added to the root of the second.
        weight_decay: of touched rows.
    """

    def __init__(
        self, tables: Mapping[str, Tensor], *, betas: tuple[float, float], epsilon: float, weight_decay: float
    ) -> None:
        self.betas, self.epsilon, self.weight_decay = betas, epsilon, weight_decay
        self.tables = dict(tables)
        self.states = {name: RowState.of(table) for name, table in tables.items()}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Applies the gradients of the tables that have one: a sparse one, or a dense one of all rows."""
        for name, table in self.tables.items():
            if (grad := table.grad) is None:
                continue
            if grad.is_sparse:
                grad = grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
            else:
                rows, values = torch.arange(table.shape[0], device=grad.device), grad
            self._update(table, self.states[name], rows, values.float(), learning_rate)

    def _update(self, table: Tensor, state: RowState, rows: Tensor, grad: Tensor, rate: float) -> None:
        first, second = self.betas
        state.step += 1
        idle = (state.step - 1 - state.last[rows]).unsqueeze(1).float()
        mean = (state.exp_avg[rows] * first**idle).lerp_(grad, 1 - first)
        square = (state.exp_avg_sq[rows] * second**idle).mul_(second).addcmul_(grad, grad, value=1 - second)
        state.exp_avg[rows], state.exp_avg_sq[rows], state.last[rows] = mean, square, state.step
        root = square.sqrt().div_((1 - second**state.step) ** 0.5).add_(self.epsilon)
        values = table[rows].float().mul_(1 - rate * self.weight_decay)
        table[rows] = values.addcdiv_(mean, root, value=-rate / (1 - first**state.step)).to(table.dtype)
