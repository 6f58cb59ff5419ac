"""Mixture of experts: sqrt-softplus router with a balancing bias, clipped SwiGLU experts, a shared expert.

Experts are stacked: `w13` [E + shared, 2 f, d] (gate rows first) and `w2` [E + shared, d, f]; the shared
experts come last. With few experts all of them are computed for every token and weighted by zero where not
chosen, which takes three operations; with many, or in bfloat16, where each expert's output is rounded before
the sum, tokens are sorted by expert and only experts that got a token are visited.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.choices import force
from model.config import PolicyConfig
from model.layers.exact import fill
from model.layers.linear import linear, quantized_linear, wide_linear
from model.layers.packed import ExpertStorage, PackedExperts
from model.layers.swiglu import clipped_swiglu
from model.layers.top_k import top_k_lowest_index
from model.quant.blocks import round_activation, straight_through

_DENSE_UP_TO = 8
_LOWEST_LOGIT = -80.0
"""sqrt(softplus) is 4e-18 there; below, its slope is 0 / 0 in float32."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Where the tokens of one layer went."""

    affinity: Tensor
    """[T, E] sqrt(softplus(logit)), without bias."""
    expert_ids: Tensor
    """[T, k]."""
    weights: Tensor
    """[T, k], summing to the scaling factor."""

    def first(self, tokens: int) -> Routing:
        """Of the first `tokens` tokens alone."""
        return Routing(self.affinity[:tokens], self.expert_ids[:tokens], self.weights[:tokens])


