"""The processes that train one policy together, as the trainers see them.

A trainer asks for sums over all ranks, never whether there is more than one: alone, every answer is its own.
Numbers are added in float64, so that a metric does not depend on how a batch was dealt out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """This process among those that train together: number `rank` of `size`. Every method is collective."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def alone(self) -> bool:
        """Whether this process trains by itself."""
        return self.size == 1

    def sum(self, value: float) -> float:
        """The sum of `value` over all ranks."""
        return float(self.total(torch.tensor(value, dtype=torch.float64))) if not self.alone else value

    def total(self, values: Tensor) -> Tensor:
        """The elementwise sum of a tensor of equal shape over all ranks."""
        if self.alone:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank, so that all of them stop together and none waits for the others."""
        return flag if self.alone else self.sum(float(flag)) > 0

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def from_first(self, value: Any) -> Any:
        """What rank 0 has."""
        if self.alone:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def sum_rows(self, sparse: Tensor) -> Tensor:
        """The sum over all ranks of a sparse gradient of rows, coalesced."""
        own = sparse.coalesce()
        if self.alone:
            return own
        parts = self.gather((own.indices().cpu(), own.values().cpu()))
        indices = torch.cat([part[0] for part in parts], dim=1).to(own.device)
        values = torch.cat([part[1] for part in parts]).to(own.device)
        return torch.sparse_coo_tensor(indices, values, own.shape, check_invariants=False).coalesce()


ALONE = Ranks()
"""A process that trains by itself."""
