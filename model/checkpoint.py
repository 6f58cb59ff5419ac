"""Policies on disk, in the published layout: `config.json` and safetensors shards under the published names.

Loading streams: one published tensor at a time is read, decoded and copied to its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from model.chat.base import ChatFormat
from model.checkpoint_files import (
    CheckpointError,
    DamagedFile,
    MissingTensor,
    ShardReader,
    ShardWriter,
    UnexpectedTensor,
    WrongShape,
    check_fit,
)
from model.checkpoint_names import Piece, Storage, pieces, scale_name, storage
from model.config import PolicyConfig
from model.layers.engram_table import EngramTable, MappedRows, TableStorage
from model.policy import Policy
from model.quant.blocks import WIDE_BLOCK
from model.quant.weights import decode_fp4, decode_fp8, encode_fp4, encode_fp8

__all__ = [
    "CheckpointError",
    "DamagedFile",
    "MissingTensor",
    "UnexpectedTensor",
    "WrongShape",
    "load_policy",
    "load_weights",
    "save_policy",
]

CONFIG = "config.json"
_SHARD_BYTES = 4 << 30
_UNUSED = ("image_pad",)
"""Published tensors that nothing reads."""


def save_policy(
    policy: Policy, folder: Path | str, *, chat: ChatFormat | None = None, shard_bytes: int = _SHARD_BYTES
) -> None:
    """Write `policy` to `folder` (made if need be), in the storage formats its configuration names.

    With `chat`, its wording and tokenizer are written too: `model.chat.load_chat(folder)` reads them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, shard_bytes)
    for own, tensor in policy.state_dict().items():
        for published, part in _published_parts(own, tensor, policy.config):
            for name, stored in _encode(published, part, policy.config):
                writer.add(name, stored)
    for name, table in _mapped_tables(policy):
        writer.add(name, table.mapped.rows)
        if table.mapped.scale is not None:
            writer.add(scale_name(name), table.mapped.scale)
    writer.finish()
    if chat is not None:
        chat.save(folder)
    (folder / CONFIG).write_text(json.dumps(policy.config.to_published(), indent=1))


def load_policy(folder: Path | str, *, tables: TableStorage = "resident") -> Policy:
    """Read a policy that `save_policy` or the publisher wrote.

    Args:
        folder: the checkpoint.
        tables: where the n-gram tables are to live. "mmap" reads their rows out of the checkpoint's files,
            which must stay as they are; such tables are not trained.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of the wrong shape, or a file is damaged.
        ValueError: the configuration is incomplete or unsupported.
    """
    folder = Path(folder)
    config_file = folder / CONFIG
    if not config_file.exists():
        raise CheckpointError(f"{folder} has no {CONFIG}: it is not a checkpoint folder")
    policy = Policy(PolicyConfig.from_published(json.loads(config_file.read_text())), tables=tables)
    reader = ShardReader.of_folder(folder)
    used = load_weights(policy, reader)
    for name, table in _mapped_tables(policy):
        used |= _map_table(name, table, reader, policy.config)
    unexpected = sorted(reader.names - used - set(_UNUSED))
    if unexpected:
        raise UnexpectedTensor(
            f"{folder} holds {len(unexpected)} tensors its configuration has no place for, first "
            f"{unexpected[0]!r}: {CONFIG} belongs to another model"
        )
    return policy


@torch.no_grad()
def load_weights(policy: Policy, reader: ShardReader) -> set[str]:
    """Copy every tensor of `policy` from `reader`; returns the names that were used."""
    used: set[str] = set()
    for own, tensor in policy.state_dict().items():
        for piece in pieces(own, policy.config):
            names, value = _read(piece, reader, policy.config)
            target = tensor[piece.index] if piece.index else tensor
            check_fit(piece.published, value, target.shape)
            target.copy_(value)
            used |= names
    return used


def _mapped_tables(policy: Policy) -> list[tuple[str, EngramTable]]:
    """Published names of the tables that are no parameters of the policy."""
    return [
        (f"{name}.weight", module)
        for name, module in policy.named_modules()
        if isinstance(module, EngramTable) and module.storage == "mmap"
    ]


def _map_table(name: str, table: EngramTable, reader: ShardReader, config: PolicyConfig) -> set[str]:
    rows, names, scale = reader.map(name), {name}, None
    kind = storage(name, config)
    if kind is Storage.FP8_ROWS:
        _check_type(name, rows, kind)
        scale = reader.map(scale_name(name))
        names.add(scale_name(name))
        check_fit(scale_name(name), scale, torch.Size((table.shape[0], -(-table.shape[1] // WIDE_BLOCK))))
    check_fit(name, rows, table.shape)
    table.map_rows(MappedRows(rows, scale))
    return names


def _check_type(name: str, value: Tensor, kind: Storage) -> None:
    if value.dtype not in _STORED_TYPES[kind]:
        raise WrongShape(f"tensor {name!r} is {value.dtype}, the configuration asks for {kind}")


def _tile(config: PolicyConfig) -> tuple[int, int]:
    return (WIDE_BLOCK, WIDE_BLOCK) if config.quantization is None else config.quantization.weight_block_size


_DECODERS: dict[Storage, Callable[[Tensor, Tensor, PolicyConfig], Tensor]] = {
    Storage.FP8_TILES: lambda weight, scale, config: decode_fp8(weight, scale, _tile(config)),
    Storage.FP8_ROWS: lambda weight, scale, config: decode_fp8(weight, scale, (1, WIDE_BLOCK)),
    Storage.FP4_ROWS: lambda weight, scale, config: decode_fp4(weight, scale),
}
_STORED_TYPES = {
    Storage.FP8_TILES: (torch.float8_e4m3fn,),
    Storage.FP8_ROWS: (torch.float8_e4m3fn,),
    Storage.FP4_ROWS: (torch.uint8, torch.int8),
}


def _read(piece: Piece, reader: ShardReader, config: PolicyConfig) -> tuple[set[str], Tensor]:
    value, names = reader.read(piece.published), {piece.published}
    kind = storage(piece.published, config)
    if kind is not Storage.PLAIN:
        _check_type(piece.published, value, kind)
        scale = scale_name(piece.published)
        value = _DECODERS[kind](value, reader.read(scale), config)
        names.add(scale)
    return names, value[piece.within] if piece.within else value


def _published_parts(own: str, tensor: Tensor, config: PolicyConfig) -> list[tuple[str, Tensor]]:
    """Published names and values of the policy's tensor `own`; split published tensors are put together."""
    parts: dict[str, list[Tensor]] = {}
    joins: dict[str, int] = {}
    for piece in pieces(own, config):
        parts.setdefault(piece.published, []).append(tensor[piece.index] if piece.index else tensor)
        joins[piece.published] = max(len(piece.within) - 1, 0)
    return [(name, torch.cat(own_parts, dim=joins[name])) for name, own_parts in parts.items()]


def _encode(published: str, value: Tensor, config: PolicyConfig) -> list[tuple[str, Tensor]]:
    kind = storage(published, config)
    if kind is Storage.PLAIN:
        # Held in float32, published in the model's dtype.
        narrow = published.endswith("confidence_head.proj.weight")
        return [(published, value.to(getattr(torch, config.dtype)) if narrow else value)]
    if kind is Storage.FP4_ROWS:
        weight, scale = encode_fp4(value)
    else:
        weight, scale = encode_fp8(value, (1, WIDE_BLOCK) if kind is Storage.FP8_ROWS else _tile(config))
    return [(published, weight), (scale_name(published), scale)]
