"""Weights from the learner's end to the engines': every medium, damage, delay and death."""

import asyncio
import dataclasses
import multiprocessing
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from rl.collective import BroadcastParcel, CollectiveInbox, CollectiveOutbox
from rl.transports import Inbox, ObjectStoreOutbox, Rendezvous, SharedMemoryOutbox, StoredParcel
from rl.weights import TransferError, TransferTimeoutError, WeightsError


class Weights:
    """What the learner holds, and a target that keeps what it was given."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.randn(300, 7), "b": torch.arange(5), "c": torch.randn(3).bfloat16()}
        self.version = 1
        self.loaded: dict[int, dict[str, torch.Tensor]] = {}

    def source(self):
        return self.tensors, self.version

    async def load_weights(self, tensors, version):
        self.loaded[version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def stats(self):
        return {"pause_seconds": 0.25}

    def equal(self, version: int) -> bool:
        return all(torch.equal(self.loaded[version][name], t) for name, t in self.tensors.items())


@pytest.mark.parametrize("kind", [SharedMemoryOutbox, ObjectStoreOutbox])
async def test_weights_arrive_bit_equal_and_the_parcel_before_stays_whole(kind) -> None:
    weights = Weights()
    outbox, inbox = kind(weights.source), Inbox(weights)
    assert outbox.offer()[0] == 1
    first, before = outbox.parcel(), dict(weights.tensors)
    report = await inbox.receive(first)
    assert weights.equal(1) and report["pause_s"] == 0.25 and report["bytes"] >= 300 * 7 * 4
    weights.tensors, weights.version = {n: t + 1 for n, t in before.items()}, 2
    version, size = outbox.offer()
    assert (version, size) == (2, report["bytes"])
    await inbox.receive(outbox.parcel())
    assert weights.equal(2)
    await inbox.receive(first)
    assert torch.equal(weights.loaded[1]["a"], before["a"])
    weights.version = 3
    outbox.offer()
    await inbox.receive(outbox.catch_up())
    assert weights.equal(3)


async def test_another_process_reads_shared_memory_until_the_sender_is_gone() -> None:
    script = (
        "import os, sys, torch, pickle, time\n"
        "from rl.transports import SharedMemoryOutbox\n"
        "box = SharedMemoryOutbox(lambda: ({'a': torch.arange(1000.0)}, 4))\n"
        "box.offer()\n"
        "sys.stdout.buffer.write(pickle.dumps(box.parcel())); sys.stdout.buffer.flush(); os.close(1)\n"
        "time.sleep(600)\n"
    )
    sender = await asyncio.to_thread(
        lambda: subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    )
    try:
        assert sender.stdout is not None
        parcel = pickle.loads(await asyncio.to_thread(sender.stdout.read))
        weights = Weights()
        await Inbox(weights).receive(parcel)
        assert torch.equal(weights.loaded[4]["a"], torch.arange(1000.0))
    finally:
        sender.kill()
        sender.wait()
        if sender.stdout is not None:
            sender.stdout.close()
    with pytest.raises(TransferError, match=r"launcher\.weights=object_store"):
        await Inbox(weights).receive(parcel)


async def test_damaged_weights_are_refused_and_the_old_ones_stay() -> None:
    weights = Weights()
    outbox = ObjectStoreOutbox(weights.source)
    outbox.offer()
    snapshot = outbox.parcel().snapshot
    damaged = np.array(snapshot.buffer)
    damaged[5] ^= 1
    with pytest.raises(WeightsError, match="version 1 arrived damaged"):
        await Inbox(weights).receive(StoredParcel(dataclasses.replace(snapshot, buffer=damaged)))
    assert not weights.loaded


def test_more_weights_than_memory_is_a_typed_error() -> None:
    outbox = SharedMemoryOutbox(lambda: ({}, 0))
    with pytest.raises(TransferError, match=r"no memory for .* GB of weights"):
        outbox._buffer(1 << 60)


def _receive(address: str, rank: int, results) -> None:
    """A receiving process: joins, takes one broadcast, and says what it got."""
    weights = Weights()
    inbox = CollectiveInbox(weights, torch.device("cpu"))

    async def run() -> None:
        await inbox.join(Rendezvous(address, rank, 3, 280.0))
        parcel = results.get()
        await inbox.receive(parcel)
        results.put(weights.loaded[parcel.version]["a"].numpy())

    asyncio.run(run())


@pytest.mark.slow
async def test_a_broadcast_reaches_two_other_processes() -> None:
    weights = Weights()
    outbox = CollectiveOutbox(weights.source)
    address = outbox.meet(280.0)
    context = multiprocessing.get_context("spawn")
    lines = [context.SimpleQueue() for _ in range(2)]
    receivers = [
        context.Process(target=_receive, args=(address, i + 1, line)) for i, line in enumerate(lines)
    ]
    for receiver in receivers:
        receiver.start()
    await outbox.join(Rendezvous(address, 0, 3, 280.0))
    outbox.offer()
    assert isinstance(outbox.parcel(), BroadcastParcel)
    for line in lines:
        line.put(outbox.parcel())
    await outbox.deliver(280.0)
    for receiver in receivers:
        await asyncio.to_thread(receiver.join)
    for line in lines:
        assert np.array_equal(line.get(), weights.tensors["a"].numpy())


async def test_a_member_that_does_not_come_is_an_error_within_the_deadline() -> None:
    outbox = CollectiveOutbox(Weights().source)
    address = outbox.meet(1.0)
    with pytest.raises(TransferTimeoutError, match="did not meet"):
        async with asyncio.timeout(60):
            await outbox.join(Rendezvous(address, 0, 2, 1.0))


async def test_a_member_that_leaves_ends_the_broadcast_with_a_typed_error() -> None:
    weights, target = Weights(), Weights()
    outbox, inbox = CollectiveOutbox(weights.source), CollectiveInbox(target, torch.device("cpu"))
    address = outbox.meet(30.0)
    await asyncio.gather(
        outbox.join(Rendezvous(address, 0, 2, 30.0)), inbox.join(Rendezvous(address, 1, 2, 30.0))
    )
    outbox.offer()
    await asyncio.gather(outbox.deliver(30.0), inbox.receive(outbox.parcel()))
    assert torch.equal(target.loaded[1]["a"], weights.tensors["a"])
    inbox._group = None
    with pytest.raises(TransferError, match="in no group"):
        await inbox.receive(outbox.parcel())
    await inbox.receive(outbox.catch_up())
    weights.version = 2
    outbox.offer()
    with pytest.raises(TransferError, match="broadcast of the weights did not end"):
        for _ in range(3):
            await outbox.deliver(1.0)
