"""Policies on disk, in the published layout: `config.json` and safetensors shards under the published names.

Loading streams: one published tensor at a time is read, decoded and copied to its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from model.chat.base import ChatFormat
from model.checkpoint_files import (
    CheckpointError,
    DamagedFile,
    MissingTensor,
    ShardReader,
    UnexpectedTensor,
    WrongShape,
    check_fit,
)
from model.checkpoint_names import Piece, Storage, is_packed, pieces, plain_dtype, scale_name, storage
from model.checkpoint_writer import ShardWriter
from model.config import PolicyConfig
from model.layers.engram_table import EngramTable, MappedRows, TableStorage
from model.layers.packed import ExpertStorage, check_scales
from model.policy import Policy
from model.quant.blocks import WIDE_BLOCK
from model.quant.weights import as_pairs, as_words, decode_fp4, decode_fp8, encode_fp4, encode_fp8

__all__ = [
    "CheckpointError",
    "DamagedFile",
    "MissingTensor",
    "UnexpectedTensor",
    "WrongShape",
    "load_policy",
    "load_weights",
    "read_config",
    "read_published",
    "save_policy",
    "write_published",
]

CONFIG = "config.json"
_SHARD_BYTES = 4 << 30
_TABLE_ROWS = 1 << 16
"""Rows of an n-gram table that are converted at once."""
_UNUSED = ("image_pad",)
"""Published tensors that nothing reads."""


def save_policy(
    policy: Policy,
    folder: Path | str,
    *,
    stored: PolicyConfig | None = None,
    chat: ChatFormat | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write `policy` to `folder` (made if need be), one tensor at a time.

    Args:
        policy: what to write.
        folder: where.
        stored: the configuration to write. It may differ from the policy's in `dtype` and `quantization`, so
            that a policy trained in float32 is written as FP8 and FP4, or the other way round.
        chat: its wording and tokenizer are written too: `model.chat.load_chat(folder)` reads them.
        shard_bytes: size of a shard, unless a single tensor is larger.

    Raises:
        ValueError: `stored` differs in more than that, or mapped tables would have to be converted.
    """
    folder, config = Path(folder), policy.config if stored is None else stored
    _require_same_shape(policy.config, config)
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder, shard_bytes) as writer:
        for own, tensor in policy.state_dict().items():
            for published, part in _published_parts(own, tensor, config):
                if is_packed(own):
                    _require_fp4(config)
                    writer.add(published, as_pairs(part) if published.endswith("weight") else part)
                else:
                    write_published(writer, published, part, config)
        for name, table in _mapped_tables(policy):
            _write_mapped(writer, name, table, config)
        writer.finish()
    if chat is not None:
        chat.save(folder)
    (folder / CONFIG).write_text(json.dumps(config.to_published(), indent=1))


def load_policy(
    folder: Path | str,
    *,
    dtype: str | None = None,
    tables: TableStorage = "resident",
    experts: ExpertStorage = "plain",
) -> Policy:
    """Read a policy that `save_policy` or the publisher wrote, one tensor at a time.

    Args:
        folder: the checkpoint.
        dtype: of the policy ("float32", "bfloat16"); None: as stored.
        tables: where the n-gram tables are to live. "mmap" reads their rows out of the checkpoint's files,
            which must stay as they are; such tables are not trained.
        experts: how routed experts are to be held. "packed" keeps the FP4 of the checkpoint, a quarter of
            their bytes in bfloat16; such experts are not trained.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of the wrong shape or type, or a file is damaged.
        ValueError: the configuration is incomplete or unsupported, or experts to be kept packed are not
            stored in FP4.
    """
    folder = Path(folder)
    stored = read_config(folder)
    if experts == "packed":
        _require_fp4(stored)
    own = stored if dtype is None else replace(stored, dtype=dtype)
    policy = Policy(own, tables=tables, experts=experts)
    reader = ShardReader.of_folder(folder)
    used = load_weights(policy, reader, stored)
    for name, table in _mapped_tables(policy):
        used |= _map_table(name, table, reader, stored)
    unexpected = sorted(reader.names - used - set(_UNUSED))
    if unexpected:
        raise UnexpectedTensor(
            f"{folder} holds {len(unexpected)} tensors its configuration has no place for, first "
            f"{unexpected[0]!r}: {CONFIG} belongs to another model"
        )
    return policy


