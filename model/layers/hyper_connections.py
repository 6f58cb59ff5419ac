"""Single-pass manifold-constrained hyper-connections: n residual streams, mixed by a doubly stochastic matrix.

Each site (one attention or expert layer) computes from the streams X [T, n, d] three sets of coefficients: A [T, n]
collapses the streams for the *next* site, C [T, n] writes this site's output into the streams, and M [n, n, T]
(in, out, token) carries the streams over. Coefficients are laid out with tokens last: a Sinkhorn step on [n, n, T]
is several times faster than on [T, n, n]. Gradients are written out for the same reason.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import PolicyConfig
from model.layers.norm import inverse_rms

_OUT, _IN = 1, 0
"""Dimensions of M that a normalisation sums over: to row sums (over outputs) or column sums (over inputs)."""


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, rounds: int, eps: float) -> Tensor:
        matrix = softmax = logits.softmax(_OUT)
        matrix = softmax + eps
        steps: list[Tensor] = []
        for step in range(2 * rounds - 1):
            total = matrix.sum(_IN if step % 2 == 0 else _OUT, keepdim=True).add_(eps)
            matrix = matrix / total
            steps += [matrix, total]
        ctx.save_for_backward(softmax, *steps)
        return matrix

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        softmax, *steps = ctx.saved_tensors
        grad = grads[0]
        for step in reversed(range(len(steps) // 2)):
            matrix, total = steps[2 * step : 2 * step + 2]
            inner = (grad * matrix).sum(_IN if step % 2 == 0 else _OUT, keepdim=True)
            grad = (grad - inner).div_(total)
        inner = (grad * softmax).sum(_OUT, keepdim=True)
        return (grad - inner).mul_(softmax), None, None


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """Nearly doubly stochastic [n_in, n_out, T] from logits: softmax over outputs, then alternate normalisations.

    The last of the `rounds` rounds ends with the column (input) sums.
    """
    return _Sinkhorn.apply(logits, rounds, eps)  # pyright: ignore[reportReturnType]


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
    wide = _Collapse.apply(weights, streams.float() if streams.dtype is torch.bfloat16 else streams)
    return wide.to(streams.dtype)  # pyright: ignore[reportOptionalMemberAccess]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carry: Tensor, streams: Tensor, write: Tensor, update: Tensor) -> Tensor:
        out_in = carry.permute(2, 1, 0).contiguous()  # [T, out, in]: bmm loops over a strided matrix
        ctx.save_for_backward(carry, streams, write, update)
        return torch.bmm(out_in, streams).addcmul_(write.unsqueeze(-1), update.unsqueeze(-2))

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
    if streams.dtype is torch.bfloat16:
        wide = _Mix.apply(carry, streams.float(), write, update.float())
        return wide.to(streams.dtype)  # pyright: ignore[reportOptionalMemberAccess]
    return _Mix.apply(carry, streams, write, update)  # pyright: ignore[reportReturnType]


class HyperConnection(nn.Module):
    """The coefficients of one site. Published names: `fn` [(2 + n) n, n d], `base` [(2 + n) n], `scale` [3]."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        streams = config.hc_mult
        rows = (2 + streams) * streams
        self.streams, self.rounds, self.eps = streams, config.hc_sinkhorn_iters, config.hc_eps
        self.norm_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty(rows, streams * config.hidden_size))
        self.base = nn.Parameter(torch.empty(rows))
        self.scale = nn.Parameter(torch.empty(3))

    def mixes(self, streams: Tensor) -> Tensor:
        """The raw values [(2 + n) n, T]: one RMS over all streams, applied after the projection."""
        flat = streams.flatten(1).to(self.fn.dtype)
        return (F.linear(flat, self.fn) * _inverse_rms(flat, self.norm_eps)).t()

    def coefficients(self, mixes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A [T, n], C [T, n], M [n_in, n_out, T] from the raw values."""
        n = self.streams
        base = self.base.unsqueeze(-1)
        pre = torch.sigmoid(torch.addcmul(base[:n], mixes[:n], self.scale[0])) + self.eps
        post = 2 * torch.sigmoid(torch.addcmul(base[n : 2 * n], mixes[n : 2 * n], self.scale[1]))
        carry = torch.addcmul(base[2 * n :], mixes[2 * n :], self.scale[2]).view(n, n, -1)
        return pre.t(), post.t(), sinkhorn(carry, self.rounds, self.eps)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A, C and M of streams [T, n, d]."""
        return self.coefficients(self.mixes(streams))


class _InverseRMS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        scale = inverse_rms(x, eps)
        ctx.save_for_backward(x, scale)
        return scale

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        return x * (grads[0] * scale.pow(3)).mul_(-1.0 / x.shape[-1]), None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return _InverseRMS.apply(x, eps)  # pyright: ignore[reportReturnType]