class Router(nn.Module):
    """Affinity of a token to each expert. The biases steer the choice only; `update_balance` moves them."""

    def __init__(self, config: PolicyConfig, experts: int, chosen: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.chosen, self.factor, self.temperature = chosen, config.routed_scaling_factor, config.gate_temp
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=dtype))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("bias_vl", torch.zeros(experts))
        self.bias: Tensor
        self.bias_vl: Tensor

    def forward(self, x: Tensor, image: Tensor | None, forced: Tensor | None = None) -> Routing:
        """Route tokens [T, d].

        Args:
            x: the tokens.
            image: [T] bool marks tokens of image spans; None stands for text only.
            forced: [T, k] experts to go to, -1 where the router chooses; weighted by their affinities alike.
        """
        logits = wide_linear(x, self.weight)
        affinity = F.softplus((logits / self.temperature).clamp_min(_LOWEST_LOGIT)).sqrt()
        expert_ids = top_k_lowest_index(affinity.detach() + self.bias_of(image), self.chosen)
        expert_ids = force(expert_ids, forced)
        weights = affinity.gather(1, expert_ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.factor
        return Routing(affinity, expert_ids, weights)

    def bias_of(self, image: Tensor | None) -> Tensor:
        """Bias of the choice, [E] or [T, E]."""
        return self.bias if image is None else torch.where(image.unsqueeze(-1), self.bias_vl, self.bias)


class MixtureOfExperts(nn.Module):
    """Routed experts and the shared one."""

    def __init__(
        self,
        config: PolicyConfig,
        experts: int,
        chosen: int,
        dtype: torch.dtype,
        storage: ExpertStorage = "plain",
    ) -> None:
        super().__init__()
        d, f, shared = config.hidden_size, config.moe_intermediate_size, config.n_shared_experts
        self.experts, self.shared, self.limit = experts, shared, config.swiglu_limit
        self.quantized = config.quantization is not None
        self.gate = Router(config, experts, chosen, dtype)
        self.packed: PackedExperts | None = None
        """Holds the experts in FP4, in the place of `w13` and `w2`."""
        if storage == "packed":
            self.packed = PackedExperts(experts, shared, f, d, dtype)
        else:
            self.w13 = nn.Parameter(torch.empty(experts + shared, 2 * f, d, dtype=dtype))
            self.w2 = nn.Parameter(torch.empty(experts + shared, d, f, dtype=dtype))
        self.spread: nn.Module | None = None
        """Computes the experts in this one's place, from tokens [T, d] and `Routing`, where other processes
        hold some of them; `w13` and `w2` are gone then."""

    @property
    def dense(self) -> bool:
        """Whether every expert is computed for every token: they are few, and none rounds its own output."""
        if self.packed is not None:
            return False
        return self.experts <= _DENSE_UP_TO and self.w2.dtype is not torch.bfloat16

    @torch.no_grad()
    def pack(self) -> None:
        """Round routed experts to FP4 and hold them so, for inference alone; once packed, nothing changes.

        Raises:
            ValueError: the widths are no multiples of 32, or a weight is too large.
            RuntimeError: other processes hold the experts.
        """
        if self.spread is not None:
            raise RuntimeError("experts that other processes hold cannot be packed: pack before spreading")
        if self.packed is None:
            count, width, inner = self.w2.shape
            packed = PackedExperts(self.experts, self.shared, inner, width, self.w2.dtype, self.w2.device)
            for expert in range(0 if self.w2.is_meta else count):
                packed.fill(expert, self.w13[expert], self.w2[expert])
            self.packed = packed
            del self.w13, self.w2

    def refuse_training(self, x: Tensor) -> None:
        """Raise RuntimeError when packed experts are asked for a gradient, which they have not."""
        if self.packed is not None and torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                "these experts are packed in FP4 and serve inference alone: train the unpacked policy, or "
                "run under torch.no_grad()"
            )

    def forward(
        self, x: Tensor, image: Tensor | None = None, forced: Tensor | None = None
    ) -> tuple[Tensor, Routing]:
        """Tokens [T, d] to [T, d], and where they went; `image` and `forced` as in `Router.forward`."""
        self.refuse_training(x)
        routing = self.gate(x, image, forced)
        if self.spread is not None:
            return self.spread(x, routing).to(x.dtype), routing
        result = self._dense(x, routing) if self.dense else self._sparse(x, routing)
        return result.to(x.dtype), routing

    def rounded(self, x: Tensor) -> Tensor:
        """`x` as the experts' products read it."""
        return straight_through(x, round_activation) if self.quantized else x

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return quantized_linear(x, weight) if self.quantized else linear(x, weight)

    def _activate(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """[..., 2 f] and weights [..., 1] to [..., f]: weight * silu(min(gate, limit)) * clip(up, limit)."""
        gate, up = (hidden.float() if hidden.dtype is torch.bfloat16 else hidden).chunk(2, dim=-1)
        return clipped_swiglu(gate, up, weights, self.limit).to(hidden.dtype)

    def _dense(self, x: Tensor, routing: Routing) -> Tensor:
        weights = torch.zeros_like(routing.affinity).scatter(1, routing.expert_ids, routing.weights)
        weights = F.pad(weights, (0, self.shared), value=1.0)
        hidden = self._linear(x, self.w13.flatten(0, 1)).unflatten(-1, (self.experts + self.shared, -1))
        active = self._activate(hidden, weights.unsqueeze(-1)).flatten(1)
        return self._linear(active, self.w2.transpose(0, 1).reshape(self.w2.shape[1], -1))

    def _sparse(self, x: Tensor, routing: Routing) -> Tensor:
        order = routing.expert_ids.flatten().argsort(stable=True)
        tokens = order // routing.expert_ids.shape[1]
        weights = routing.weights.flatten()[order].unsqueeze(-1)
        loads = routing.expert_ids.flatten().bincount(minlength=self.experts).tolist()
        sorted_x = x[tokens]
        parts, start = [], 0
        for expert in (expert for expert, load in enumerate(loads) if load):
            stop = start + loads[expert]
            parts.append(self._expert(sorted_x[start:stop], expert, weights[start:stop]))
            start = stop
        wide = torch.promote_types(x.dtype, torch.float32)
        result = torch.zeros(x.shape, dtype=wide, device=x.device)
        result = result.index_add(0, tokens, torch.cat(parts).to(wide))
        for expert in range(self.experts, self.experts + self.shared):
            result = result + self._expert(x, expert, weights.new_ones(x.shape[0], 1))
        return result

    def _expert(self, x: Tensor, expert: int, weights: Tensor) -> Tensor:
        if self.packed is not None:
            return self.run(x, weights, self.packed.w13.matrix(expert), self.packed.w2.matrix(expert))
        return self.run(x, weights, self.w13[expert], self.w2[expert])

    def run(self, x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """One expert's tokens [n, d], weighted by [n, 1], through its matrices [2 f, d] and [d, f]."""
        count = x.shape[0]
        hidden = self._linear(fill(x), w13)
        return self._linear(self._activate(hidden, fill(weights)), w2)[:count]
