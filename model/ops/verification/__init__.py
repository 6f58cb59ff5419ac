"""Which drafts become tokens, by rejection sampling, and the token that follows the last accepted one."""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.verification import reference

__all__ = ["verification"]


def verification(
    target: Tensor,
    proposed: Tensor,
    index: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    draws: Tensor,
    rest_draws: Tensor,
) -> tuple[Tensor, Tensor]:
    """Accept a draft x of q with probability min(1, p / q); the first refused gives way to max(p - q, 0).

    Probabilities are those of integer weights (`model.ops.sampling`), so kernel and definition decide alike.

    Args:
        target: [T, V] fp32 logits of p, tempered and truncated (-inf).
        proposed: [S, R, V] logits of q, of S >= K slots.
        index: [R, K + 1] row of `target` for each number of drafts before.
        drafts: [R, K] int64.
        lengths: [R] int64, how many of the K are checked.
        draws: [R, K] float64 in [0, 1), that decide on the drafts.
        rest_draws: [R] float64, for the token after the accepted ones.

    Returns:
        How many are accepted [R] and the token after them [R], both int64.
    """
    requests, width = drafts.shape
    if index.shape != (requests, width + 1) or draws.shape != drafts.shape or len(proposed) < width:
        raise ValueError(
            f"drafts {tuple(drafts.shape)} need index [R, K + 1], draws [R, K] and K proposals, got "
            f"{tuple(index.shape)}, {tuple(draws.shape)} and {len(proposed)}"
        )
    rows = (index, drafts, lengths, draws, rest_draws)
    if use_kernel("verification", target):
        from model.ops.verification import triton

        return triton.verification(target, proposed, *rows)
    return reference.verification(target, proposed, *rows)
