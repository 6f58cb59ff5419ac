"""Reading of reference folders, and the small vocabulary that all parity checks share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.checkpoint import load_weights
from model.checkpoint_files import ShardReader
from model.config import PolicyConfig
from model.policy import Policy

WEIGHT_FREE = ("in.", "out.", "tap.")


@dataclass(frozen=True, slots=True)
class Case:
    """Outcome of one check."""

    name: str
    passed: bool
    detail: str


class ModelFile:
    """One `<stem>.json` with its `<stem>.safetensors`."""

    def __init__(self, config_file: Path) -> None:
        self.stem = config_file.stem
        self.published: dict[str, Any] = json.loads(config_file.read_text())
        self.mode: str = self.published["fixture"]["mode"]
        self.prefix = self.stem.removesuffix(self.mode)
        self.config = PolicyConfig.from_published(self.published)
        path = config_file.with_suffix(".safetensors")
        self.tensors = load_file(path)
        self.policy = Policy(self.config)
        self.policy.fake_quant = bool(self.published["fixture"]["kv_and_index_fake_quant"])
        self.used = load_weights(self.policy, ShardReader([path]))

    @property
    def token_ids(self) -> Tensor:
        """[B, S]."""
        return self.tensors["in.ids"]

    @property
    def clean(self) -> bool:
        """Whether nothing in it is quantised."""
        return self.mode == "clean_fp32"


def worst(ours: Tensor, theirs: Tensor, agree: Tensor | None = None) -> float:
    """Largest absolute difference over the rows [B, S] in `agree`; infinite where only one is finite."""
    ours, theirs = ours.detach().reshape(theirs.shape).float(), theirs.float()
    difference = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(nan=torch.inf)
    if agree is not None:
        difference = difference[agree]
    return float(difference.max()) if difference.numel() else 0.0


def hex_tensor(values: Any) -> Tensor:
    """Float32 tensor of nested lists of hexadecimal floats."""
    if isinstance(values, str):
        return torch.tensor(float.fromhex(values))
    return torch.stack([hex_tensor(value) for value in values])