def read_config(folder: Path) -> PolicyConfig:
    """The configuration that a checkpoint folder holds.

    Raises:
        CheckpointError: There is none, or it cannot be read.
    """
    file = folder / CONFIG
    if not file.exists():
        raise CheckpointError(f"{folder} has no {CONFIG}: it is not a checkpoint folder")
    try:
        published = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFile(f"{file} is not JSON ({error}): copy it anew") from error
    if not isinstance(published, dict):
        raise DamagedFile(f"{file} is not a JSON object: copy it anew")
    return PolicyConfig.from_published(published)


def _require_same_shape(own: PolicyConfig, stored: PolicyConfig) -> None:
    if replace(stored, dtype=own.dtype, quantization=own.quantization) != own:
        raise ValueError(
            "a checkpoint may store its policy in another dtype or quantization, but not in another shape: "
            "make `stored` from policy.config with dataclasses.replace"
        )


@torch.no_grad()
def load_weights(policy: Policy, reader: ShardReader, stored: PolicyConfig | None = None) -> set[str]:
    """Copy every tensor of `policy` from `reader`; returns the names that were used.

    Args:
        policy: what to fill.
        reader: the files.
        stored: says how tensors are stored; None: as the policy's own configuration does.
    """
    config, used = policy.config if stored is None else stored, set[str]()
    for own, tensor in policy.state_dict().items():
        for piece in pieces(own, config):
            target = tensor[piece.index] if piece.index else tensor
            if is_packed(own):
                _load_packed(piece.published, target, reader)
                used.add(piece.published)
                continue
            if storage(piece.published, config) is Storage.FP8_ROWS:
                used |= _load_table(piece.published, target, reader)
                continue
            names, value = _read(piece, reader, target.shape, config)
            target.copy_(value)
            used |= names
    return used


def _require_fp4(config: PolicyConfig) -> None:
    if config.quantization is None or config.quantization.expert_dtype != "fp4":
        raise ValueError(
            "packed experts are those of a checkpoint that stores experts in FP4, and this configuration "
            "does not: load it with plain experts, and round them with Policy.pack_experts() if need be; a "
            "packed policy is saved with a `stored` configuration whose quantization says fp4"
        )


def _load_packed(name: str, target: Tensor, reader: ShardReader) -> None:
    """Codes or scale bytes of an expert, as they are stored."""
    value = reader.read(name)
    if value.dtype.itemsize != 1:
        raise WrongShape(f"tensor {name!r} is {value.dtype}, the configuration asks for {Storage.FP4_ROWS}")
    check_fit(name, value.shape, target.shape)
    if name.endswith("scale"):
        target.copy_(value.view(torch.uint8))
        check_scales(target)
    else:
        target.copy_(as_words(value))


