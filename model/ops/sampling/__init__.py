"""The next token of each row: temperature, top-k, top-p and a draw that depends on seed and position only.

Probabilities become integers before they are summed, so that no sum depends on its order: the kernel and its
definition draw the same token from the same logits, whatever is batched with them.
"""

import numpy as np
import torch
from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.sampling import reference
from model.ops.sampling.reference import MOST_IDS, Drawn, Rules, invert, truncate, uniforms

__all__ = ["Drawn", "Rules", "draw", "invert", "sampling", "truncate", "uniforms"]


def draw(logits: Tensor, seeds: np.ndarray, positions: np.ndarray) -> Tensor:
    """Ids [B] int64 drawn from softmax of logits [B, V] fp32, by seeds uint64 [B] at positions [B]."""
    if len(logits) and use_kernel("sampling", logits):
        from model.ops.sampling import triton

        places = torch.from_numpy(positions.astype(np.int64))
        return triton.draw(logits, torch.from_numpy(seeds.view(np.int64)), places)
    return invert(logits, torch.from_numpy(uniforms(seeds, positions)).to(logits.device))


def sampling(logits: Tensor, rules: Rules, *, exact: bool = False) -> Drawn:
    """Draw one token a row.

    Args:
        logits: [B, V] fp32. A row with NaN, +inf or nothing but -inf yields some id in range and NaN as its
            log-probabilities.
        rules: of the B rows, on the host.
        exact: log-probabilities have the bits of `model.choices.log_softmax`, as a trainer computes them.
            Where top-k or top-p drop ids the definition runs, on the device of the logits.

    Returns:
        What was drawn, on the host.
    """
    if logits.ndim != 2 or str(logits.dtype) != "torch.float32" or logits.shape[0] != len(rules.top_k):
        raise ValueError(
            f"sampling takes fp32 logits [B, V] and {len(rules.top_k)} rules for B rows, "
            f"got {logits.dtype} {tuple(logits.shape)}"
        )
    if logits.shape[1] > MOST_IDS:
        raise ValueError(f"sampling sums integer weights of up to {MOST_IDS} ids, got {logits.shape[1]}")
    by_definition = exact and bool(rules.truncating(logits.shape[1]).any())
    if not by_definition and use_kernel("sampling", logits):
        from model.ops.sampling import triton

        return triton.sampling(logits, rules, exact=exact)
    return reference.sampling(logits, rules)
