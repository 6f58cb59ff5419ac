"""Which parameter is optimised how: Muon for the matrices of the backbone, AdamW for all else, one schedule.

Embeddings, the head, the router and the stream mixers are no linear maps between hidden spaces, so they stay
with AdamW, as do norms, sinks and scales; n-gram tables have an AdamW that touches only the rows that were
read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from model.policy import Policy
from rl.trainers.muon import Muon
from rl.trainers.row_adamw import RowAdamW

_TABLE = re.compile(r"engram\.embed\.weight$")
_ADAMW_PATTERNS = (r"^embed\.", r"^head\.", r"engram\.(embed|q_weight|k_weight)", r"ffn\.gate\.", r"hc_\w+\.")

_NORM_EPSILON = 1e-6
"""Keeps the scale of a zero gradient finite, as in torch.nn.utils.clip_grad_norm_."""


class OptimizerError(ValueError):
    """Optimiser settings, gradients or a stored state that cannot be used: what, why, and what to do."""


def require_at_least(settings: object, least: float, *names: str) -> None:
    """Refuses settings that are not finite, or below `least`.

    Raises:
        OptimizerError: One is; the message names it.
    """
    for name in names:
        value = getattr(settings, name)
        if not least <= value < math.inf:
            raise OptimizerError(f"{name}={value}: set it to {least:g} or more")


Part = Literal["backbone", "drafter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Learning rates, decay and schedule.

    Attributes:
        learning_rate: of AdamW.
        muon_learning_rate: of Muon; None gives the matrices to AdamW too.
        betas: of AdamW.
        epsilon: of AdamW.
        weight_decay: decoupled, for both; not for vectors and scalars.
        warmup_steps: steps over which the rates rise linearly.
        decay: `constant`, or `cosine` down to `final_fraction` at the last step.
        final_fraction: what is left of the rates at the end of the cosine.
        max_grad_norm: gradients are scaled down to this global norm.
        head_wise: Muon orthogonalises query weights head by head.
        frozen: patterns (searched in parameter names) of what is not trained.
    """

    learning_rate: float
    muon_learning_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 10
    decay: str = "constant"
    final_fraction: float = 0.1
    max_grad_norm: float = 1.0
    head_wise: bool = False
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.decay not in ("constant", "cosine"):
            raise OptimizerError(f"decay is {self.decay!r}; it is 'constant' or 'cosine'")
        rates = (self.learning_rate, self.muon_learning_rate or 0.0, self.weight_decay, self.max_grad_norm)
        if any(math.isnan(rate) for rate in rates) or math.inf in rates[:3]:
            raise OptimizerError("learning rates, weight_decay and max_grad_norm must be finite numbers")
        if min(self.learning_rate, self.muon_learning_rate or 0.0, self.weight_decay, self.warmup_steps) < 0:
            raise OptimizerError("learning rates, weight_decay and warmup_steps must not be negative")
        if self.max_grad_norm <= 0:
            raise OptimizerError(f"max_grad_norm is {self.max_grad_norm}; it must be positive")

    def fraction(self, step: int, total_steps: int) -> float:
        """The part of the learning rates in force at `step` (from 0)."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        if self.decay == "constant":
            return warm
        progress = min(1.0, step / max(total_steps, 1))
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return warm * (self.final_fraction + (1 - self.final_fraction) * cosine)


class Optimizer:
    """Muon and AdamW over the trainable parameters of a policy: those of its drafter, or all others."""

    def __init__(self, policy: Policy, config: OptimizerConfig, part: Part = "backbone") -> None:
        self.config = config
        self.parameters = _trainable(policy, config.frozen, part)
        by_muon = config.muon_learning_rate is not None
        matrices = {n: p for n, p in self.parameters.items() if by_muon and is_matrix(n, p)}
        self._views = {name: _stacked(name, p, policy, config.head_wise) for name, p in matrices.items()}
        self._muon = Muon(
            {name: p.detach().view(self._views[name]) for name, p in matrices.items()},
            weight_decay=config.weight_decay,
        )
        tables = {name: p for name, p in self.parameters.items() if _TABLE.search(name)}
        self._tables = RowAdamW(
            tables, betas=config.betas, epsilon=config.epsilon, weight_decay=config.weight_decay
        )
        self._adamw_names = [name for name in self.parameters if name not in matrices and name not in tables]
        self._adamw = torch.optim.AdamW(
            self._adamw_groups(config.weight_decay),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )

    def _adamw_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        parameters = [self.parameters[name] for name in self._adamw_names]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    @property
    def learning(self) -> bool:
        """False when all learning rates are 0, so that a step changes nothing."""
        return bool(self.config.learning_rate or self.config.muon_learning_rate)

    def clip(self) -> float:
        """Scales the gradients to `max_grad_norm` and returns their global norm before.

        Raises:
            OptimizerError: A gradient is not finite; names the parameters.
        """
        values = {name: _values(p) for name, p in self.parameters.items() if p.grad is not None}
        norm = nn.utils.get_total_norm(values.values()).item()
        if not math.isfinite(norm):
            bad = [name for name, grad in values.items() if not grad.isfinite().all()]
            raise OptimizerError(
                f"the gradient is not finite (norm {norm}) in {', '.join(bad[:5]) or 'no single parameter'}"
                f"{' and more' if len(bad) > 5 else ''}; the weights were not touched. Lower the learning "
                "rate, or look at this step's samples"
            )
        factor = self.config.max_grad_norm / (norm + _NORM_EPSILON)
        if factor < 1:
            for grad in values.values():
                grad.mul_(factor)
        return norm

    def step(self, fraction: float) -> None:
        """Applies the gradients at `fraction` of the learning rates, and clears them."""
        for group in self._adamw.param_groups:
            group["lr"] = self.config.learning_rate * fraction
        self._adamw.step()
        self._tables.step(self.config.learning_rate * fraction)
        gradients = {
            name: grad.view(shape)
            for name, shape in self._views.items()
            if (grad := self.parameters[name].grad) is not None
        }
        self._muon.step(gradients, (self.config.muon_learning_rate or 0.0) * fraction)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Momenta by parameter name, as tensors."""
        adamw = {}
        for name in self._adamw_names:
            if state := self._adamw.state.get(self.parameters[name]):
                adamw[name] = {key: value.clone() for key, value in state.items()}
        return {
            "adamw": adamw,
            "muon": {name: m.clone() for name, m in self._muon.momenta.items()},
            "tables": {name: rows.to_dict() for name, rows in self._tables.states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over momenta.

        Raises:
            OptimizerError: They belong to other parameters or to another division between Muon and AdamW.
        """
        shapes = {name: m.shape for name, m in self._muon.momenta.items()}
        _require_same("muon", {n: m.shape for n, m in state["muon"].items()}, shapes)
        stored = {name: values["exp_avg"].shape for name, values in state["adamw"].items()}
        _require_same(
            "adamw", stored, {n: self.parameters[n].shape for n in self._adamw_names if n in stored}
        )
        tables = {name: rows["exp_avg"].shape for name, rows in state.get("tables", {}).items()}
        own_tables = {name: rows.exp_avg.shape for name, rows in self._tables.states.items()}
        _require_same("n-gram table", tables, own_tables)
        for name, rows in self._tables.states.items():
            rows.copy_(state["tables"][name])
        for name, momentum in state["muon"].items():
            self._muon.momenta[name].copy_(momentum)
        for name in self._adamw_names:
            parameter = self.parameters[name]
            self._adamw.state.pop(parameter, None)
            if name in state["adamw"]:
                self._adamw.state[parameter] = {k: v.clone() for k, v in state["adamw"][name].items()}


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is one or several linear maps that Muon should orthogonalise."""
    return parameter.ndim >= 2 and not any(re.search(pattern, name) for pattern in _ADAMW_PATTERNS)


def _trainable(policy: Policy, frozen: tuple[str, ...], part: Part) -> dict[str, nn.Parameter]:
    drafter = part == "drafter"
    named = {n: p for n, p in policy.named_parameters() if n.startswith("mtp.") == drafter}
    for pattern in frozen:
        if not any(re.search(pattern, name) for name in named):
            raise OptimizerError(
                f"frozen pattern {pattern!r} matches no parameter; names look like {next(iter(named))}"
            )
    trained = {n: p for n, p in named.items() if not any(re.search(pattern, n) for pattern in frozen)}
    for name in named.keys() - trained.keys():
        if _TABLE.search(name):
            # A sparse gradient grows with every backward pass, and nobody would clear this one.
            named[name].requires_grad_(False)
    return trained


def _values(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter, or the values of a sparse one (made coalesced), to be changed in place."""
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    parameter.grad = grad.coalesce()
    return parameter.grad.values()


def _stacked(name: str, parameter: Tensor, policy: Policy, head_wise: bool) -> tuple[int, int, int]:
    """The shape [n, a, b] in which a parameter is n maps of their own: experts, output groups, heads."""
    config, (rows, columns) = policy.config, parameter.shape[-2:]
    count = parameter.numel() // (rows * columns)
    if name.endswith("attn.wo_a.weight"):
        count = config.o_groups
    elif head_wise and name.endswith("indexer.wq_b.weight"):
        count = config.index_n_heads
    elif head_wise and name.endswith("attn.wq_b.weight"):
        count = config.num_attention_heads
    return count, parameter.numel() // (count * columns), columns


def _require_same(what: str, stored: Mapping[str, torch.Size], own: Mapping[str, torch.Size]) -> None:
    wrong = sorted(n for n in stored.keys() | own.keys() if stored.get(n) != own.get(n))
    if wrong:
        first = wrong[0]
        raise OptimizerError(
            f"the stored {what} state does not fit this policy and configuration: {len(wrong)} parameters "
            f"differ, first {first} (stored {stored.get(first)}, here {own.get(first)}); resume with the "
            "configuration the checkpoint was written under"
        )
