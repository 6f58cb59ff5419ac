"""Log-probability of one token a row, and the entropy, straight from hidden states: no logits are kept.

For 8192 tokens and 129,280 words the logits alone would take 2.1 GB in bf16; the backward recomputes them by
chunks.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.linear_logprob import reference

__all__ = ["linear_logprob", "serves"]

DEPTH = 64


def serves(*tensors: Tensor) -> bool:
    """Whether kernels take these hidden states and heads: bf16, of widths that are multiples of 64."""
    return all(str(x.dtype) == "torch.bfloat16" and x.shape[1] % DEPTH == 0 for x in tensors)


def linear_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float = 1.0, exact: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Log softmax(hidden @ weight.T / temperature) at the labels, and the entropy of that softmax.

    Args:
        hidden: [T, d].
        weight: [V, d] of the same dtype.
        labels: [T] int64 in [0, V).
        temperature: divides the logits.
        exact: log-probabilities have the bits that a sampler in exact mode computes: on a card, logits exist
            by chunks of rows. Gradients are the same as without.

    Returns:
        Log-probabilities [T] and entropies [T] in nats, fp32, differentiable in hidden and weight; and bool
        [T], whether the label is the most likely word, of equal ones the first.
    """
    if hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype or labels.shape != hidden.shape[:1]:
        raise ValueError(
            f"hidden {hidden.dtype} {tuple(hidden.shape)}, weight {weight.dtype} {tuple(weight.shape)} "
            f"and labels {tuple(labels.shape)} must agree in dtype, width and rows"
        )
    if temperature <= 0:
        raise ValueError(
            f"temperature must be positive, got {temperature}; greedy choice needs no log-probability"
        )
    if use_kernel("linear_logprob", hidden):
        if not serves(hidden, weight):
            raise ValueError(
                f"the kernel takes bf16 and widths in multiples of {DEPTH}, got {hidden.dtype} "
                f"{hidden.shape[1]}"
            )
        from model.ops.linear_logprob.autograd import LinearLogprob

        return LinearLogprob.apply(hidden, weight, labels, temperature, exact)  # pyright: ignore[reportReturnType]
    return reference.linear_logprob(hidden, weight, labels, temperature=temperature)
