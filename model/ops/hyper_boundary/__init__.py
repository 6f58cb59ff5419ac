"""The boundary between two sites of single-pass hyper-connections.

Residual update, coefficients of the next site, its input mix and its norm.
The input mix of the next site uses coefficients that are already known, so the streams are read and written
once.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.hyper_boundary import reference

__all__ = ["STREAMS", "hyper_boundary"]

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
