"""Definitions of routing, of the plan that groups tokens by expert, and of the experts' own steps."""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.choices import force
from model.layers.top_k import top_k_lowest_index
from model.ops.experts.plan import Plan, block_loads, row_tiles

_LOWEST_LOGIT = -80.0


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    chosen: int,
    factor: float,
    temperature: float,
    forced: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `model.ops.experts.route`."""
    logits = x.float() @ weight.float().T
    affinity = F.softplus((logits / temperature).clamp_min(_LOWEST_LOGIT)).sqrt()
    ids = force(top_k_lowest_index(affinity.detach() + bias, chosen), forced)
    weights = affinity.gather(1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor
    return affinity, ids, weights, block_loads(ids, len(weight))


def plan(ids: Tensor, experts: int, shared: int) -> Plan:
    """See `model.ops.experts.plan_of`."""
    count, chosen = ids.shape
    always = torch.arange(experts, experts + shared, device=ids.device).expand(count, shared)
    flat = torch.cat([ids, always], 1).flatten()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=ids.device)
    ends = flat.bincount(minlength=experts + shared).cumsum(0)
    tokens = (order // (chosen + shared)).int()
    place = place.view(count, chosen + shared).int()
    return Plan(tokens, place, ends.int(), row_tiles(ends, len(tokens)))


def grouped(x: Tensor, weight: Tensor, plan: Plan, of_tokens: bool) -> Tensor:
    """See `model.ops.experts.grouped`."""
    rows = x.index_select(0, plan.tokens) if of_tokens else x
    bounds = [0, *plan.ends.tolist()]
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = [rows[a:b].to(wide) @ w.to(wide).T for a, b, w in zip(bounds, bounds[1:], weight, strict=False)]
    return torch.cat(parts).to(x.dtype)


def swiglu(hidden: Tensor, weights: Tensor, plan: Plan, limit: float) -> Tensor:
    """See `model.ops.experts.swiglu`."""
    gate, up = hidden.float().chunk(2, -1)
    product = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    every = F.pad(weights, (0, plan.place.shape[1] - weights.shape[1]), value=1.0).flatten()
    by_place = torch.empty_like(every).index_copy(0, plan.place.flatten().long(), every)
    return (product * by_place[:, None]).to(hidden.dtype)


def combine(rows: Tensor, plan: Plan) -> Tensor:
    """See `model.ops.experts.combine`."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows[plan.place.long()].to(wide).sum(1).to(rows.dtype)
