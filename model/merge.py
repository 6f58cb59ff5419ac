"""The weighted average of several checkpoints of one model, as one more checkpoint.

Successive runs start from a merge of what was trained on different scaffolds. One tensor at a time is read
from every source, added up in float32, and stored in the type it had.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint import CONFIG, read_config, read_published, write_published
from model.checkpoint_files import INDEX, ShardReader
from model.checkpoint_names import Storage, scale_name, storage
from model.checkpoint_writer import ShardWriter
from model.config import PolicyConfig
from model.durable import new_folder

PROVENANCE = "merge.json"
_SHARD_BYTES = 4 << 30
_SUM = 1e-6


class MergeError(ValueError):
    """Checkpoints that cannot be averaged: which tensor or file, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint's folder, its weight in the average, and the name it goes by in messages."""

    name: str
    folder: Path
    weight: float


@dataclass(slots=True)
class Merged:
    """What was averaged.

    Attributes:
        tensors: how many.
        likeness: by source, the cosine between its matrices and the first source's: near 1 for policies
            that began as one, near 0 for others, whose average is no policy at all.
    """

    tensors: int
    likeness: dict[str, float]


def merge_checkpoints(sources: Sequence[Source], out: Path, *, shard_bytes: int = _SHARD_BYTES) -> Merged:
    """Writes the average of `sources` to `out`, a new folder.

    The folder appears when it is complete. It holds the sources' configuration, tokenizer and chat format,
    and `merge.json`, which says what it was made of.

    Raises:
        MergeError: Weights do not add up to 1, `out` exists, or the sources differ in configuration,
            tokenizer, tensors,
            shapes or types, or hold a value that is not finite.
        CheckpointError: A source cannot be read.
    """
    _check_weights(sources)
    if out.exists():
        raise MergeError(f"{out} exists; give a folder that does not, or remove it")
    config = _same_config(sources)
    others = _same_files(sources)
    readers = [ShardReader.of_folder(source.folder) for source in sources]
    names = _same_names(sources, readers, config)
    products = torch.zeros(2, len(sources), dtype=torch.float64)
    try:
        with new_folder(out) as partial:
            with ShardWriter(partial, shard_bytes) as writer:
                for name in names:
                    _write(writer, name, _average(name, sources, readers, config, products), config)
                writer.finish()
            for other in others:
                shutil.copyfile(sources[0].folder / other, partial / other)
            record = [asdict(source) | {"folder": str(source.folder)} for source in sources]
            (partial / PROVENANCE).write_text(json.dumps(record, indent=1))
    except OSError as error:
        raise MergeError(f"{out} cannot be written ({error.strerror}); give another folder") from error
    dots, squares = products.tolist()
    sizes = [math.sqrt(squares[0] * square) for square in squares]
    cosines = [dot / size if size else 0.0 for dot, size in zip(dots, sizes, strict=True)]
    names_after = [source.name for source in sources[1:]]
    return Merged(len(names), dict(zip(names_after, cosines[1:], strict=True)))


def _check_weights(sources: Sequence[Source]) -> None:
    wrong = [source for source in sources if not (math.isfinite(source.weight) and source.weight > 0)]
    if wrong:
        raise MergeError(f"{wrong[0].name}={wrong[0].weight:g}: each weight is a number above 0")
    if len(sources) < 2:
        raise MergeError("one checkpoint alone is its own average; give two or more, as in A=0.6 B=0.4")
    total = math.fsum(source.weight for source in sources)
    if abs(total - 1.0) > _SUM:
        right = " ".join(f"{source.name}={source.weight / total:.6g}" for source in sources)
        raise MergeError(f"the weights add up to {total:g}, not to 1; in proportion that would be {right}")


def _same_config(sources: Sequence[Source]) -> PolicyConfig:
    first = read_config(sources[0].folder)
    for source in sources[1:]:
        other = asdict(read_config(source.folder))
        gaps = [
            f"{key} ({value} and {other[key]})" for key, value in asdict(first).items() if value != other[key]
        ]
        if gaps:
            raise MergeError(
                f"{sources[0].name} and {source.name} are not of one model: their {CONFIG} differ in "
                f"{', '.join(gaps)}; merge checkpoints of the same model"
            )
    return first


def _same_files(sources: Sequence[Source]) -> list[str]:
    """Names of the files beside the weights (tokenizer, chat format, configuration), equal in all sources."""
    names = [_beside(source.folder) for source in sources]
    for source, found in zip(sources[1:], names[1:], strict=True):
        if odd := sorted(names[0] ^ found):
            raise MergeError(
                f"only one of {sources[0].name} and {source.name} has {odd[0]}; copy it to the other, or "
                "remove it"
            )
        for name in sorted(found - {CONFIG}):
            if (sources[0].folder / name).read_bytes() != (source.folder / name).read_bytes():
                raise MergeError(
                    f"{name} of {sources[0].name} and {source.name} differ: their tokens would not mean the "
                    "same; "
                    "merge checkpoints with one tokenizer and chat format"
                )
    return sorted(names[0])


def _beside(folder: Path) -> set[str]:
    return {
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, PROVENANCE)
    }


def _same_names(sources: Sequence[Source], readers: Sequence[ShardReader], config: PolicyConfig) -> list[str]:
    """Names of the tensors without those of scales, in all sources the same."""
    for source, reader in zip(sources[1:], readers[1:], strict=True):
        for name in sorted(readers[0].names ^ reader.names):
            has = sources[0].name if name in readers[0] else source.name
            raise MergeError(f"tensor {name!r} is in {has} only; merge checkpoints of the same model")
    names = readers[0].names
    scales = {scale_name(name) for name in names if storage(name, config) is not Storage.PLAIN}
    return sorted(names - scales)


def _average(
    name: str,
    sources: Sequence[Source],
    readers: Sequence[ShardReader],
    config: PolicyConfig,
    products: Tensor,
) -> Tensor:
    """The average of one tensor, float32 inside, in the type it is stored in when that is plain.

    Adds to `products` [2, sources] a matrix's products of the first source with each, and of each with
    itself.
    """
    first = read_published(name, readers[0], config)
    total = torch.zeros(first.shape, dtype=torch.promote_types(first.dtype, torch.float32))
    for i, (source, reader) in enumerate(zip(sources, readers, strict=True)):
        value = first if reader is readers[0] else read_published(name, reader, config)
        if (value.shape, value.dtype) != (first.shape, first.dtype):
            raise MergeError(
                f"tensor {name!r} is {value.dtype} {list(value.shape)} in {source.name} and {first.dtype} "
                f"{list(first.shape)} in {sources[0].name}; merge checkpoints of the same model and type"
            )
        if not bool(value.isfinite().all()):
            raise MergeError(
                f"tensor {name!r} of {source.name} holds values that are not finite; merge another"
            )
        wide = value.to(total.dtype)
        total.add_(wide, alpha=source.weight)
        if wide.dim() > 1:
            products[:, i] += torch.stack([(first.to(total.dtype) * wide).sum(), (wide * wide).sum()])
    return total.to(first.dtype)


def _write(writer: ShardWriter, name: str, value: Tensor, config: PolicyConfig) -> None:
    if storage(name, config) is Storage.PLAIN:
        writer.add(name, value)
    else:
        write_published(writer, name, value, config)
