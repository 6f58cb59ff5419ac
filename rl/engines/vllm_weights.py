"""Weights on their way to vLLM's workers: what tells a worker where they are, and the engine's inbox.

A parcel in shared memory is opened by the workers themselves, a broadcast is received by them; only bytes of
an object store, which lie in this process, are first put where the workers can map them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rl.collective import BroadcastParcel, Group
from rl.device_weights import DeviceSnapshot
from rl.transports import Inbox, Parcel, Rendezvous, SharedMemoryOutbox, SharedParcel, Snapshot, Target
from rl.weights import TensorEntry, TransferError, WeightSnapshot


@dataclass(frozen=True, slots=True)
class Notice:
    """Where a worker finds a version of the weights; `path` is of shared memory."""

    kind: Literal["shared", "broadcast"]
    version: int
    entries: tuple[TensorEntry, ...]
    checksum: int
    size: int
    path: str
    deadline_s: float

    def plain(self) -> dict[str, Any]:
        """As data that vLLM's calls carry."""
        entries = [[e.name, e.dtype, list(e.shape), e.offset] for e in self.entries]
        return {
            "kind": self.kind,
            "version": self.version,
            "entries": entries,
            "checksum": self.checksum,
            "size": self.size,
            "path": self.path,
            "deadline_s": self.deadline_s,
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Notice:
        """What `plain` gave."""
        entries = tuple(TensorEntry(n, d, tuple(shape), offset) for n, d, shape, offset in data["entries"])
        given: dict[str, Any] = {**data, "entries": entries}
        return cls(**given)

    def open(self, group: Group | None, device: torch.device) -> Snapshot:
        """Returns the weights, not yet checked. Raises TransferError when they are not to be had."""
        if self.kind == "shared":
            return SharedParcel(self.version, self.entries, self.checksum, self.size, self.path).open()
        if group is None:
            raise TransferError(f"weights of version {self.version} are broadcast before the group has met")
        buffer = torch.zeros(self.size, dtype=torch.uint8, device=device)
        group.broadcast(buffer, self.deadline_s)
        if device.type == "cpu":
            return WeightSnapshot(self.version, self.entries, buffer.numpy(), self.checksum)
        return DeviceSnapshot(self.version, self.entries, buffer, self.checksum)


class Shelf:
    """Shared memory of this process, for weights that reach it otherwise."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._version = 0
        self._outbox = SharedMemoryOutbox(lambda: (self._tensors, self._version))

    def put(self, tensors: Mapping[str, object], version: int) -> SharedParcel:
        """Copies tensors or arrays; the parcel is good until the next but one."""
        self._tensors = {name: torch.as_tensor(value) for name, value in tensors.items()}
        self._version = version
        self._outbox.offer()
        self._tensors = {}
        return self._outbox.parcel()


def notice_of(parcel: Parcel, shelf: Shelf, deadline_s: float) -> Notice:
    """Returns what a worker is told of a parcel; blocks while bytes are copied."""
    if isinstance(parcel, BroadcastParcel):
        return Notice(
            "broadcast", parcel.version, parcel.entries, parcel.checksum, parcel.size, "", deadline_s
        )
    if not isinstance(parcel, SharedParcel):
        snapshot = parcel.open()
        parcel = shelf.put(snapshot.tensors(), snapshot.version)
    return Notice(
        "shared", parcel.version, parcel.entries, parcel.crc32, parcel.size, parcel.path, deadline_s
    )


class Receiver(Target, Protocol):
    """An engine whose workers take weights."""

    async def receive(self, parcel: Parcel) -> None:
        """Fetches, checks and swaps."""
        ...

    async def join(self, place: Rendezvous) -> None:
        """Lets the workers meet the sender."""
        ...


class VllmInbox(Inbox):
    """The engine's end: what comes is the workers' to open."""

    def __init__(self, engine: Receiver) -> None:
        super().__init__(engine)
        self._engine = engine

    async def join(self, place: Rendezvous) -> None:
        """Meets the sender and the others. Raises TransferError when they do not come."""
        await self._engine.join(place)

    async def receive(self, parcel: Parcel) -> dict[str, float]:
        """Loads a parcel; returns seconds until it was in the model, and of the engine's pause.

        Raises:
            WeightsError: It cannot be had, or is damaged; the old weights stay.
        """
        async with self._one:
            started = time.monotonic()
            await self._engine.receive(parcel)
            stats = self._engine.stats()
            pause = stats["pause_seconds"]
            return {
                "transfer_s": time.monotonic() - started - pause,
                "pause_s": pause,
                "bytes": stats["weights_bytes"],
            }