def _load_table(name: str, target: Tensor, reader: ShardReader) -> set[str]:
    """A table of FP8 rows, some rows at a time: decoded at once it would take four times its stored size."""
    scale, (rows, width) = scale_name(name), target.shape
    check_fit(name, reader.shape(name), target.shape)
    check_fit(scale, reader.shape(scale), (rows, -(-width // WIDE_BLOCK)))
    for begin in range(0, rows, _TABLE_ROWS):
        part = slice(begin, min(begin + _TABLE_ROWS, rows))
        codes = reader.read(name, part)
        _check_type(name, codes, Storage.FP8_ROWS)
        target[part] = decode_fp8(codes, reader.read(scale, part), (1, WIDE_BLOCK)).to(target.dtype)
    return {name, scale}


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
        check_fit(scale_name(name), scale.shape, (table.shape[0], -(-table.shape[1] // WIDE_BLOCK)))
    check_fit(name, rows.shape, table.shape)
    table.map_rows(MappedRows(rows, scale))
    return names


def _check_type(name: str, value: Tensor, kind: Storage) -> None:
    if value.dtype not in _STORED_TYPES[kind]:
        raise WrongShape(f"tensor {name!r} is {value.dtype}, the configuration asks for {kind}")


def _tile(config: PolicyConfig) -> tuple[int, int]:
    return (WIDE_BLOCK, WIDE_BLOCK) if config.quantization is None else config.quantization.weight_block_size


_DECODERS: dict[Storage, Callable[[Tensor, Tensor, PolicyConfig], Tensor]] = {
    Storage.FP8_TILES: lambda weight, scale, config: decode_fp8(weight, scale, _tile(config)),
    Storage.FP4_ROWS: lambda weight, scale, config: decode_fp4(weight, scale),
}
_STORED_TYPES = {
    Storage.PLAIN: (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    Storage.FP8_TILES: (torch.float8_e4m3fn,),
    Storage.FP8_ROWS: (torch.float8_e4m3fn,),
    Storage.FP4_ROWS: (torch.uint8, torch.int8),
}


def _read(
    piece: Piece, reader: ShardReader, shape: torch.Size, config: PolicyConfig
) -> tuple[set[str], Tensor]:
    """The names that were read, and the value [shape] of `piece`."""
    name, kind = piece.published, storage(piece.published, config)
    whole = list(shape)
    if piece.within:
        # All shared experts lie side by side.
        whole[len(piece.within) - 1] *= config.n_shared_experts
    rows, columns = (*whole, 1, 1)[:2]
    value, names = reader.read(name), {name}
    _check_type(name, value, kind)
    check_fit(name, value.shape, (rows, columns // 2) if kind is Storage.FP4_ROWS else whole)
    if kind is not Storage.PLAIN:
        scale, tile = scale_name(name), (1, WIDE_BLOCK) if kind is Storage.FP4_ROWS else _tile(config)
        scales = reader.read(scale)
        check_fit(scale, scales.shape, (-(-rows // tile[0]), -(-columns // tile[1])))
        value = _DECODERS[kind](value, scales, config)
        names.add(scale)
    return names, value[piece.within] if piece.within else value


def read_published(name: str, reader: ShardReader, config: PolicyConfig) -> Tensor:
    """One published tensor as its values: float32 when it is stored in fewer bits, else as it is stored.

    Raises:
        CheckpointError: It is missing, damaged, or not of the type that `config` asks for.
    """
    kind, value = storage(name, config), reader.read(name)
    _check_type(name, value, kind)
    if kind is Storage.PLAIN:
        return value
    scale = reader.read(scale_name(name))
    if kind is Storage.FP8_ROWS:
        return decode_fp8(value, scale, (1, WIDE_BLOCK))
    return _DECODERS[kind](value, scale, config)


def _published_parts(own: str, tensor: Tensor, config: PolicyConfig) -> list[tuple[str, Tensor]]:
    """Published names and values of the policy's tensor `own`; split published tensors are put together."""
    parts: dict[str, list[Tensor]] = {}
    joins: dict[str, int] = {}
    for piece in pieces(own, config):
        parts.setdefault(piece.published, []).append(tensor[piece.index] if piece.index else tensor)
        joins[piece.published] = max(len(piece.within) - 1, 0)
    return [
        (name, own_parts[0] if len(own_parts) == 1 else torch.cat(own_parts, dim=joins[name]))
        for name, own_parts in parts.items()
    ]


def write_published(writer: ShardWriter, published: str, value: Tensor, config: PolicyConfig) -> None:
    """Write one published tensor, encoded as `config` stores it."""
    kind, scale = storage(published, config), scale_name(published)
    if kind is Storage.PLAIN:
        writer.add(published, value.to(plain_dtype(published, config)))
    elif kind is Storage.FP8_ROWS:
        _write_table(writer, published, value)
    else:
        encoded = encode_fp4(value) if kind is Storage.FP4_ROWS else encode_fp8(value, _tile(config))
        for name, part in zip((published, scale), encoded, strict=True):
            writer.add(name, part)


def _write_table(writer: ShardWriter, published: str, value: Tensor) -> None:
    """A table as FP8 rows, encoded some rows at a time."""
    scales: list[Tensor] = []

    def rows() -> Iterator[Tensor]:
        for part in value.split(_TABLE_ROWS):
            codes, scale = encode_fp8(part, (1, WIDE_BLOCK))
            scales.append(scale)
            yield codes

    writer.stream(published, torch.float8_e4m3fn, value.shape, rows())
    writer.add(scale_name(published), torch.cat(scales))


def _write_mapped(writer: ShardWriter, name: str, table: EngramTable, config: PolicyConfig) -> None:
    """A mapped table, as it is stored."""
    mapped, kind = table.mapped, storage(name, config)
    if (mapped.scale is not None) != (kind is Storage.FP8_ROWS):
        raise ValueError(
            f"the table {name!r} is mapped from a checkpoint and cannot be converted to {kind}: load the "
            "policy with resident tables"
        )
    writer.add(name, mapped.rows)
    if mapped.scale is not None:
        writer.add(scale_name(name), mapped.scale)
