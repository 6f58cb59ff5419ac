import dataclasses

import numpy as np
import pytest
import torch

from rl.weights import WeightsError, WeightSnapshot

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.arange(7),
    "c": torch.randn(2, 3, dtype=torch.bfloat16),
    "d": torch.zeros(0),
    "e": torch.randn(4, 4).t(),
    "f": torch.tensor(2.5),
}


def test_tensors_arrive_bit_equal() -> None:
    received = WeightSnapshot.pack(TENSORS, version=4).tensors()
    assert received.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_a_snapshot_in_read_only_memory_is_readable() -> None:
    snapshot = WeightSnapshot.pack(TENSORS, version=4)
    snapshot.buffer.flags.writeable = False
    assert torch.equal(snapshot.tensors()["a"], TENSORS["a"])


def test_a_damaged_snapshot_is_refused() -> None:
    snapshot = WeightSnapshot.pack(TENSORS, version=4)
    damaged = np.array(snapshot.buffer)
    damaged[1] ^= 255
    with pytest.raises(WeightsError, match="version 4 arrived damaged"):
        dataclasses.replace(snapshot, buffer=damaged).tensors()
