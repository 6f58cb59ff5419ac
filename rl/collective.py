"""Weights by a collective: one broadcast from the learner to all engines, by NCCL between GPUs, else by Gloo.

A broadcast has no bound of its own and hangs when a member is gone, so it runs in a thread under a deadline,
in a group that is met anew whenever a member was replaced. Groups are objects: no global process group is
made, which a trainer of several processes keeps for itself.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import PrefixStore, Store

from rl.device_weights import DeviceSnapshot
from rl.transports import Inbox, Parcel, Rendezvous, Snapshot, Source, StoredParcel, Target
from rl.weights import TensorEntry, TransferError, TransferTimeoutError, WeightSnapshot

_CHUNK = 256 << 20


@dataclass(frozen=True, slots=True)
class BroadcastParcel:
    """What a broadcast will bring; its bytes come through the receiver's group."""

    version: int
    entries: tuple[TensorEntry, ...]
    checksum: int
    size: int

    def open(self) -> WeightSnapshot:
        """Refuses: only a member of the group can take part."""
        raise TransferError(
            f"weights of version {self.version} are broadcast, and this engine is in no group: let the "
            "publisher form it first"
        )


class Group:
    """A process group of a sender (rank 0) and its receivers; `device` is where the bytes travel."""

    def __init__(self, place: Rendezvous, device: torch.device, store: Store | None = None) -> None:
        timeout = timedelta(seconds=place.deadline_s)
        self._device = device
        with _as_transfer(f"the group of {place.world} at {place.address} did not meet"):
            store = store or _connect(place.address, timeout)
            prefixed = PrefixStore("weights", store)
            self._group: Any
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = dist.ProcessGroupNCCL(prefixed, place.rank, place.world, options)
            else:
                self._group = dist.ProcessGroupGloo(prefixed, place.rank, place.world, timeout)

    def broadcast(self, buffer: Tensor, deadline_s: float) -> None:
        """Sends `buffer` uint8 [bytes] on the device from rank 0 into everyone's; blocks at most so long."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        begun = time.monotonic()
        with _as_transfer("the broadcast of the weights did not end"):
            for start in range(0, buffer.numel(), _CHUNK):
                left = timedelta(seconds=max(begun + deadline_s - time.monotonic(), 1e-3))
                options.timeout = left
                self._group.broadcast([buffer[start : start + _CHUNK]], options).wait(left)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)


class CollectiveOutbox:
    """The learner's end of a broadcast."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._store: TCPStore | None = None
        self._group: Group | None = None
        self._snapshot: WeightSnapshot | DeviceSnapshot | None = None

    def meet(self, deadline_s: float) -> str:
        """Opens a meeting point and returns its address, host:port; the group before is left."""
        self._group = self._store = None
        host = _address()
        self._store = TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s)
        )
        return f"{host}:{self._store.port}"

    async def join(self, place: Rendezvous) -> None:
        """Meets the receivers. Raises TransferError when they do not come."""
        device = next(iter(self._source()[0].values())).device
        self._group = await asyncio.to_thread(Group, place, device, self._store)

    def offer(self) -> tuple[int, int]:
        """Packs the present weights, on the device where they are."""
        tensors, version = self._source()
        on_host = next(iter(tensors.values())).device.type == "cpu"
        self._snapshot = (WeightSnapshot if on_host else DeviceSnapshot).pack(tensors, version)
        return version, self._snapshot.size

    def parcel(self) -> BroadcastParcel:
        """Returns what the next broadcast will bring."""
        assert self._snapshot is not None, "offer comes before parcel"
        snapshot = self._snapshot
        return BroadcastParcel(snapshot.version, snapshot.entries, _checksum(snapshot), snapshot.size)

    def catch_up(self) -> StoredParcel:
        """Returns the newest weights themselves, for an engine that joins between two broadcasts."""
        assert self._snapshot is not None, "offer comes before catch_up"
        snapshot = self._snapshot
        return StoredParcel(snapshot if isinstance(snapshot, WeightSnapshot) else snapshot.on_host())

    async def deliver(self, deadline_s: float) -> None:
        """Broadcasts. Raises TransferError when a receiver does not take part."""
        assert self._group is not None and self._snapshot is not None, "join and offer come before deliver"
        await asyncio.to_thread(self._group.broadcast, torch.as_tensor(self._snapshot.buffer), deadline_s)


class CollectiveInbox(Inbox):
    """An engine's end of a broadcast; `device` is the engine's."""

    def __init__(self, target: Target, device: torch.device) -> None:
        super().__init__(target)
        self._device = device
        self._group: Group | None = None
        self._deadline_s = 0.0

    async def join(self, place: Rendezvous) -> None:
        """Meets the sender and the others. Raises TransferError when they do not come."""
        self._group, self._deadline_s = None, place.deadline_s
        self._group = await asyncio.to_thread(Group, place, self._device)

    def _open(self, parcel: Parcel) -> Snapshot:
        if self._group is None or not isinstance(parcel, BroadcastParcel):
            return parcel.open()
        buffer = torch.zeros(parcel.size, dtype=torch.uint8, device=self._device)
        self._group.broadcast(buffer, self._deadline_s)
        if self._device.type == "cpu":
            return WeightSnapshot(parcel.version, parcel.entries, buffer.numpy(), parcel.checksum)
        return DeviceSnapshot(parcel.version, parcel.entries, buffer, parcel.checksum)


def _checksum(snapshot: WeightSnapshot | DeviceSnapshot) -> int:
    return snapshot.crc32 if isinstance(snapshot, WeightSnapshot) else snapshot.checksum


def _connect(address: str, timeout: timedelta) -> Store:
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def _address() -> str:
    """The address under which the other hosts reach this one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


@contextmanager
def _as_transfer(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        late: Callable[[str], TransferError] = (
            TransferTimeoutError if "time" in str(error).lower() else TransferError
        )
        raise late(
            f"{what} ({str(error).splitlines()[0][:200]}): a member is gone or cannot be reached; it is "
            "replaced and the weights are published again, or take launcher.weights=object_store"
        ) from error
