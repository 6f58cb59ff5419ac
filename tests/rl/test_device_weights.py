"""Snapshots in an accelerator's memory: the same tensors come out, and no damage passes the checksum."""

from dataclasses import replace

import pytest
import torch

from rl.device_weights import DeviceSnapshot, checksum
from rl.weights import WeightsError

TENSORS = {"a": torch.randn(300, 7), "b": torch.arange(5), "c": torch.randn(3).bfloat16()}


def test_what_was_packed_comes_out_and_is_no_view_of_the_source() -> None:
    source = {name: tensor.clone() for name, tensor in TENSORS.items()}
    snapshot = DeviceSnapshot.pack(source, 4)
    for tensor in source.values():
        tensor.zero_()
    found = snapshot.tensors()
    assert snapshot.version == 4 and snapshot.size == snapshot.buffer.numel()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype for name, t in TENSORS.items())
    host = snapshot.on_host().tensors()
    assert all(torch.equal(host[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("bit", [0, 7, 63, 1000, 8 * 4000 + 5])
def test_one_flipped_bit_is_found(bit: int) -> None:
    snapshot = DeviceSnapshot.pack(TENSORS, 1)
    damaged = snapshot.buffer.clone()
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WeightsError, match="version 1 arrived damaged"):
        replace(snapshot, buffer=damaged).verify()


def test_two_exchanged_words_are_found_also_across_the_blocks_of_the_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (50,))
    whole = checksum(words.view(torch.uint8))
    monkeypatch.setattr("rl.device_weights._BLOCK", 8)
    assert checksum(words.view(torch.uint8)) == whole
    words[[3, 40]] = words[[40, 3]]
    assert checksum(words.view(torch.uint8)) != whole
