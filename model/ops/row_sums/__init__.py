"""Gradient of a table lookup: the rows that were read, each once, with the sum over its lookups."""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.row_sums import reference

__all__ = ["row_sums"]


def row_sums(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the values of equal ids, in the order in which they stand: the same bits every time.

    Args:
        values: [N, w].
        ids: [N] int64.

    Returns:
        Distinct ids [U] ascending, and sums [U, w] fp32 (fp64 of fp64 values).
    """
    if values.ndim != 2 or ids.shape != values.shape[:1]:
        raise ValueError(
            f"values {tuple(values.shape)} need one id a row, got {tuple(ids.shape)}: pass [N, w] and [N]"
        )
    if use_kernel("row_sums", values):
        from model.ops.row_sums import triton

        return triton.row_sums(values, ids)
    return reference.row_sums(values, ids)
