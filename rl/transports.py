"""Ways for weights from the learner's process to the engines': an interface and its media.

A transfer has two ends. The learner's `Outbox` packs one version into a parcel, a small description of where
the bytes are (or the bytes themselves); an engine's `Inbox` opens it, checks it, and swaps the weights
between two tokens. The engine samples on while bytes travel: only the swap is a pause.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from rl.weights import TensorEntry, TransferError, WeightSnapshot

Medium = Literal["shared_memory", "object_store", "collective"]
Source = Callable[[], tuple[Mapping[str, Tensor], int]]
"""Returns the weights by name, and their version."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the members of a collective meet: `rank` 0 of `world` sends. `deadline_s` bounds every wait."""

    address: str
    rank: int
    world: int
    deadline_s: float


class Snapshot(Protocol):
    """One version of the weights, here."""

    @property
    def version(self) -> int:
        """The version of the weights."""
        ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def verify(self) -> None:
        """Raises WeightsError when it arrived damaged."""
        ...

    def tensors(self, *, verify: bool = True) -> Mapping[str, Tensor]:
        """Returns the weights by name, to be copied before this object is dropped."""
        ...


class Parcel(Protocol):
    """One version of the weights on its way."""

    @property
    def version(self) -> int:
        """The version of the weights."""
        ...

    def open(self) -> WeightSnapshot:
        """Returns the weights, not yet checked. Raises TransferError when they are not to be had."""
        ...


class Outbox(Protocol):
    """The learner's end."""

    def offer(self) -> tuple[int, int]:
        """Packs the present weights into the next parcel; returns version and bytes.

        The parcel before stays good.
        """
        ...

    def parcel(self) -> Parcel:
        """Returns the newest parcel."""
        ...

    def catch_up(self) -> Parcel:
        """Returns the newest parcel in a form that one engine can open by itself, later than the others."""
        ...

    async def deliver(self, deadline_s: float) -> None:
        """Does the learner's part in the transfer; with media that receivers read themselves, nothing."""
        ...


class Target(Protocol):
    """What takes weights: an engine."""

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        """Swaps the weights between two tokens."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters; `pause_seconds` is how long the last swap held the engine up."""
        ...


class Inbox:
    """An engine's end: opens parcels of media that are read, one at a time."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._one = asyncio.Lock()

    async def receive(self, parcel: Parcel) -> dict[str, float]:
        """Loads a parcel; returns seconds until it was here and checked, and of the engine's pause.

        Raises:
            WeightsError: It cannot be had, or is damaged; the old weights stay.
        """
        async with self._one:
            started = time.monotonic()
            snapshot = await asyncio.to_thread(self._checked, parcel)
            here = time.monotonic()
            await self._target.load_weights(snapshot.tensors(verify=False), snapshot.version)
            pause = self._target.stats()["pause_seconds"]
            return {"transfer_s": here - started, "pause_s": pause, "bytes": float(snapshot.size)}

    def _checked(self, parcel: Parcel) -> Snapshot:
        snapshot = self._open(parcel)
        snapshot.verify()
        return snapshot

    def _open(self, parcel: Parcel) -> Snapshot:
        return parcel.open()


@dataclass(frozen=True, slots=True)
class StoredParcel:
    """The bytes themselves: a parcel for an object store, which moves it once to each host."""

    snapshot: WeightSnapshot

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.snapshot.version

    def open(self) -> WeightSnapshot:
        """Returns the weights."""
        return self.snapshot


class ObjectStoreOutbox:
    """Sends through Ray's object store: between any two hosts of a cluster."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._parcel: StoredParcel | None = None

    def offer(self) -> tuple[int, int]:
        """Packs the present weights."""
        self._parcel = StoredParcel(WeightSnapshot.pack(*self._source()))
        return self._parcel.version, self._parcel.snapshot.buffer.size

    def parcel(self) -> StoredParcel:
        """Returns the newest parcel."""
        assert self._parcel is not None, "offer comes before parcel"
        return self._parcel

    def catch_up(self) -> StoredParcel:
        """Returns the newest parcel."""
        return self.parcel()

    async def deliver(self, deadline_s: float) -> None:
        """Nothing is left to do: the store moves the bytes."""


@dataclass(frozen=True, slots=True)
class SharedParcel:
    """Bytes in memory of the learner's process, which others of this host map: they are copied once."""

    version: int
    entries: tuple[TensorEntry, ...]
    crc32: int
    size: int
    path: str

    def open(self) -> WeightSnapshot:
        """Maps the bytes; writing to the map would not reach the sender."""
        try:
            with open(self.path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"the weights of version {self.version} are not to be had in shared memory ({error}): the "
                "learner has ended, or runs on another host or as another user; between hosts set "
                "launcher.weights=object_store"
            ) from error
        return WeightSnapshot(self.version, self.entries, np.frombuffer(mapped, np.uint8), self.crc32)


class SharedMemoryOutbox:
    """Sends within one host: the bytes lie in anonymous memory that ends with this process, even if killed.

    Two buffers take turns, so that the parcel before the newest one is still whole.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._files: list[_MemoryFile] = []
        self._parcel: SharedParcel | None = None

    def offer(self) -> tuple[int, int]:
        """Packs the present weights. Raises TransferError when there is no memory for them."""
        tensors, version = self._source()
        snapshot = WeightSnapshot.pack(tensors, version, self._buffer)
        path = f"/proc/{os.getpid()}/fd/{self._files[-1].descriptor}"
        self._parcel = SharedParcel(version, snapshot.entries, snapshot.crc32, snapshot.buffer.size, path)
        return version, snapshot.buffer.size

    def parcel(self) -> SharedParcel:
        """Returns the newest parcel."""
        assert self._parcel is not None, "offer comes before parcel"
        return self._parcel

    def catch_up(self) -> SharedParcel:
        """Returns the newest parcel."""
        return self.parcel()

    async def deliver(self, deadline_s: float) -> None:
        """Nothing is left to do: the receivers read."""

    def _buffer(self, size: int) -> np.ndarray:
        spare = self._files.pop(0) if len(self._files) == 2 else None
        if spare is None or spare.size != size:
            spare = _MemoryFile(size)
        self._files.append(spare)
        return spare.array


class _MemoryFile:
    """So many bytes of memory with a file descriptor; both go when the object goes."""

    def __init__(self, size: int) -> None:
        self.size, self.descriptor = size, -1
        import psutil  # of the learner alone: receivers run without it

        if size > (free := psutil.virtual_memory().available):
            raise _no_memory(size, f"{free / 1e9:.2f} GB are free")
        self.descriptor = os.memfd_create("tempering-weights")
        try:
            os.posix_fallocate(self.descriptor, 0, max(size, 1))
            self.array = np.frombuffer(mmap.mmap(self.descriptor, max(size, 1)), np.uint8)[:size]
        except (OSError, ValueError) as error:
            os.close(self.descriptor)
            self.descriptor = -1
            raise _no_memory(size, str(error)) from error

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


def _no_memory(size: int, why: str) -> TransferError:
    return TransferError(
        f"there is no memory for {size / 1e9:.2f} GB of weights to publish ({why}): free memory on the "
        "learner's host"
    )
