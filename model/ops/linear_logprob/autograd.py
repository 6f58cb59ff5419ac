"""The fused log-probability under autograd: fast or with a sampler's bits forward, one way backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.choices import log_softmax, tempered
from model.ops.exact_linear import exact_linear
from model.ops.linear_logprob.triton import COLUMNS, forward, logit_gradients
from model.ops.logit_tiles import input_gradients

# Logits that the exact forward holds at once: 512 MB.
_EXACT_ELEMENTS = 1 << 27


class LinearLogprob(torch.autograd.Function):
    """See `model.ops.linear_logprob.linear_logprob`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, exact: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the inputs and two numbers a row."""
        hidden, weight = hidden.contiguous(), weight.contiguous()
        run = exact_forward if exact else forward
        logprob, entropy, lse, correct = run(hidden, weight, labels, temperature=temperature)
        ctx.save_for_backward(hidden, weight, labels, lse, entropy)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(correct)
        return logprob, entropy, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and weight."""
        hidden, weight, labels, lse, entropy = ctx.saved_tensors
        rows = labels, lse, entropy, grads[0].contiguous(), grads[1].contiguous()

        def gradients(words: slice, out: Tensor) -> Tensor:
            return logit_gradients(hidden, weight, *rows, temperature=ctx.temperature, columns=words, out=out)

        return *input_gradients(hidden, weight, COLUMNS, gradients), None, None, None


def exact_forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernel's `forward`, by the very steps of a sampler in exact mode, a chunk of rows at a time."""
    out = torch.empty((3, len(hidden)), dtype=torch.float32, device=hidden.device)
    correct = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    rows = max(1, _EXACT_ELEMENTS // len(weight))
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        label = labels[part, None]
        scaled = tempered(exact_linear(hidden[part], weight, dtype=torch.float32), temperature)
        logp = log_softmax(scaled)
        chosen = logp.gather(1, label)
        out[0, part] = chosen[:, 0]
        out[1, part] = -(logp.exp() * logp).sum(-1)
        out[2, part] = (scaled.gather(1, label) - chosen)[:, 0]
        correct[part] = logp.argmax(1) == label[:, 0]
    return out[0], out[1], out[2], correct
