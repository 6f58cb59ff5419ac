"""Which parameter is optimised how: Muon for the matrices of the backbone, AdamW for all else, one schedule.

Embeddings, the head, the router and the stream mixers are no linear maps between hidden spaces, so they stay
with AdamW, as do norms, sinks and scales; n-gram tables have an AdamW that touches only the rows that were
read. Embeddings, head and tables may have a balanced momentum in its place. Parameters in bfloat16 are
updated in a float32 copy, for a step is smaller than what bfloat16 can tell apart; parameters spread over
processes are updated part by part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from model.policies import AnyPolicy
from rl.trainers import shards
from rl.trainers.muon import Layout, Muon
from rl.trainers.optim_config import OptimizerConfig, OptimizerError, require_at_least
from rl.trainers.ranks import ALONE, Ranks
from rl.trainers.row_adamw import RowAdamW
from rl.trainers.sinkhorn import BalancedMomentum

__all__ = ["Optimizer", "OptimizerConfig", "OptimizerError", "Part", "is_matrix", "require_at_least"]

_TABLE = re.compile(r"engram\.embed\.weight$")
_EMBEDDINGS = re.compile(r"^(embed|head|lm_head|.*embed_tokens)\.weight$|engram\.embed\.weight$")
_HF_ADAMW = (r"(^|\.)(embed_\w+|wte|wpe|lm_head)\.weight$", r"\.(gate|router)\.weight$", r"lora_[AB]")
_OUR_ADAMW = (r"^embed\.", r"^head\.", r"engram\.(embed|q_weight|k_weight)", r"ffn\.gate\.", r"hc_\w+\.")
_ADAMW_PATTERNS = _OUR_ADAMW + _HF_ADAMW

_NORM_EPSILON = 1e-6
"""Keeps the scale of a zero gradient finite, as in torch.nn.utils.clip_grad_norm_."""

Part = Literal["backbone", "drafter"]


class Optimizer:
    """The optimisers of the trainable parameters of a policy: those of its drafter, or all others."""

    def __init__(
        self, policy: AnyPolicy, config: OptimizerConfig, part: Part = "backbone", ranks: Ranks = ALONE
    ) -> None:
        self.config, self.ranks = config, ranks
        self.parameters = _trainable(policy, config.frozen, part)
        self._values = {name: _master(shards.part(p)) for name, p in self.parameters.items()}
        kinds = {name: self._kind(name, p) for name, p in self.parameters.items()}

        def named(kind: str) -> dict[str, Tensor]:
            return {name: value for name, value in self._values.items() if kinds[name] == kind}

        layouts = {name: _layout(name, p, policy, config.head_wise) for name, p in self.parameters.items()}
        self._muon = Muon(
            named("muon"),
            layouts,
            weight_decay=config.weight_decay,
            steps=config.muon_steps,
            polish=config.muon_polish,
        )
        factors = {name: config.table_factor for name in self.parameters if _TABLE.search(name)}
        self._balanced = BalancedMomentum(named("balanced"), layouts, factors)
        self._tables = RowAdamW(
            named("table"), betas=config.betas, epsilon=config.epsilon, weight_decay=config.weight_decay
        )
        self._adamw_values = {name: value for name, value in named("adamw").items() if value.numel()}
        self._adamw = torch.optim.AdamW(
            self._adamw_groups(config.weight_decay),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.epsilon,
            fused=True,
        )

    def _kind(self, name: str, parameter: Tensor) -> str:
        if self.config.balanced_learning_rate is not None and _EMBEDDINGS.search(name):
            return "balanced"
        if _TABLE.search(name):
            return "table"
        by_muon = self.config.muon_learning_rate is not None and is_matrix(name, parameter)
        return "muon" if by_muon else "adamw"

    def _adamw_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, value in self._adamw_values.items():
            groups[self.parameters[name].ndim >= 2].append(value)
        decays = {True: weight_decay, False: 0.0}
        made = [{"params": values, "weight_decay": decays[kind]} for kind, values in groups.items() if values]
        return made or [{"params": [torch.zeros(())]}]  # AdamW wants something

    @property
    def learning(self) -> bool:
        """False when all learning rates are 0, so that a step changes nothing."""
        config = self.config
        return bool(config.learning_rate or config.muon_learning_rate or config.balanced_learning_rate)

    def clip(self) -> float:
        """Scales the gradients to `max_grad_norm` and returns their global norm before.

        Raises:
            OptimizerError: A gradient is not finite; names the parameters.
        """
        self._add_up_replicated()
        values = {name: _gradient_values(p) for name, p in self.parameters.items() if p.grad is not None}
        norm = self._norm(values)
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

    def _add_up_replicated(self) -> None:
        """Sums gradients of parameters that every rank holds whole; those of spread ones are summed."""
        if self.ranks.alone:
            return
        for name, parameter in self.parameters.items():
            if shards.is_spread(parameter) or not self.ranks.any(parameter.grad is not None):
                continue
            if _TABLE.search(name):
                parameter.grad = self.ranks.sum_rows(_rows(parameter))
            else:
                own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.ranks.total(own)

    def _norm(self, values: Mapping[str, Tensor]) -> float:
        if self.ranks.alone:
            return nn.utils.get_total_norm(values.values()).item()
        spread = [value for name, value in values.items() if shards.is_spread(self.parameters[name])]
        rest = [value for name, value in values.items() if not shards.is_spread(self.parameters[name])]
        return math.sqrt(self.ranks.sum(_squared(spread)) + _squared(rest))

    def step(self, fraction: float) -> None:
        """Applies the gradients at `fraction` of the learning rates, and clears them."""
        config = self.config
        for group in self._adamw.param_groups:
            group["lr"] = config.learning_rate * fraction
        gradients = {
            name: _like_value(p.grad, self._values[name])
            for name, p in self.parameters.items()
            if p.grad is not None
        }
        for name, value in (*self._adamw_values.items(), *self._tables.tables.items()):
            value.grad = gradients.get(name)
        self._adamw.step()
        self._tables.step(config.learning_rate * fraction)
        self._muon.step(gradients, (config.muon_learning_rate or 0.0) * fraction)
        self._balanced.step(gradients, (config.balanced_learning_rate or 0.0) * fraction)
        self.zero_grad()
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        """Gives the parameters the values of their float32 copies, rounded."""
        for name, value in self._masters():
            shards.part(self.parameters[name]).copy_(value)

    def _masters(self) -> Iterable[tuple[str, Tensor]]:
        for name, value in self._values.items():
            if value.dtype is not self.parameters[name].dtype:
                yield name, value

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for tensor in (*self.parameters.values(), *self._values.values()):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Momenta by parameter name, and float32 copies where there are any, laid out as the policy."""

        def of(name: str, tensor: Tensor) -> Tensor:
            spread = tensor.ndim > 0 and shards.is_spread(self.parameters[name])
            return shards.laid_out_as(self.parameters[name], tensor.clone()) if spread else tensor.clone()

        adamw = {}
        for name, value in self._adamw_values.items():
            if state := self._adamw.state.get(value):
                adamw[name] = {key: of(name, tensor) for key, tensor in state.items()}
        return {
            "adamw": adamw,
            "muon": {name: of(name, m) for name, m in self._muon.momenta.items()},
            "balanced": {name: of(name, m) for name, m in self._balanced.momenta.items()},
            "tables": {name: rows.to_dict() for name, rows in self._tables.states.items()},
            "masters": {name: of(name, value) for name, value in self._masters()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over momenta and float32 copies.

        Raises:
            OptimizerError: They belong to other parameters or to another division among optimisers.
        """
        self._check(state)
        for name, rows in self._tables.states.items():
            rows.copy_(state["tables"][name])
        targets = {"muon": self._muon.momenta, "balanced": self._balanced.momenta}
        for kind, momenta in (*targets.items(), ("masters", dict(self._masters()))):
            for name, stored in state.get(kind, {}).items():
                momenta[name].copy_(self._part(name, stored))
        for name, value in self._adamw_values.items():
            self._adamw.state.pop(value, None)
            if name in state["adamw"]:
                self._adamw.state[value] = {
                    k: self._part(name, v).clone() for k, v in state["adamw"][name].items()
                }

    def _part(self, name: str, stored: Tensor) -> Tensor:
        return shards.part_of_stored(self.parameters[name], stored) if stored.ndim else stored

    def _check(self, state: Mapping[str, Any]) -> None:
        own = {
            "muon": self._muon.momenta,
            "balanced": self._balanced.momenta,
            "masters": dict(self._masters()),
        }
        for what, tensors in own.items():
            stored = {n: m.shape for n, m in state.get(what, {}).items()}
            _require_same(what, stored, {n: self.parameters[n].shape for n in tensors})
        adamw = {name: values["exp_avg"].shape for name, values in state["adamw"].items()}
        known = {n: self.parameters[n].shape for n in self._adamw_values if n in adamw}
        empty = {n for n, v in self._values.items() if not v.numel()}
        _require_same("adamw", {n: s for n, s in adamw.items() if n not in empty}, known)
        tables = {name: rows["exp_avg"].shape for name, rows in state.get("tables", {}).items()}
        own_tables = {name: rows.exp_avg.shape for name, rows in self._tables.states.items()}
        _require_same("n-gram table", tables, own_tables)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is one or several linear maps that Muon should orthogonalise."""
    return parameter.ndim >= 2 and not any(re.search(pattern, name) for pattern in _ADAMW_PATTERNS)


def _trainable(policy: AnyPolicy, frozen: tuple[str, ...], part: Part) -> dict[str, nn.Parameter]:
    drafter = part == "drafter"
    named = {
        n: p for n, p in policy.named_parameters() if n.startswith("mtp.") == drafter and p.requires_grad
    }
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


def _master(own: Tensor) -> Tensor:
    """The values to update: a float32 copy of a narrower part, or the part itself."""
    return own.float() if own.dtype in (torch.bfloat16, torch.float16) else own


def _rows(table: nn.Parameter) -> Tensor:
    """The sparse gradient of a table, empty where this rank read no row."""
    if table.grad is not None:
        return table.grad
    index = torch.zeros(1, 0, dtype=torch.int64, device=table.device)
    values = table.new_zeros(0, *table.shape[1:])
    return torch.sparse_coo_tensor(index, values, table.shape, check_invariants=False)


def _gradient_values(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, or the values of a sparse one (made coalesced), to change in place."""
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return shards.part(grad)
    parameter.grad = grad.coalesce()
    return parameter.grad.values()


def _like_value(grad: Tensor | None, value: Tensor) -> Tensor:
    assert grad is not None
    return grad.to(value.dtype) if grad.is_sparse else shards.part(grad).to(value.dtype)


def _squared(values: list[Tensor]) -> float:
    return sum(value.double().square().sum().item() for value in values)


def _layout(name: str, parameter: nn.Parameter, policy: AnyPolicy, head_wise: bool) -> Layout:
    """How a parameter is n matrices of their own: experts, output groups, heads."""
    rows, columns = _matrix(name, parameter, policy, head_wise)

    def stack(own: Tensor) -> Tensor:
        return shards.with_whole_matrices(parameter, own).view(-1, rows, columns)

    def unstack(matrices: Tensor) -> Tensor:
        whole = matrices.view(-1, *parameter.shape[1:])
        return shards.own_part(parameter, whole)

    return Layout(stack, unstack)


def _matrix(name: str, parameter: Tensor, policy: AnyPolicy, head_wise: bool) -> tuple[int, int]:
    config: Any = policy.config
    columns = parameter.shape[-1] if parameter.ndim else 1
    rows = parameter.shape[-2] if parameter.ndim >= 2 else 1
    if name.endswith("attn.wo_a.weight"):
        return rows // config.o_groups, columns
    if head_wise and name.endswith("indexer.wq_b.weight"):
        return rows // config.index_n_heads, columns
    if head_wise and name.endswith("attn.wq_b.weight"):
        return rows // config.num_attention_heads, columns
    return rows, columns


def _require_same(what: str, stored: Mapping[str, torch.Size], own: Mapping[str, torch.Size]) -> None:
    wrong = sorted(n for n in stored.keys() | own.keys() if stored.get(n) != own.get(n))
    if wrong:
        first = wrong[0]
        raise OptimizerError(
            f"the stored {what} state does not fit this policy and configuration: {len(wrong)} parameters "
            f"differ, first {first} (stored {stored.get(first)}, here {own.get(first)}); resume with the "
            "configuration the checkpoint was written under"
        )
