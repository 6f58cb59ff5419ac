"""Initial weights of a policy trained from scratch.

The published report gives none; this recipe (unit-gain matrices, small output projections, hyper-connections
near "take a quarter of each stream, carry all of them over") is what small policies were found to learn with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from model.layers.hyper_connections import HyperConnection
from model.layers.moe import Router
from model.layers.norm import RMSNorm

if TYPE_CHECKING:
    from model.policy import Policy

_OUTPUT_GAIN = 0.3
_EMBEDDING_STD = 0.5
_OUTPUTS = ("attn.wo_b.weight", "ffn.w2", "engram.wkv.weight")


def _normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)


@torch.no_grad()
def initialize(policy: Policy, seed: int, draw: Callable[[Tensor, float], None] | None = None) -> None:
    """Fill every parameter; equal seeds give equal weights on every machine.

    Args:
        policy: to fill.
        seed: of the numbers.
        draw: fills a matrix with numbers of a standard deviation in its own way (large policies on a device
            of their own); None: normal numbers from `seed`.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in policy.modules():
        if isinstance(module, HyperConnection):
            _hyper_connection(module, generator)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, Router):
            module.bias.zero_()
            module.bias_vl.zero_()
    for name, parameter in policy.named_parameters():
        if parameter.dim() < 2 or ".hc_" in name or name.endswith(("q_weight", "k_weight")):
            continue
        if draw is None:
            _normal(parameter, _std(name, parameter), generator)
        else:
            draw(parameter, _std(name, parameter))
    for name, parameter in policy.named_parameters():
        if name.endswith(("q_weight", "k_weight")):
            parameter.fill_(1.0)
        elif name.endswith(("attn_sink", ".bias")):
            parameter.zero_()
        elif name.startswith("image_"):
            _normal(parameter, _EMBEDDING_STD, generator)


def _std(name: str, parameter: nn.Parameter) -> float:
    if name == "embed.weight":
        return _EMBEDDING_STD
    if name.endswith("engram.embed.weight"):
        return _OUTPUT_GAIN
    gain = 0.5 if name == "head.weight" else _OUTPUT_GAIN if name.endswith(_OUTPUTS) else 1.0
    return gain * parameter.shape[-1] ** -0.5


def _hyper_connection(site: HyperConnection, generator: torch.Generator) -> None:
    n = site.streams
    _normal(site.fn, 0.02, generator)
    site.scale.fill_(0.1)
    _normal(site.base, 0.1, generator)
    site.base[:n] -= 1.1
    site.base[2 * n :] += 4.0 * torch.eye(n, device=site.base.device).flatten()
