"""Experts spread over processes: each holds some of them whole, and tokens travel to their experts and back.

A layer's stacked matrices become four parameters: those of the routed experts, spread along the experts, and
those of the shared ones, which every process applies to its own tokens. All processes of a group run the same
layers at the same time, with as many tokens as each happens to have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from model.layers.moe import MixtureOfExperts, Routing

ROUTED, SHARED = "spread.routed.", "spread.shared."
_MATRICES = ("w13", "w2")


class _Exchange(torch.autograd.Function):
    """Rows [n, ...] by destination to rows by source; `sent` and `received` count them for each rank."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grads[0].contiguous()
        out = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad, ctx.sent, ctx.received, group=ctx.group)
        return out, None, None, None


class Matrices(nn.Module):
    """Stacked experts: `w13` [E, 2 f, d] and `w2` [E, d, f]."""

    def __init__(self, w13: Tensor, w2: Tensor, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.w13, self.w2, self._run = nn.Parameter(w13), nn.Parameter(w2), run

    def forward(self, x: Tensor, weights: Tensor, loads: list[int]) -> Tensor:
        """Rows sorted by expert through theirs.

        Every expert is run, also on no rows: so a gradient exists on all ranks or on none.
        """
        w13, w2 = _local(self.w13), _local(self.w2)
        rows, factors = x.split(loads), weights.split(loads)
        return torch.cat([self._run(*each) for each in zip(rows, factors, w13, w2, strict=True)])

    def run(self, x: Tensor, weights: Tensor, expert: int) -> Tensor:
        """All rows through one of them."""
        return self._run(x, weights, self.w13[expert], self.w2[expert])


class SpreadExperts(nn.Module):
    """The experts of one layer, of which this process holds its share.

    Args:
        moe: the layer, whose matrices this takes over.
        mesh: one-dimensional, over the processes that share the experts; their number divides the experts.
    """

    def __init__(self, moe: MixtureOfExperts, mesh: DeviceMesh) -> None:
        super().__init__()
        self.experts, self.group, self.size = moe.experts, mesh.get_group(), mesh.size()
        stacks = [getattr(moe, name).detach() for name in _MATRICES]
        w13, w2 = (distribute_tensor(s[: moe.experts].contiguous(), mesh, [Shard(0)]) for s in stacks)
        self.routed = Matrices(w13, w2, moe.run)
        w13, w2 = (s[moe.experts :].clone() for s in stacks)
        self.shared = Matrices(w13, w2, moe.run)
        for name in _MATRICES:
            delattr(moe, name)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Tokens [T, d] to [T, d], summed in float32 at least."""
        chosen = routing.expert_ids.flatten()
        order = chosen.argsort(stable=True)
        tokens = order // routing.expert_ids.shape[1]
        loads = chosen.bincount(minlength=self.experts)
        routed = self._travel(x[tokens], routing.weights.flatten()[order].unsqueeze(-1), loads)
        wide = torch.promote_types(x.dtype, torch.float32)
        result = torch.zeros(x.shape, dtype=wide, device=x.device)
        result = result.index_add(0, tokens, routed.to(wide))
        ones = routing.weights.new_ones(x.shape[0], 1)
        for expert in range(len(self.shared.w13)):
            result = result + self.shared.run(x, ones, expert)
        return result

    def _travel(self, x: Tensor, weights: Tensor, loads: Tensor) -> Tensor:
        """Rows sorted by expert, [n, d], through their experts wherever those are, in the same order."""
        by_rank = loads.view(self.size, -1)
        arriving = torch.empty_like(by_rank)
        dist.all_to_all_single(arriving, by_rank.contiguous(), group=self.group)
        sent, received = by_rank.sum(1).tolist(), arriving.sum(1).tolist()
        x = _exchange(x, sent, received, self.group)
        weights = _exchange(weights, sent, received, self.group)
        # They arrive by source, and sorted by expert within each.
        expert = torch.arange(by_rank.shape[1], device=x.device).repeat(self.size)
        order = expert.repeat_interleave(arriving.flatten()).argsort(stable=True)
        out = self.routed(x[order], weights[order], arriving.sum(0).tolist())
        return _exchange(out[order.argsort()], received, sent, self.group)


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(x, sent, received, group)  # pyright: ignore[reportReturnType]


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def split_stacks(tree: Any, experts: int) -> Any:
    """Names and tensors of a policy in one process, to those of one with spread experts (as views).

    Args:
        tree: nested mappings of tensors; keys end with the parameters' names.
        experts: number of routed ones.
    """
    if not isinstance(tree, Mapping):
        return tree
    out: dict[Any, Any] = {}
    for key, value in tree.items():
        stem, _, matrix = str(key).rpartition(".")
        if not (stem.startswith("layers.") and stem.endswith(".ffn") and matrix in _MATRICES):
            out[key] = split_stacks(value, experts)
            continue
        out[f"{stem}.{ROUTED}{matrix}"] = _cut(value, slice(None, experts))
        out[f"{stem}.{SHARED}{matrix}"] = _cut(value, slice(experts, None))
    return out


def _cut(value: Any, rows: slice) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(item, rows) for key, item in value.items()}
    return value[rows] if value.ndim else value


def stacked_name(name: str) -> tuple[str, bool]:
    """The name of the stack that a parameter belongs to, and whether it is its second, shared part."""
    for mark in (ROUTED, SHARED):
        if mark in name:
            return name.replace(mark, ""), mark == SHARED
    return name, False
