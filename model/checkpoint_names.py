"""Between a policy's own tensors and the published ones: where each expert's rows lie in the stacks.

The policy stacks experts and keeps hyper-connection parameters in a module; the published layout has one
tensor an expert and matrix, and flat names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from model.config import PolicyConfig

_HYPER = re.compile(r"^(.*\.)(hc_attn|hc_ffn)\.(fn|base|scale)$")
_STACK = re.compile(r"^(.*\.ffn)\.(w13|w2)$")
_PACKED = re.compile(r"^(.*\.ffn)\.packed\.(w13|w2)_(codes|scales|shared)$")
_FP8 = re.compile(
    r"(\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)"
    r"|\.shared_experts\.w[123]|\.engram\.wkv|\.main_proj)\.weight$"
)
_FP4 = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_TABLE = re.compile(r"\.engram\.embed\.weight$")
_FLOAT32 = re.compile(r"(\.hc_(attn|ffn)_(fn|base|scale)|\.attn_sink|\.gate\.bias(_vl)?)$")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a published tensor that is a part of a tensor of the policy."""

    published: str
    index: tuple[int | slice, ...]
    """Within the policy's tensor; () for all of it."""
    within: tuple[slice, ...]
    """Within the published tensor; () for all of it."""


def pieces(own: str, config: PolicyConfig) -> Iterator[Piece]:
    """What the policy's tensor `own` is made of."""
    hyper, stack, packed = _HYPER.match(own), _STACK.match(own), _PACKED.match(own)
    if hyper:
        yield Piece(f"{hyper[1]}{hyper[2]}_{hyper[3]}", (), ())
    elif stack:
        yield from _routed_pieces(stack[1], stack[2], "weight", config)
        yield from _shared_pieces(stack[1], stack[2], _routed(own, config), config)
    elif packed and packed[3] == "shared":
        yield from _shared_pieces(packed[1], packed[2], 0, config)
    elif packed:
        yield from _routed_pieces(packed[1], packed[2], _PARTS[packed[3]], config)
    else:
        yield Piece(own, (), ())


_PARTS = {"codes": "weight", "scales": "scale"}
"""Published names of what packed experts hold as it is stored."""


def is_packed(own: str) -> bool:
    """Whether the policy's tensor `own` holds routed experts as they are stored."""
    found = _PACKED.match(own)
    return found is not None and found[3] in _PARTS


def _routed(own: str, config: PolicyConfig) -> int:
    return config.dspark_n_routed_experts if own.startswith("mtp.") else config.n_routed_experts


def _matrices(kind: str, width: int) -> list[tuple[str, slice]]:
    """Published matrices of a stack, and their rows in it."""
    if kind == "w13":
        return [("w1", slice(0, width)), ("w3", slice(width, 2 * width))]
    return [("w2", slice(None))]


def _routed_pieces(prefix: str, kind: str, part: str, config: PolicyConfig) -> Iterator[Piece]:
    for matrix, rows in _matrices(kind, config.moe_intermediate_size):
        for expert in range(_routed(prefix, config)):
            yield Piece(f"{prefix}.experts.{expert}.{matrix}.{part}", (expert, rows), ())


def _shared_pieces(prefix: str, kind: str, first: int, config: PolicyConfig) -> Iterator[Piece]:
    width = config.moe_intermediate_size
    for matrix, rows in _matrices(kind, width):
        for shared in range(config.n_shared_experts):
            # One published matrix holds all shared experts, side by side along their hidden width.
            span = slice(shared * width, (shared + 1) * width)
            within = (
                () if config.n_shared_experts == 1 else (slice(None), span) if matrix == "w2" else (span,)
            )
            yield Piece(f"{prefix}.shared_experts.{matrix}.weight", (first + shared, rows), within)


class Storage(StrEnum):
    """How a published tensor is stored."""

    PLAIN = "plain"
    FP8_TILES = "fp8 tiles"
    FP8_ROWS = "fp8 rows"
    FP4_ROWS = "fp4 rows"


def storage(published: str, config: PolicyConfig) -> Storage:
    """How `published` is stored in a checkpoint of `config`."""
    if _TABLE.search(published):
        return Storage.FP8_ROWS if config.dtype == "bfloat16" else Storage.PLAIN
    if config.quantization is None:
        return Storage.PLAIN
    if _FP4.search(published):
        return Storage.FP4_ROWS if config.quantization.expert_dtype == "fp4" else Storage.FP8_TILES
    return Storage.FP8_TILES if _FP8.search(published) else Storage.PLAIN


def plain_dtype(published: str, config: PolicyConfig) -> torch.dtype:
    """Type of a tensor that is not quantised: the model's, but for a few that are always float32."""
    return torch.float32 if _FLOAT32.search(published) else getattr(torch, config.dtype)


def scale_name(published: str) -> str:
    """Name of the scales that belong to a quantised `published` tensor."""
    return published.removesuffix("weight") + "scale"


def published_names(own_names: Iterable[str], config: PolicyConfig) -> set[str]:
    """Names of all tensors of a checkpoint whose policy has the tensors `own_names`, scales included."""
    names = {piece.published for own in own_names for piece in pieces(own, config)}
    return names | {scale_name(name) for name in names if storage(name, config) is not Storage.PLAIN}
