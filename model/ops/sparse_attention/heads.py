"""The projection of attention heads by group, written where the next product reads it."""

import torch
from torch import Tensor

from model.ops.exact_linear import exact_linear

# Rows a call: with more the library takes a kernel that is half as fast.
_ROWS = 8192


def group_heads(heads: Tensor, weight: Tensor, exact: bool) -> Tensor:
    """Heads [T, H, D] times the matrices [G, N, H D / G] of their groups: [T, G N]."""
    grouped = by_group(heads, len(weight))
    if exact:
        return exact_linear(grouped, weight).transpose(0, 1).flatten(1)
    if torch.is_grad_enabled():
        return torch.bmm(grouped, weight.transpose(1, 2)).transpose(0, 1).flatten(1)
    return product(grouped, weight.transpose(1, 2))


def by_group(heads: Tensor, groups: int) -> Tensor:
    """[T, ...] as [G, T, ... / G], a view."""
    return heads.flatten(1).unflatten(1, (groups, -1)).transpose(0, 1)


def product(grouped: Tensor, matrices: Tensor) -> Tensor:
    """[G, T, K] times [G, K, N]: [T, G N], groups side by side; without gradient."""
    groups, count, _ = grouped.shape
    out = grouped.new_empty(count, groups * matrices.shape[2])
    apart = by_group(out, groups)
    for start in range(0, count, _ROWS):
        part = slice(start, start + _ROWS)
        torch.bmm(grouped[:, part], matrices, out=apart[:, part])
    return out
