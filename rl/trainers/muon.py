"""Muon: momentum, orthogonalised, for weight matrices; all matrices of one shape in one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_FAST = (3.4445, -4.7750, 2.0315)
_POLISH = (2.0, -1.5, 0.5)


def newton_schulz(matrices: Tensor, steps: int = 5, polish: int = 0) -> Tensor:
    """Brings the singular values of each matrix near 1, [n, a, b]. A zero matrix stays zero.

    Args:
        matrices: the matrices.
        steps: of the quintic that rises steeply (Jordan et al. 2024) and ends between 0.7 and 1.2.
        polish: further steps of one that converges to 1; DeepSeek-V4 takes 8 and 2.
    """
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for a, b, c in [_FAST] * steps + [_POLISH] * polish:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parameter is made of matrices: `stack` gives [n, a, b] whole ones, `unstack` this rank's part."""

    stack: Callable[[Tensor], Tensor] = _same
    unstack: Callable[[Tensor], Tensor] = _same


class Muon:
    """Muon with Nesterov momentum, decoupled weight decay, and updates rescaled to a root mean square.

    Args:
        matrices: parameters by name: n matrices stacked, [n, a, b], or what its layout makes such a stack of.
        layouts: by name; default: the parameter is the stack.
        momentum: decay of the momentum.
        update_rms: root mean square of an update at learning rate 1, so that rates carry over from AdamW.
        weight_decay: decoupled.
        steps: Newton-Schulz iterations.
        polish: further ones that converge.
    """

    def __init__(
        self,
        matrices: Mapping[str, Tensor],
        layouts: Mapping[str, Layout] | None = None,
        *,
        momentum: float = 0.95,
        update_rms: float = 0.18,
        weight_decay: float = 0.0,
        steps: int = 5,
        polish: int = 0,
    ) -> None:
        self.momentum, self.update_rms = momentum, update_rms
        self.weight_decay, self.steps, self.polish = weight_decay, steps, polish
        self.matrices, self._layouts = dict(matrices), dict(layouts or {})
        self.momenta = {name: torch.zeros_like(matrix) for name, matrix in matrices.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        """Updates the matrices that have a gradient (of the parameter's shape, by name)."""
        by_shape: dict[torch.Size, dict[str, Tensor]] = {}
        for name in self.matrices:
            if name in gradients:
                grad, momentum = gradients[name], self.momenta[name]
                momentum.lerp_(grad, 1 - self.momentum)
                mixed = self._layout(name).stack(grad.lerp(momentum, self.momentum))
                assert mixed.ndim == 3, f"{name} has shape {tuple(mixed.shape)}"
                by_shape.setdefault(mixed.shape[1:], {})[name] = mixed
        for shape, mixed in by_shape.items():
            self._update(mixed, learning_rate, self.update_rms * max(shape) ** 0.5)

    def _update(self, mixed: Mapping[str, Tensor], rate: float, scale: float) -> None:
        updates = newton_schulz(torch.cat(list(mixed.values())), self.steps, self.polish)
        counts = [len(stack) for stack in mixed.values()]
        for name, update in zip(mixed, updates.split(counts), strict=True):
            own = self._layout(name).unstack(update)
            self.matrices[name].mul_(1 - rate * self.weight_decay).sub_(own, alpha=rate * scale)

    def _layout(self, name: str) -> Layout:
        return self._layouts.get(name, Layout())
