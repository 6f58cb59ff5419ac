"""A folder of safetensors shards, read one tensor at a time, and what can be wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[^/\\]+\.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as what it claims to be."""


class MissingTensor(CheckpointError):
    """The checkpoint lacks a tensor that the configuration asks for."""


class UnexpectedTensor(CheckpointError):
    """The checkpoint holds a tensor that the configuration has no place for."""


class WrongShape(CheckpointError):
    """A tensor has another shape or type than the configuration asks for."""


class DamagedFile(CheckpointError):
    """A file that is not complete, or not of this format."""


class ShardReader:
    """Tensors of several safetensors files by name; nothing is read before it is asked for.

    A file is open only while a tensor is read from it: an open one stays mapped, and the pages read would
    add up to a second copy of the checkpoint in memory.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._where: dict[str, Path] = {}
        for file in files:
            with _opened(file) as opened:
                names = list(opened.keys())
            twice = sorted(self._where.keys() & set(names))
            if twice:
                raise DamagedFile(
                    f"tensor {twice[0]!r} stands in {self._where[twice[0]]} and in {file}: keep one of them"
                )
            self._where |= dict.fromkeys(names, file)

    @staticmethod
    def of_folder(folder: Path) -> ShardReader:
        """All shards of `folder`.

        Raises:
            MissingTensor: the index names a shard that is not there, or there is no shard at all.
            DamagedFile: the index cannot be read, or leads out of the folder or to other files than shards.
        """
        index = folder / INDEX
        if index.exists():
            names = _shards(index)
            absent = [name for name in names if not (folder / name).exists()]
            if absent:
                raise MissingTensor(f"{folder} lacks {len(absent)} shards, first {absent[0]}: copy them too")
            return ShardReader(folder / name for name in names)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise MissingTensor(
                f"{folder} holds no *.safetensors file: is it a checkpoint folder? Other formats are not read"
            )
        return ShardReader(files)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor. Raises MissingTensor."""
        with _opened(self._file(name)) as opened:
            return tuple(opened.get_slice(name).get_shape())

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """One tensor, or some of its rows. Raises MissingTensor."""
        with _opened(self._file(name)) as opened:
            return opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]

    def _file(self, name: str) -> Path:
        if name not in self._where:
            raise MissingTensor(
                f"the checkpoint has no tensor {name!r}: its configuration does not belong to it"
            )
        return self._where[name]

    def map(self, name: str) -> Tensor:
        """One tensor as a view of its file: read from it as it is used, and never copied as a whole.

        Raises:
            MissingTensor: there is no such tensor.
            DamagedFile: it does not lie in the file as its type needs.
        """
        return _mapped(self._file(name), name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{file} cannot be read ({error}): copy it anew") from error


def _shards(index: Path) -> list[str]:
    """File names in an index, each a plain name of a safetensors file."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(f"{index} is not an index of shards ({error!r}): copy it anew") from error
    wrong = [name for name in names if not _SHARD_NAME.fullmatch(str(name))]
    if wrong:
        raise DamagedFile(
            f"{index} names {wrong[0]!r}: shards are *.safetensors files in the folder itself, and nothing "
            "else is read"
        )
    return names


_TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
}
"""Types of tensors that are mapped. Scale bytes are read as bytes."""


def _mapped(file: Path, name: str) -> Tensor:
    """The format: the length of a JSON header in eight bytes, the header, the data (where offsets begin)."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(length))[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    if entry["dtype"] not in _TYPES:
        raise WrongShape(f"tensor {name!r} is {entry['dtype']}, which is not mapped: load it instead")
    dtype = _TYPES[entry["dtype"]]
    if begin % dtype.itemsize:
        raise DamagedFile(
            f"{file}: tensor {name!r} begins at an odd place, so that it cannot be mapped: load it"
        )
    data = torch.from_file(str(file), shared=False, size=end, dtype=torch.uint8)
    return data[begin:end].view(dtype).view(entry["shape"])


def check_fit(name: str, found: Sequence[int], shape: Sequence[int]) -> None:
    """Raise WrongShape unless tensor `name`, whose shape is `found`, has `shape`."""
    if tuple(found) != tuple(shape):
        raise WrongShape(f"tensor {name!r} has shape {list(found)}, the configuration asks for {list(shape)}")
