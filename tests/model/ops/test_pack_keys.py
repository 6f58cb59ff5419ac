import pytest
import torch

from model.ops.pack_keys import pack_keys
from model.ops.records import unpack
from model.ops.unpack_keys import unpack_keys


def test_pooling_is_a_softmax_per_channel_over_the_groups_rows():
    torch.manual_seed(0)
    values, gates = torch.randn(7, 64), torch.randn(7, 64)
    latent, records = pack_keys("main", values, gates=gates, ratio=2)
    assert latent.shape == (3, 64) and records.shape == (3, 36)
    weight = torch.sigmoid(gates[4] - gates[5])
    torch.testing.assert_close(
        latent[2].float(), weight * values[4] + (1 - weight) * values[5], atol=0.02, rtol=0.01
    )


def test_starts_place_groups_anywhere():
    values, gates = torch.randn(9, 64), torch.randn(9, 64)
    latent, _ = pack_keys("main", values, gates=gates, ratio=2, starts=torch.tensor([5, 0]).int())
    plain, _ = pack_keys("main", values[5:7], gates=gates[5:7], ratio=2)
    assert torch.equal(latent[0], plain[0])


def test_norm_then_rotation_of_the_last_channels():
    torch.manual_seed(0)
    values, norm = torch.randn(2, 64), torch.rand(64)
    angle = torch.tensor([[0.0, 0.0], [torch.pi / 2, torch.pi]])
    latent, records = pack_keys("window", values, norm=norm, rope=(angle.cos(), angle.sin()))
    expected = torch.nn.functional.rms_norm(values.bfloat16().float(), (64,), norm, 1e-6)
    torch.testing.assert_close(latent.float(), expected, atol=0.02, rtol=0.01)
    stored = unpack("window", records)
    torch.testing.assert_close(
        stored[1, 60:62], torch.stack([-expected[1, 61], expected[1, 60]]), atol=0.1, rtol=0.07
    )
    torch.testing.assert_close(stored[1, 62:], -expected[1, 62:], atol=0.1, rtol=0.07)
    torch.testing.assert_close(stored[:, :60], expected[:, :60], atol=0.1, rtol=0.07)


def test_unpacked_keys_are_bf16():
    _, records = pack_keys("main", torch.randn(5, 64))
    keys = unpack_keys(records)
    assert keys.dtype == torch.bfloat16 and torch.equal(keys.float(), unpack("main", records))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="gates"):
        pack_keys("main", torch.zeros(4, 64), ratio=2)
    with pytest.raises(ValueError, match="cosines"):
        pack_keys("main", torch.zeros(4, 64), rope=(torch.zeros(3, 8), torch.zeros(3, 8)))
