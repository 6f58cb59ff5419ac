"""The boundary between two sites of single-pass hyper-connections.

Residual update, coefficients of the next site, its input mix and its norm.
The input mix of the next site uses coefficients that are already known, so the streams are read and written
once.
"""

import sys

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.hyper_boundary import reference

__all__ = [
    "STREAMS",
    "hyper_boundary",
    "hyper_coefficients",
    "hyper_input",
    "hyper_update",
    "hyper_update_of_rows",
    "refresh_projections",
]

STREAMS = reference.STREAMS


def hyper_boundary(
    streams: Tensor,
    branch: Tensor,
    coefficients: Tensor,
    projection: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Finish one site and prepare the next one.

    With coefficients (A [4], C [4], M [4, 4]) of this site: streams'[o] = C[o] branch + sum_i M[i, o]
    streams[i]; input = RMSNorm(sum_s A[s] streams'[s]); the next coefficients come from streams'
    (`reference.coefficients`).

    Args:
        streams: [T, 4, d] bf16.
        branch: [T, d] bf16, the output of this site's attention or mixture of experts.
        coefficients: [T, 24] fp32, A, C and M (row-major) of this site.
        projection: [24, 4 d] fp32 of the next site.
        base: [24] fp32 of the next site.
        scale: [3] fp32 of the next site.
        norm: [d] weight of the next site's norm.
        eps: of the norm.

    Returns:
        streams' [T, 4, d], normalised input of the next site [T, d], next coefficients [T, 24] fp32.
        Differentiable through the definition only: when a gradient is needed that is what runs.
    """
    count, streams_count, width = streams.shape
    if (
        streams_count != STREAMS
        or branch.shape != (count, width)
        or projection.shape != (24, STREAMS * width)
    ):
        raise ValueError(
            f"streams {tuple(streams.shape)}, branch {tuple(branch.shape)} and "
            f"projection {tuple(projection.shape)} "
            f"must be [T, {STREAMS}, d], [T, d] and [24, {STREAMS} d]"
        )
    arguments = (streams, branch, coefficients, projection, base, scale, norm)
    if use_kernel("hyper_boundary", streams, without_gradient=arguments):
        from model.ops.hyper_boundary import triton

        return triton.hyper_boundary(*arguments, eps=eps)
    return reference.hyper_boundary(*arguments, eps=eps)


def hyper_input(streams: Tensor, coefficients: Tensor, norm: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Input of a site: RMSNorm(sum_s A[s] streams[s]), and the streams' sums of squares.

    Args:
        streams: [T, 4, d] bf16.
        coefficients: [T, 24] fp32 of the site before; its A is read.
        norm: [d] weight of the site's norm.
        eps: of the norm.

    Returns:
        [T, d], differentiable, and [T] fp32 for `hyper_coefficients`, without gradient.
    """
    if use_kernel("hyper_input", streams):
        from model.ops.hyper_boundary.autograd import Input

        return Input.apply(streams.contiguous(), coefficients, norm, eps)  # pyright: ignore[reportReturnType]
    return reference.site_input(streams, coefficients, norm, eps)


def hyper_update(
    streams: Tensor, branch: Tensor, coefficients: Tensor, norm: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Finish a site and make the input of the next: `hyper_boundary` without the next coefficients.

    Returns:
        streams' [T, 4, d] and the next input [T, d], differentiable, and the sums of squares [T] of streams'.
    """
    if use_kernel("hyper_update", streams):
        from model.ops.hyper_boundary.autograd import Update

        return Update.apply(  # pyright: ignore[reportReturnType]
            streams.contiguous(), branch.contiguous(), coefficients.contiguous(), norm, eps
        )
    return reference.update(streams, branch, coefficients, norm, eps)


def hyper_update_of_rows(
    streams: Tensor, rows: Tensor, place: Tensor, coefficients: Tensor, norm: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`hyper_update` whose branch is the sum of a token's rows `place` [T, k] int32 of `rows` [n, d].

    What experts give is summed where it is read. Without gradient.
    """
    if use_kernel("hyper_update_of_rows", streams):
        from model.ops.hyper_boundary import triton

        return triton.update(streams, rows, coefficients, norm, eps, place=place)
    branch = rows[place.long()].float().sum(1).to(rows.dtype)
    return reference.update(streams, branch, coefficients, norm, eps)


def hyper_coefficients(
    streams: Tensor, squares: Tensor, projection: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Coefficients of a site, differentiable.

    Args:
        streams: [T, 4, d] bf16.
        squares: [T] fp32, their sums of squares.
        projection: [24, 4 d] fp32.
        base: [24] fp32.
        scale: [3] fp32.

    Returns:
        [T, 24] fp32, and the streams for what reads them after this: their two gradients are then added in
        the pass that makes the one, and not in another over both.
    """
    if use_kernel("hyper_coefficients", streams):
        from model.ops.hyper_boundary import triton
        from model.ops.hyper_boundary.autograd import Coefficients

        if not torch.is_grad_enabled():
            return triton.coefficients(streams, squares, triton.split_of(projection), base, scale), streams
        return Coefficients.apply(streams, squares, projection, base, scale)  # pyright: ignore[reportReturnType]
    return reference.coefficients(streams, projection, base, scale), streams


def refresh_projections() -> None:
    """Bring what kernels keep of projections up to date, before a captured graph is replayed."""
    if (triton := sys.modules.get("model.ops.hyper_boundary.triton")) is not None:
        triton.refresh_projections()
