"""A folder of safetensors shards, read one tensor at a time and written shard by shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


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
    """Tensors of several safetensors files by name; nothing is read before it is asked for."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {}
        self._where: dict[str, Path] = {}
        for file in files:
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DamagedFile(f"{file} cannot be read ({error}): copy it anew") from error
            self._files[file] = opened
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                self._where[name] = file

    @staticmethod
    def of_folder(folder: Path) -> ShardReader:
        """All shards of `folder`. Raises MissingTensor when the index names a shard that is not there."""
        index = folder / INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            absent = [name for name in names if not (folder / name).exists()]
            if absent:
                raise MissingTensor(f"{folder} lacks {len(absent)} shards, first {absent[0]}: copy them too")
            return ShardReader(folder / name for name in names)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise MissingTensor(f"{folder} holds no *.safetensors file: is it a checkpoint folder?")
        return ShardReader(files)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def read(self, name: str) -> Tensor:
        """One tensor. Raises MissingTensor."""
        if name not in self._where:
            raise MissingTensor(
                f"the checkpoint has no tensor {name!r}: its configuration does not belong to it"
            )
        return self._files[self._where[name]].get_tensor(name)

    def map(self, name: str) -> Tensor:
        """One tensor as a view of its file: read from it as it is used, and never copied as a whole.

        Raises:
            MissingTensor: there is no such tensor.
            DamagedFile: it does not lie in the file as its type needs.
        """
        if name not in self._where:
            raise MissingTensor(
                f"the checkpoint has no tensor {name!r}: its configuration does not belong to it"
            )
        return _mapped(self._where[name], name)


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


class ShardWriter:
    """Collects tensors and writes a shard whenever `shard_bytes` are reached; `finish` writes the index."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._bytes += size
        self._total += size

    def _flush(self) -> None:
        path = self._folder / f"shard-{len(self._written):05d}.tmp"
        save_file(self._pending, path)
        self._written.append((path, list(self._pending)))
        self._pending, self._bytes = {}, 0

    def finish(self) -> None:
        """Write what is left, give the shards their names, and write the index last."""
        self._flush()
        count = len(self._written)
        weight_map = {}
        for number, (path, names) in enumerate(self._written, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            os.replace(path, self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1))


def check_fit(name: str, tensor: Tensor, shape: torch.Size) -> None:
    """Raise WrongShape unless `tensor` has `shape`."""
    if tensor.shape != shape:
        raise WrongShape(
            f"tensor {name!r} has shape {list(tensor.shape)}, the configuration asks for {list(shape)}"
        )
