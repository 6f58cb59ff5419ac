"""What the n-gram memory adds to the streams: norms, dot product, gate and sum in one pass over them."""

import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.engram_gate import reference

__all__ = ["engram_gate"]


def engram_gate(
    streams: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, text: Tensor | None, *, eps: float
) -> Tensor:
    """Streams with the memory's value added, gated by how well its key fits each stream.

    dot = sum(norm(x) q_weight norm(k) k_weight) / sqrt(d); gate = sigmoid(sign(dot) sqrt(max(|dot|, 1e-6)));
    out = x + gate v.

    Args:
        streams: [T, n, d] x.
        projected: [T, (n + 1) d]: a key k for each stream, then the value v.
        q_weight: [n, d] weights of the streams' RMSNorm.
        k_weight: [n, d] those of the keys.
        text: [T] bool, false on tokens that take nothing; None for none of them.
        eps: of the norms.

    Returns:
        [T, n, d] in the dtype of `streams`, differentiable in all but `text`.
    """
    count, n, width = streams.shape
    if projected.shape != (count, (n + 1) * width) or not q_weight.shape == k_weight.shape == (n, width):
        raise ValueError(
            f"streams {tuple(streams.shape)}, projected {tuple(projected.shape)} and weights "
            f"{tuple(q_weight.shape)}, {tuple(k_weight.shape)} must agree: [T, n, d], [T, (n + 1) d], [n, d]"
        )
    if streams.dtype is torch.bfloat16 and use_kernel("engram_gate", streams):
        from model.ops.engram_gate.autograd import EngramGate

        return EngramGate.apply(streams, projected, q_weight, k_weight, text, eps)  # pyright: ignore
    return reference.engram_gate(streams, projected, q_weight, k_weight, text, eps=eps)
