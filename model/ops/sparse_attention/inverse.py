"""For each compressed entry, the queries that selected it: a scattered sum becomes a gathered one.

Summing an entry's rows in list order gives the same bits every time; atomics do not. Layers that reuse one
selection share one inverse.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Queries whose gradient rows are kept at once: 8192 x 512 rows of 1 KiB are 4.3 GB.
CHUNK = 8192


@dataclass(frozen=True, slots=True)
class InverseIndex:
    """Compressed sparse rows over entries, per chunk: `slots[c][pointers[c][e]:pointers[c][e + 1]]`.

    A slot is `query_in_chunk * K + position`.
    """

    chunk: int
    pointers: list[Tensor]
    slots: list[Tensor]


def invert(indices: Tensor, entries: int, chunk: int = CHUNK) -> InverseIndex:
    """The inverse of a selection [T, K] int32 (-1 for none) over `entries` rows."""
    pointers, slots = [], []
    bounds = torch.arange(entries + 1, device=indices.device, dtype=indices.dtype)
    for part in indices.split(chunk):
        ordered, order = torch.sort(part.reshape(-1), stable=True)
        pointers.append(torch.searchsorted(ordered, bounds).to(torch.int32))
        slots.append(order.to(torch.int32))
    return InverseIndex(chunk, pointers, slots)
