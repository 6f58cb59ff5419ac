"""Single-pass manifold-constrained hyper-connections: n residual streams mixed by a doubly stochastic matrix.

Each site (one attention or expert layer) computes from the streams X [T, n, d] three sets of coefficients: A
[T, n] collapses the streams for the *next* site, C [T, n] writes this site's output into the streams, and M
[n, n, T] (in, out, token) carries the streams over. Coefficients are laid out with tokens last: a Sinkhorn
step on [n, n, T] is several times faster than on [T, n, n]. Gradients are written out for the same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import PolicyConfig
from model.layers.exact import is_exact
from model.layers.linear import wide_linear
from model.layers.norm import inverse_rms

_OUTPUTS = 1
"""The dimension of M that numbers outputs."""


def sum_patterns(n: int) -> tuple[Tensor, Tensor]:
    """[n, n * n] matrices whose product with M [n * n, T] sums over inputs, and over outputs.

    Sums as a small matrix product take a fraction of the time of a reduction over a leading dimension.
    """
    one = torch.eye(n, device="cpu")
    return one.repeat(1, n), one.repeat_interleave(n, dim=1)


def _normalize(
    matrix: Tensor, over_inputs: bool, patterns: tuple[Tensor, Tensor], eps: Tensor
) -> tuple[Tensor, Tensor]:
    """M / (sums + eps), and the sums + eps shaped to divide M."""
    dimension = 0 if over_inputs else 1
    if is_exact():
        first, *others = matrix.unbind(dimension)
        total = sum(others, first).add(eps).unsqueeze(dimension)
    else:
        total = torch.addmm(eps, patterns[dimension], matrix.flatten(0, 1)).unsqueeze(dimension)
    return matrix / total, total


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, rounds: int, eps: Tensor, over_inputs: Tensor, over_outputs: Tensor
    ) -> Tensor:
        softmax = logits.softmax(_OUTPUTS)
        matrix = softmax + eps
        steps: list[Tensor] = []
        for step in range(2 * rounds - 1):
            matrix, total = _normalize(matrix, step % 2 == 0, (over_inputs, over_outputs), eps)
            steps += [matrix, total]
        ctx.save_for_backward(softmax, over_inputs, over_outputs, *steps)
        return matrix

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, over_inputs, over_outputs, *steps = ctx.saved_tensors
        grad = grads[0]
        for step in reversed(range(len(steps) // 2)):
            matrix, total = steps[2 * step : 2 * step + 2]
            pattern = over_outputs if step % 2 else over_inputs
            inner = torch.mm(pattern, (grad * matrix).flatten(0, 1)).view(total.shape)
            grad = (grad - inner).div_(total)
        grad = torch.ops.aten._softmax_backward_data(grad, softmax, _OUTPUTS, softmax.dtype)
        return grad, None, None, None, None


def sinkhorn(logits: Tensor, rounds: int, eps: Tensor, patterns: tuple[Tensor, Tensor]) -> Tensor:
    """Nearly doubly stochastic [n_in, n_out, T]: softmax over outputs, then alternate normalisations.

    The last of the `rounds` rounds ends with the column (input) sums. `patterns` are those of `sum_patterns`.
    """
    if torch.is_grad_enabled():
        return _Sinkhorn.apply(logits, rounds, eps, *patterns)  # pyright: ignore[reportReturnType]
    matrix = logits.softmax(_OUTPUTS) + eps
    for step in range(2 * rounds - 1):
        matrix, _ = _normalize(matrix, step % 2 == 0, patterns, eps)
    return matrix


class _Collapse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, streams: Tensor) -> Tensor:
        ctx.save_for_backward(weights, streams)
        return (weights.unsqueeze(-1) * streams).sum(-2)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        weights, streams = ctx.saved_tensors
        grad = grads[0].unsqueeze(-2)
        return (grad * streams).sum(-1), weights.unsqueeze(-1) * grad


def collapse(weights: Tensor, streams: Tensor) -> Tensor:
    """Sum_s A[s] X[s]: weights [T, n], streams [T, n, d] to [T, d], in the dtype of the streams."""
    wide = streams.float() if streams.dtype is torch.bfloat16 else streams
    if torch.is_grad_enabled():
        return _Collapse.apply(weights, wide).to(streams.dtype)  # pyright: ignore[reportOptionalMemberAccess]
    return (weights.unsqueeze(-1) * wide).sum(-2).to(streams.dtype)


def _mix(carry: Tensor, streams: Tensor, write: Tensor, update: Tensor) -> Tensor:
    out_in = carry.permute(2, 1, 0).contiguous()  # [T, out, in]: bmm loops over a strided matrix
    return torch.bmm(out_in, streams).addcmul_(write.unsqueeze(-1), update.unsqueeze(-2))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carry: Tensor, streams: Tensor, write: Tensor, update: Tensor) -> Tensor:
        ctx.save_for_backward(carry, streams, write, update)
        return _mix(carry, streams, write, update)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        carry, streams, write, update = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_streams = torch.bmm(carry.permute(2, 0, 1).contiguous(), grad)
        grad_carry = torch.bmm(streams, grad.transpose(1, 2)).permute(1, 2, 0)
        grad_write = (grad * update.unsqueeze(-2)).sum(-1)
        return grad_carry, grad_streams, grad_write, (grad * write.unsqueeze(-1)).sum(-2)


def mix(carry: Tensor, streams: Tensor, write: Tensor, update: Tensor) -> Tensor:
    """X'[o] = C[o] y + Sum_i M[i, o] X[i], in the dtype of the streams.

    Shapes: carry M [n, n, T], streams X [T, n, d], write C [T, n], update y [T, d].
    """
    narrow = streams.dtype is torch.bfloat16
    if narrow:
        streams, update = streams.float(), update.float()
    if torch.is_grad_enabled():
        mixed: Tensor = _Mix.apply(carry, streams, write, update)  # pyright: ignore[reportAssignmentType]
    else:
        mixed = _mix(carry, streams, write, update)
    return mixed.to(torch.bfloat16) if narrow else mixed


class HyperConnection(nn.Module):
    """The coefficients of one site: `fn` [(2 + n) n, n d], `base` [(2 + n) n], `scale` [3]."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        streams = config.hc_mult
        rows = (2 + streams) * streams
        self.streams, self.rounds = streams, config.hc_sinkhorn_iters
        self.norm_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty(rows, streams * config.hidden_size))
        self.base = nn.Parameter(torch.empty(rows))
        self.scale = nn.Parameter(torch.empty(3))
        # A tensor, because each use of a Python number in an operation costs a conversion.
        self.register_buffer("eps", torch.tensor(config.hc_eps, device="cpu"), persistent=False)
        for name, pattern in zip(("over_inputs", "over_outputs"), sum_patterns(streams), strict=True):
            self.register_buffer(name, pattern, persistent=False)
        self.eps: Tensor
        self.over_inputs: Tensor
        self.over_outputs: Tensor

    def mixes(self, streams: Tensor) -> Tensor:
        """The raw values [(2 + n) n, T]: one RMS over all streams, applied after the projection."""
        flat = streams.flatten(1)
        scale = inverse_rms(flat.to(self.fn.dtype), self.norm_eps)
        return (wide_linear(flat, self.fn) * scale).t()

    def coefficients(self, mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A [T, n], C [T, n], M [n_in, n_out, T] from the raw values."""
        n = self.streams
        base = self.base.unsqueeze(-1)
        pre = torch.sigmoid(torch.addcmul(base[:n], mixes[:n], self.scale[0])) + self.eps
        post = 2 * torch.sigmoid(torch.addcmul(base[n : 2 * n], mixes[n : 2 * n], self.scale[1]))
        carry = torch.addcmul(base[2 * n :], mixes[2 * n :], self.scale[2]).view(n, n, -1)
        return (
            pre.t(),
            post.t(),
            sinkhorn(carry, self.rounds, self.eps, (self.over_inputs, self.over_outputs)),
        )

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A, C and M of streams [T, n, d]."""
        return self.coefficients(self.mixes(streams))
