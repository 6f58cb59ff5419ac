"""One update of the weights as the driver sees it: pack, transfer, swap, all under a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from rl.actors import Process
from rl.collective import CollectiveOutbox
from rl.replicas import Replica, Replicas, at_once
from rl.restarts import ProcessDiedError
from rl.transports import Medium, ObjectStoreOutbox, Outbox, Rendezvous, SharedMemoryOutbox, Source
from rl.weights import TransferError, TransferTimeoutError

T = TypeVar("T")
_ATTEMPTS = 3


def outbox(medium: Medium, source: Source) -> Outbox:
    """Returns the learner's end of a medium."""
    kinds: dict[Medium, Any] = {
        "shared_memory": SharedMemoryOutbox,
        "object_store": ObjectStoreOutbox,
        "collective": CollectiveOutbox,
    }
    return kinds[medium](source)


class Publisher:
    """Publishes the learner's weights to every replica of some pools; a call returns metrics of the update.

    A replica that does not take the weights in time is replaced, and its successor starts with them.
    """

    def __init__(
        self, learner: Process, pools: Sequence[Replicas], medium: Medium, deadline_s: float
    ) -> None:
        self._learner, self._pools = learner, pools
        self._medium, self._deadline_s = medium, deadline_s
        self._members: list[int] = []

    async def __call__(self) -> dict[str, float]:
        """Publishes the present weights.

        Raises:
            TransferError: The transfer failed; TransferTimeoutError when the learner took too long.
            ProcessDiedError: The learner is gone.
        """
        started = time.monotonic()
        version, size = await self._within(self._learner.call("outbox.offer"), "packing them")
        for pool in self._pools:
            pool.published(version)
        packed = time.monotonic()
        reports = await (self._broadcast() if self._medium == "collective" else self._hand_out())
        ended = time.monotonic()
        return {
            "weight_sync_s": ended - started,
            "weights.pack_s": packed - started,
            "weights.transfer_s": max((r["transfer_s"] for r in reports), default=0.0),
            "weights.pause_s": max((r["pause_s"] for r in reports), default=0.0),
            "weights.bytes": float(size * len(reports)),
            "weights.gb_per_s": size * len(reports) / max(ended - packed, 1e-9) / 1e9,
        }

    async def _hand_out(self) -> list[dict[str, float]]:
        """Lets every replica read the parcel."""
        parcel = await self._learner.refer("outbox.parcel")
        found = await self._each(lambda replica: self._receive(replica, parcel))
        return [report for report in found if report is not None]

    async def _broadcast(self) -> list[dict[str, float]]:
        """Sends to all at once; when a member fails, the group is formed anew."""
        failures: list[str] = []
        while len(failures) < _ATTEMPTS:
            try:
                await self._meet()
                sending = asyncio.ensure_future(self._learner.call("outbox.deliver", self._deadline_s))
                reports = await self._hand_out()
                await sending
                return reports
            except TransferError as error:
                self._members = []
                failures.append(str(error))
        raise TransferError(f"the weights could not be broadcast in {_ATTEMPTS} attempts: {failures[-1]}")

    async def _meet(self) -> None:
        """Forms the group anew when a member was replaced since."""
        everyone = [replica for pool in self._pools for replica in pool.replicas]
        members = [replica.generation for replica in everyone]
        if members == self._members:
            return
        address = await self._within(self._learner.call("outbox.meet", self._deadline_s), "meeting")
        world = len(members) + 1
        places = [Rendezvous(address, rank, world, self._deadline_s) for rank in range(world)]
        joining = asyncio.ensure_future(self._learner.call("outbox.join", places[0]))
        await self._each(
            lambda replica: replica.process.call("inbox.join", places[everyone.index(replica) + 1])
        )
        await joining
        self._members = members

    async def _receive(self, replica: Replica, parcel: Any) -> dict[str, float]:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await replica.process.call("inbox.receive", parcel)
        except TimeoutError:
            raise ProcessDiedError(
                replica.process.role, f"it did not take the weights within {self._deadline_s:g} s"
            ) from None

    async def _each(self, ask: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        parts = await at_once(pool.each(ask) for pool in self._pools)
        return [answer for part in parts for answer in part]

    async def catch_up(self, replica: Replica) -> None:
        """Gives a successor the newest published weights, if any were."""
        if self._pools[0].version_published:
            await self._receive(replica, await self._learner.refer("outbox.catch_up"))

    async def _within(self, work: Awaitable[T], doing: str) -> T:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await work
        except TimeoutError:
            raise TransferTimeoutError(
                f"the learner did not end {doing} (the weights to publish) within {self._deadline_s:g} s: "
                "see its log, or raise launcher.weights_deadline_s"
            ) from None
