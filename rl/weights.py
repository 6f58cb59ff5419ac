"""Publishing weights: one contiguous, versioned, checksummed snapshot, read in place by every engine.

The trainer packs its tensors into one byte buffer; the buffer travels once (shared memory on one host, the
object store between hosts) and each engine copies from views into its own parameters, between two tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

_ALIGN = 64


class WeightsError(RuntimeError):
    """A snapshot that arrived damaged or does not fit the policy; the engine keeps its old weights."""


class TransferError(WeightsError):
    """Weights that cannot be sent or received: what happened and what to change; the old weights stay."""


class TransferTimeoutError(TransferError):
    """A transfer of weights that took longer than its deadline; the old weights stay where it is not done."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the buffer: dtype name of torch, shape, and byte offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """All tensors of one policy version: `buffer` is uint8 [bytes], `crc32` its checksum."""

    version: int
    entries: tuple[TensorEntry, ...]
    buffer: np.ndarray
    crc32: int

    @classmethod
    def pack(
        cls, tensors: Mapping[str, torch.Tensor], version: int, out: Callable[[int], np.ndarray] | None = None
    ) -> WeightSnapshot:
        """Copies `tensors` (any device) into one host buffer: `out` of its size in bytes, else a new one."""
        entries, size = layout(tensors)
        buffer = np.zeros(size, dtype=np.uint8) if out is None else out(size)
        for entry, tensor in zip(entries, tensors.values(), strict=True):
            raw = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
            buffer[entry.offset : entry.offset + raw.size] = raw
        return cls(version, entries, buffer, zlib.crc32(buffer.data))

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.size

    def verify(self) -> None:
        """Raises WeightsError when the buffer does not match its checksum."""
        if zlib.crc32(self.buffer.data) != self.crc32:
            raise WeightsError(
                f"weights of version {self.version} arrived damaged (checksum differs): publish them again"
            )

    def tensors(self, *, verify: bool = True) -> dict[str, torch.Tensor]:
        """Returns views into the buffer by name; copy before the buffer is released.

        Raises:
            WeightsError: The buffer does not match its checksum.
        """
        if verify:
            self.verify()
        # A received buffer may be read-only shared memory; the views are only ever copied from.
        data = self.buffer if self.buffer.flags.writeable else self.buffer.copy()
        return {entry.name: view(torch.from_numpy(data), entry) for entry in self.entries}


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorEntry, ...], int]:
    """Where tensors lie in one buffer, one after the other, aligned; and the buffer's bytes."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset))
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return tuple(entries), offset


def view(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """A tensor in a buffer uint8 [bytes]."""
    dtype = getattr(torch, entry.dtype)
    count = int(np.prod(entry.shape, dtype=np.int64))
    return data[entry.offset : entry.offset + count * dtype.itemsize].view(dtype).view(entry.shape)
