"""Gradients of routing: one pass over the affinities, and two products of bfloat16 numbers."""

# Kernels are written in Triton's language, which Python's types do not describe.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false, reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.ops.tile import round_bf16


@triton.jit
def _logit_gradients(
    affinity, ids, grad_affinity, grad_weights, parts, count, factor, inverse_temperature, E: tl.constexpr,
    EP: tl.constexpr, K: tl.constexpr, OF_AFFINITY: tl.constexpr, OF_WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Back through the weights' normalisation and sqrt(softplus); `parts` [T, 2, E] high and low."""
    t = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    e = tl.arange(0, EP)[None, :]
    keep = (t < count)[:, None] & (e < E)
    a = tl.load(affinity + t[:, None] * E + e, mask=keep, other=0.0)
    grad = tl.zeros((ROWS, EP), tl.float32)
    if OF_AFFINITY:
        grad += tl.load(grad_affinity + t[:, None] * E + e, mask=keep, other=0.0)
    if OF_WEIGHTS:
        total = tl.full((ROWS,), 1e-20, tl.float32)
        inner = tl.zeros((ROWS,), tl.float32)
        for k in tl.static_range(K):
            chosen = tl.load(ids + t * K + k, mask=t < count, other=0)
            own = tl.sum(tl.where(e == chosen[:, None], a, 0.0), 1)
            total += own
            inner += own * tl.load(grad_weights + t * K + k, mask=t < count, other=0.0)
        inner = inner / total
        for k in tl.static_range(K):
            chosen = tl.load(ids + t * K + k, mask=t < count, other=0)
            g = tl.load(grad_weights + t * K + k, mask=t < count, other=0.0)
            part = (g - inner) * (factor / total)
            grad += tl.where(e == chosen[:, None], part[:, None], 0.0)
    # softplus(l) = a^2, so that its slope sigmoid(l) is 1 - exp(-a^2).
    x = a * a
    slope = tl.where(x < 0.01, x * (1.0 - x * (0.5 - x * (1.0 / 6.0 - x / 24.0))), 1.0 - tl.exp(-x))
    grad = grad * slope * inverse_temperature / (2.0 * tl.maximum(a, 1e-18))
    high = round_bf16(grad)
    low = round_bf16(grad - high.to(tl.float32))
    place = parts + t[:, None] * (2 * E) + e
    tl.store(place, high.to(parts.dtype.element_ty), mask=keep)
    tl.store(place + E, low.to(parts.dtype.element_ty), mask=keep)


def logit_gradients(
    affinity: Tensor,
    ids: Tensor,
    grad_affinity: Tensor | None,
    grad_weights: Tensor | None,
    *,
    factor: float,
    temperature: float,
) -> Tensor:
    """Gradient of the router's logits as a sum of two: [T, 2 E] bf16, high parts and then low ones.

    Args:
        affinity: [T, E] fp32.
        ids: [T, k] int64 of the chosen experts.
        grad_affinity: [T, E] fp32, or None for zeros.
        grad_weights: [T, k] fp32, or None for zeros.
        factor: what a token's weights sum to.
        temperature: divides the logits.
    """
    count, experts = affinity.shape
    padded = max(16, triton.next_power_of_2(experts))
    rows = max(1, 1024 // padded)
    parts = torch.empty((count, 2 * experts), dtype=torch.bfloat16, device=affinity.device)
    _logit_gradients[(triton.cdiv(count, rows),)](
        affinity, ids, affinity if grad_affinity is None else grad_affinity.contiguous(),
        affinity if grad_weights is None else grad_weights.contiguous(), parts, count, factor,
        1.0 / temperature, E=experts, EP=padded, K=ids.shape[1], OF_AFFINITY=grad_affinity is not None,
        OF_WEIGHTS=grad_weights is not None, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return parts


def route_gradients(parts: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of tokens [T, d] and router [E, d] from `logit_gradients`, summed in fp32."""
    grad_x = torch.mm(parts, torch.cat([weight, weight]))
    both = torch.mm(parts.t(), x, out_dtype=torch.float32)
    return grad_x, (both[: len(weight)] + both[len(weight) :]).to(weight.dtype)
