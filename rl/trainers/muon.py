"""Muon: momentum, orthogonalised, for weight matrices; all matrices of one shape in one batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Brings the singular values of each matrix near 1 (Jordan et al. 2024's quintic), [n, a, b].

    A zero matrix stays zero.
    """
    a, b, c = _COEFFICIENTS
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Muon with Nesterov momentum, decoupled weight decay, and updates rescaled to a root mean square.

    Args:
        matrices: parameters by name, seen as [n, a, b]: n matrices stacked in one parameter.
        momentum: decay of the momentum.
        update_rms: root mean square of an update at learning rate 1, so that rates carry over from AdamW.
        weight_decay: decoupled.
        steps: Newton-Schulz iterations.
    """

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        *,
        momentum: float = 0.95,
        update_rms: float = 0.18,
        weight_decay: float = 0.0,
        steps: int = 5,
    ) -> None:
        self.momentum, self.update_rms = momentum, update_rms
        self.weight_decay, self.steps = weight_decay, steps
        self.momenta = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}
        self._by_shape: dict[torch.Size, dict[str, Tensor]] = {}
        for name, matrix in matrices.items():
            assert matrix.ndim == 3, f"{name} has shape {tuple(matrix.shape)}"
            self._by_shape.setdefault(matrix.shape[1:], {})[name] = matrix

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Updates the matrices that have a gradient ([n, a, b], by name)."""
        for shape, matrices in self._by_shape.items():
            names = [name for name in matrices if name in gradients]
            if names:
                scale = self.update_rms * max(shape) ** 0.5
                self._update([matrices[n] for n in names], names, gradients, learning_rate, scale)

    def _update(
        self,
        matrices: list[Tensor],
        names: list[str],
        gradients: Mapping[str, Tensor],
        rate: float,
        scale: float,
    ) -> None:
        given, momenta = [gradients[n] for n in names], [self.momenta[n] for n in names]
        for momentum, grad in zip(momenta, given, strict=True):
            momentum.lerp_(grad, 1 - self.momentum)
        mixed = torch.cat([grad.lerp(m, self.momentum) for grad, m in zip(given, momenta, strict=True)])
        updates = newton_schulz(mixed, self.steps).split([len(m) for m in matrices])
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - rate * self.weight_decay).sub_(update, alpha=rate * scale)
