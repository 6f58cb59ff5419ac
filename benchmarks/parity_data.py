"""Reading of reference folders, and the small vocabulary that all parity checks share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
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

CLEAN = "clean_fp32"
DECODE_KEY = re.compile(r"\.prefill(\d+)\.logits$")
NOT_WEIGHTS = ("in.", "out.", "tap.")
CHOICES = {"router_ids": "router_margin", "index_topk": "index_margin", "candidate_mask": "candidate_margin"}
"""Discrete choices, and how near each was to another."""
_UNUSED = ("image_pad",)
"""Published weights that nothing reads."""


@dataclass(frozen=True, slots=True)
class Case:
    """Outcome of one check."""

    name: str
    passed: bool
    detail: str


def guarded(name: str, check: Callable[[], Iterable[Case]]) -> Iterator[Case]:
    """The cases of `check`; whatever goes wrong with a file is a failure of that file, not of the check."""
    try:
        yield from check()
    except Exception as error:
        yield Case(name, False, f"{type(error).__name__}: {error}")


class ModelFile:
    """One `<stem>.json` with its `<stem>.safetensors`."""

    def __init__(self, config_file: Path) -> None:
        self.stem = config_file.stem
        self.published: dict[str, Any] = json.loads(config_file.read_text())
        self.mode = mode_of(self.published)
        self.prefix = self.stem.removesuffix(self.mode)
        self.config = PolicyConfig.from_published(self.published)
        path = config_file.with_suffix(".safetensors")
        self.policy = Policy(self.config)
        self.policy.fake_quant = not self.clean
        self.used = load_weights(self.policy, ShardReader([path]))
        self.tensors = load_file(path)

    def unknown(self) -> list[Case]:
        """A failure for each tensor that is neither a weight of this configuration nor a known input."""
        known = self.used | {"in.ids", *_UNUSED}
        rest = [name for name in self.tensors if name not in known and not name.startswith(NOT_WEIGHTS[1:])]
        return [Case(f"{self.stem} {name}", False, "no check for this tensor") for name in sorted(rest)]

    @property
    def token_ids(self) -> Tensor:
        """[B, S]."""
        return self.tensors["in.ids"]

    @property
    def clean(self) -> bool:
        """Whether nothing in it is quantised."""
        return self.mode == CLEAN


def mode_of(published: dict[str, Any]) -> str:
    """How a model file was made: what it says, or what its configuration implies."""
    stated = published.get("fixture", {}).get("mode")
    if stated is not None:
        return str(stated)
    if published.get("quantization_config") is not None:
        return "quant_fp8_fp4"
    return CLEAN if published.get("dtype") == "float32" else "quant_bf16"


def fitted(kind: str, ours: Tensor, expected: Tensor) -> Tensor:
    """Our result in the shape of the reference's.

    Ours is packed [B * S, ...] or by row. Where a sequence ends inside a group of tokens, ours has a place
    for the open group, which no token sees; the reference has none. A list of choices has its unused places
    last.
    """
    if kind in ("latent", "main_kv", "index_k"):
        return ours[:, : expected.shape[1]]
    if kind not in ("index_scores", "candidate_mask", "index_topk"):
        return ours.reshape(expected.shape)
    ours = ours.reshape(*expected.shape[:2], -1)
    missing = expected.shape[-1] - ours.shape[-1]
    if kind == "index_topk" and missing > 0:
        return torch.nn.functional.pad(ours, (0, missing), value=-1)
    return ours[..., : expected.shape[-1]]


def choices(
    config: PolicyConfig, layer: int, kind: str, ours: Tensor | None, expected: Tensor, length: int
) -> tuple[Tensor, Tensor] | None:
    """Our choice and the reference's as tensors that are equal where both choose alike; None without ours.

    Experts are a set, and keys that a token does not see are nobody's candidates. With few keys every block
    is a candidate, and the policy keeps no mask.
    """
    if ours is None:
        block = config.candidate_block_size * config.ratio(layer)
        if kind != "candidate_mask" or -(-length // block) > config.candidate_topk_blocks:
            return None
        ours = torch.ones_like(expected)
    ours = fitted(kind, ours, expected)
    if kind == "router_ids":
        return ours.sort(-1).values, expected.sort(-1).values
    if kind == "candidate_mask":
        seen = (torch.arange(length) + 1) // config.ratio(layer)
        visible = torch.arange(expected.shape[-1]) < seen[:, None]
        return ours & visible, expected & visible
    return ours, expected


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
