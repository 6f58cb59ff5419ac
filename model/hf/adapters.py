"""Low-rank adapters, on the library `peft`: added to a model in place, named as its files name them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from model.hf.settings import HFPolicyError, LoraSettings

ADAPTER = "default"
FILE_PREFIX = "base_model.model."
"""Of names in adapter files."""


def add_adapters(model: Any, lora: LoraSettings) -> Any:
    """Adds adapters, seeded; everything else no longer learns.

    Raises:
        HFPolicyError: `peft` is missing, or no layer has such a name.
    """
    try:
        from peft import inject_adapter_in_model
    except ImportError as error:
        raise HFPolicyError("policy.lora needs the library peft: pip install 'tempering[hf]'") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)
        try:
            return inject_adapter_in_model(adapter_config(lora), model, ADAPTER)
        except ValueError as error:
            raise HFPolicyError(f"policy.lora.targets={list(lora.targets)}: {error}") from error


def adapter_config(lora: LoraSettings) -> Any:
    """The settings as `peft` has them."""
    from peft import LoraConfig

    targets = list(lora.targets) or "all-linear"
    alpha: Any = lora.alpha
    return LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return "lora_" in name


def plain_name(name: str) -> str:
    """A parameter's name without that of its adapter."""
    return name.replace(f".{ADAPTER}.", ".") if is_adapter(name) else name


@torch.no_grad()
def merged_state(model: Any) -> dict[str, Tensor]:
    """The weights of a model with its adapters added in, named as if there were none."""
    deltas: dict[str, Any] = {}
    for path, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            deltas[f"{path}.weight"] = module
    merged: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if is_adapter(name):
            continue
        plain = name.replace(".base_layer.", ".")
        if plain in deltas:
            value = (value.float() + deltas[plain].get_delta_weight(ADAPTER).float()).to(value.dtype)
        merged[plain] = value
    return merged


def described(lora: LoraSettings) -> str:
    """The settings in words."""
    return ", ".join(f"{name} {value}" for name, value in asdict(lora).items())
