"""A version of the weights in the memory of an accelerator, for transfers that never touch the host.

The learner's tensors are copied into one flat buffer on their device, so that training may go on; it travels
whole to the engines' devices, and is checked there. The checksum is a sum of the buffer's 64-bit words, each
times an odd number that grows with its place, modulo 2^64: any flipped bit shows, and two exchanged words,
unless they differ in their highest bits alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.weights import TensorEntry, WeightsError, WeightSnapshot, layout, view

_BLOCK = 16 << 20
"""Words that are summed at a time, which bounds the memory that a checksum takes."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSnapshot:
    """All tensors of one policy version: `buffer` is uint8 [bytes] on a device, `checksum` of all of it."""

    version: int
    entries: tuple[TensorEntry, ...]
    buffer: Tensor
    checksum: int

    @classmethod
    def pack(cls, tensors: Mapping[str, Tensor], version: int) -> DeviceSnapshot:
        """Copies `tensors`, all of one device, into one buffer there."""
        entries, size = layout(tensors)
        device = next(iter(tensors.values())).device
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        for entry, tensor in zip(entries, tensors.values(), strict=True):
            view(buffer, entry).copy_(tensor.detach())
        return cls(version, entries, buffer, checksum(buffer))

    @property
    def size(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel()

    def verify(self) -> None:
        """Raises WeightsError when the buffer does not match its checksum."""
        if checksum(self.buffer) != self.checksum:
            raise WeightsError(
                f"weights of version {self.version} arrived damaged (checksum differs): publish them again"
            )

    def tensors(self, *, verify: bool = True) -> dict[str, Tensor]:
        """Returns views into the buffer by name. Raises WeightsError when it is damaged."""
        if verify:
            self.verify()
        return {entry.name: view(self.buffer, entry) for entry in self.entries}

    def on_host(self) -> WeightSnapshot:
        """The same weights as a snapshot that any process can read."""
        return WeightSnapshot.pack(self.tensors(verify=False), self.version)


def checksum(buffer: Tensor) -> int:
    """The checksum of uint8 [bytes], a multiple of 8 of them, computed where they are."""
    words, total = buffer.view(torch.int64), 0
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK]
        odd = torch.arange(start, start + block.numel(), device=buffer.device).mul_(2).add_(1)
        total += int(odd.mul_(block).sum())
    return total % (1 << 64)
