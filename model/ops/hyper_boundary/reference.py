"""Definition of single-pass hyper-connections at a boundary, in plain PyTorch and differentiable."""

import torch
from torch import Tensor

STREAMS = 4
_SINKHORN = 20
_FLOOR = 1e-6


def coefficients(streams: Tensor, projection: Tensor, base: Tensor, scale: Tensor) -> Tensor:
    """Coefficients [T, 24] fp32 from streams [T, 4, d].

    A (input mix), C (branch), M (residual mix, row-major):
    m = projection @ v / rms(v) for v = the flattened streams. A = sigmoid(m * scale[0] + base) + 1e-6; C = 2
    sigmoid; M = 20 rounds of row and column normalisation of softmax(m * scale[2] + base) over its last
    axis, columns last. Computed in float64, in which the order of sums does not show.
    """
    v = streams.double().flatten(1)
    base, scale = base.double(), scale.double()
    m = (v @ projection.double().T) * torch.rsqrt(v.square().mean(1, keepdim=True) + 1e-20)
    pre, post, comb = m.split([STREAMS, STREAMS, STREAMS * STREAMS], 1)
    base_pre, base_post, base_comb = base.split([STREAMS, STREAMS, STREAMS * STREAMS])
    a = torch.sigmoid(pre * scale[0] + base_pre) + _FLOOR
    c = 2 * torch.sigmoid(post * scale[1] + base_post)
    mix = sinkhorn((comb * scale[2] + base_comb).unflatten(1, (STREAMS, STREAMS)))
    return torch.cat([a, c, mix.flatten(1)], 1).float()


def sinkhorn(logits: Tensor) -> Tensor:
    """Nearly doubly stochastic matrices [T, n_in, n_out] from logits."""
    mix = torch.softmax(logits, 2) + _FLOOR
    mix = mix / (mix.sum(1, keepdim=True) + _FLOOR)
    for _ in range(_SINKHORN - 1):
        mix = mix / (mix.sum(2, keepdim=True) + _FLOOR)
        mix = mix / (mix.sum(1, keepdim=True) + _FLOOR)
    return mix


def site_input(streams: Tensor, coefficient: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `model.ops.hyper_boundary.hyper_input`."""
    x = torch.einsum("ts,tsd->td", coefficient[:, :STREAMS].float(), streams.float())
    x = x.to(streams.dtype).float()
    normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * norm.float()
    return normed.to(streams.dtype), streams.detach().float().square().sum((1, 2))


def update(
    streams: Tensor, branch: Tensor, coefficient: Tensor, norm: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `model.ops.hyper_boundary.hyper_update`."""
    _, c, mix = coefficient.float().split([STREAMS, STREAMS, STREAMS * STREAMS], 1)
    mixed = torch.einsum("tio,tid->tod", mix.unflatten(1, (STREAMS, STREAMS)), streams.float())
    updated = (c[:, :, None] * branch.float()[:, None] + mixed).to(streams.dtype)
    return updated, *site_input(updated, coefficient, norm, eps)


def hyper_boundary(
    streams: Tensor,
    branch: Tensor,
    coefficient: Tensor,
    projection: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    *,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `model.ops.hyper_boundary.hyper_boundary`."""
    updated, normed, _ = update(streams, branch, coefficient, norm, eps)
    return updated, normed, coefficients(updated, projection, base, scale)
