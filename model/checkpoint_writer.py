"""Writes a folder of safetensors shards while holding no more than one tensor."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from model.checkpoint_files import INDEX


class ShardWriter:
    """Writes tensors as they come, a shard whenever `shard_bytes` are reached; `finish` writes the index.

    A shard's header stands before its data and its tensors are aligned by the size of their elements, so the
    data of each size waits in a file of its own until the shard is complete. Nothing is held in memory.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._waiting: dict[int, BinaryIO] = {}
        self._entries: list[_Entry] = []
        self._bytes = 0
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing half written behind."""
        for path in [*(Path(file.name) for file in self._close()), *(path for path, _ in self._written)]:
            path.unlink(missing_ok=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor."""
        self.stream(name, tensor.dtype, tensor.shape, [tensor])

    def stream(self, name: str, dtype: torch.dtype, shape: torch.Size, parts: Iterable[Tensor]) -> None:
        """Append one tensor of which `parts` are the rows, made as they are asked for."""
        size = shape.numel() * dtype.itemsize
        if self._entries and self._bytes + size > self._limit:
            self._flush()
        if dtype.itemsize not in self._waiting:
            path = self._folder / f"waiting-{dtype.itemsize}.tmp"
            self._waiting[dtype.itemsize] = path.open("wb")
        file = self._waiting[dtype.itemsize]
        begin = file.tell()
        for part in parts:
            assert part.dtype is dtype
            flat = part.detach().contiguous().reshape(-1).cpu()
            file.write(flat.view(torch.uint8).numpy().data)
        assert file.tell() == begin + size, "the parts make up the tensor"
        self._entries.append(_Entry(name, dtype, list(shape), begin, size))
        self._bytes += size
        self._total += size

    def _close(self) -> list[BinaryIO]:
        files = [file for _, file in sorted(self._waiting.items(), reverse=True)]
        for file in files:
            file.close()
        self._waiting = {}
        return files

    def _flush(self) -> None:
        path = self._folder / f"shard-{len(self._written):05d}.tmp"
        starts, start = {}, 0
        for size, file in sorted(self._waiting.items(), reverse=True):
            starts[size] = start
            start += file.tell()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for entry in sorted(self._entries, key=lambda entry: (-entry.dtype.itemsize, entry.begin)):
            header[entry.name] = entry.header(starts[entry.dtype.itemsize])
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        files = self._close()
        with path.open("wb") as shard:
            shard.write(len(text).to_bytes(8, "little") + text)
            for file in files:
                with open(file.name, "rb") as data:
                    shutil.copyfileobj(data, shard, 1 << 20)
                os.unlink(file.name)
        self._written.append((path, [entry.name for entry in self._entries]))
        self._entries, self._bytes = [], 0

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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor that was written, at `begin` among those of its element size."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int
    size: int

    def header(self, start: int) -> dict[str, Any]:
        """Its place in the header, where data of its element size start at `start`."""
        begin = start + self.begin
        return {
            "dtype": _STORED_AS[self.dtype],
            "shape": self.shape,
            "data_offsets": [begin, begin + self.size],
        }


_STORED_AS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
}
