"""The next token of each row: temperature, top-k, top-p and a draw that depends on seed and position only.

Probabilities become integers before they are summed, so that no sum depends on its order: the kernel and its
definition draw the same token from the same logits, whatever is batched with them.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.sampling import reference
from model.ops.sampling.reference import Drawn, Rules, invert, truncate, uniforms

__all__ = ["Drawn", "Rules", "invert", "sampling", "truncate", "uniforms"]


def sampling(logits: Tensor, rules: Rules, *, exact: bool = False) -> Drawn:
    """Draw one token a row.

    Args:
        logits: [B, V] fp32. A row with NaN, +inf or nothing but -inf yields some id in range and NaN as its
            log-probabilities.
        rules: of the B rows, on the host.
        exact: log-probabilities have the bits of `torch.log_softmax`, as a trainer computes them: the
            definition runs, on the device of the logits.

    Returns:
        What was drawn, on the host.
    """
    if logits.ndim != 2 or str(logits.dtype) != "torch.float32" or logits.shape[0] != len(rules.top_k):
        raise ValueError(
            f"sampling takes fp32 logits [B, V] and {len(rules.top_k)} rules for B rows, "
            f"got {logits.dtype} {tuple(logits.shape)}"
        )
    if not exact and use_kernel("sampling", logits):
        from model.ops.sampling import triton

        return triton.sampling(logits, rules)
    return reference.sampling(logits, rules)
