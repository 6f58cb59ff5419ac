"""Gradient of a table lookup: the rows that were read, each once, with the sum over its lookups."""

from typing import NamedTuple

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.row_sums import reference

__all__ = ["Distinct", "distinct", "row_sums"]


class Distinct(NamedTuple):
    """Which of N ids are equal."""

    rows: Tensor
    """[U] the ids, ascending, each once."""
    order: Tensor
    """[N] places of the ids by id, equal ones in their order."""
    ends: Tensor
    """[U] up to where `order` lists each of `rows`."""


def distinct(ids: Tensor) -> Distinct:
    """Sort `ids` [N] int64. Their number decides a shape: on a device this waits for it."""
    ordered, order = ids.sort(stable=True)
    rows, counts = ordered.unique_consecutive(return_counts=True)
    return Distinct(rows, order, counts.cumsum(0))


def row_sums(values: Tensor, ids: Tensor, found: Distinct | None = None) -> tuple[Tensor, Tensor]:
    """Sum the values of equal ids, in the order in which they stand: the same bits every time.

    Args:
        values: [N, w].
        ids: [N] int64.
        found: `distinct(ids)`, for those who had time to wait for it before.

    Returns:
        Distinct ids [U] ascending, and sums [U, w] fp32 (fp64 of fp64 values).
    """
    if values.ndim != 2 or ids.shape != values.shape[:1]:
        raise ValueError(
            f"values {tuple(values.shape)} need one id a row, got {tuple(ids.shape)}: pass [N, w] and [N]"
        )
    if use_kernel("row_sums", values):
        from model.ops.row_sums import triton

        found = distinct(ids) if found is None else found
        return found.rows, triton.launch(values.contiguous(), found.order, found.ends)
    return reference.row_sums(values, ids)
