"""Gradients through whole sites, for the interpreter's process: the joints between kernels and autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from model.ops.sparse_attention.triton import KeyRows


def of_attention(
    leaves: list[Tensor], indices: Tensor, first: Tensor, angles: tuple[Tensor, Tensor], grad: Tensor
) -> list[Tensor]:
    """Result of `AttentionSite` and its gradients by query, entries, window, sink and weight."""
    from model.ops.sparse_attention.autograd import AttentionSite

    query, entries, window, sink, weight = (x.requires_grad_() for x in leaves)
    last = torch.arange(len(query)).int()
    options = query.shape[2] ** -0.5, 12, None, False
    own = query.clone()
    arguments = own, entries, indices, window, first, last, sink, *angles, weight, options
    out, _ = AttentionSite.apply(*arguments)  # pyright: ignore[reportGeneralTypeIssues]
    return [out.detach(), *torch.autograd.grad(out, (query, entries, window, sink, weight), grad)]


def of_hyper_connections(leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Results of a site and of the next input, and gradients by all `leaves`."""
    from model.ops.hyper_boundary.autograd import Coefficients, Input, Update

    product = torch.mm
    # A CPU has no product of bfloat16 tensors with a float32 result.
    torch.mm = lambda a, b, **_: product(a.float(), b.float())
    try:
        streams, branch, norm, projection, base, scale = (x.requires_grad_() for x in leaves)
        squares = streams.detach().float().square().sum((1, 2))
        k, same = Coefficients.apply(streams, squares, projection, base, scale)  # pyright: ignore
        after, normed, _ = Update.apply(same, branch, k, norm, 1e-6)  # pyright: ignore
        again, _ = Input.apply(after, k, norm, 1e-6)  # pyright: ignore
        results = after, normed, again, k
        return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, grads)]
    finally:
        torch.mm = product


def kept_probabilities(
    query: Tensor, table: Tensor, keys: KeyRows, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact forward: output, log-sum-exp, and what it keeps."""
    from model.ops.sparse_attention import triton

    kept = triton.Kept.empty(query, keys, 1)
    results = triton.forward(query, table, keys, sink, scale=scale, exact=True, kept=kept)
    return *results, kept.weights, kept.tops
