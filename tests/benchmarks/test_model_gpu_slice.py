"""The slice of the released policy: its shape, and the bytes that it is measured against."""

import pytest
import torch

from benchmarks.model_gpu_setup import official_widths
from benchmarks.model_gpu_slice import step_bytes, weight_bytes
from model.config import AttentionMode, PolicyConfig
from model.policy import Policy


@pytest.mark.parametrize("layers", [6, 12])
def test_every_kind_of_layer_at_the_released_widths(layers):
    config, official = official_widths(layers), PolicyConfig.preset("official")
    assert {config.mode(layer) for layer in range(layers)} == set(AttentionMode)
    assert any(config.uses_candidates(layer) for layer in range(layers))
    assert {config.ratio(layer) for layer in config.kv_source_layer_ids} == {1, 2}
    sizes = ("size", "dim", "rank", "heads", "groups", "topk", "blocks", "per_tok", "experts")
    for name in PolicyConfig.__dataclass_fields__:
        if name.endswith(sizes) and not name.startswith(("dspark", "engram")):
            assert getattr(config, name) == getattr(official, name), name


def test_bytes_of_weights_and_of_a_step():
    with torch.device("meta"):
        policy = Policy(official_widths())
        policy.pack_experts()
    kinds, expert = weight_bytes(policy), 3 * 5120 * 2304
    assert kinds["routed experts, FP4"] == 12 * 384 * expert * 17 / 32
    assert kinds["shared experts"] == 12 * expert * 2
    assert kinds["embedding and head"] == 2 * 129280 * 5120 * 2
    tensors = [*policy.parameters(), *policy.buffers()]
    assert sum(kinds.values()) == sum(tensor.nbytes for tensor in tensors)

    one = step_bytes(policy, 1, 4096, [6] * 12)
    dense = sum(kinds[k] for k in ("attention and indexers", "shared experts", "the rest"))
    # Beside weights a token reads at most 12 windows and selections, and the index keys of six layers.
    assert 0 < one - dense - 12 * 6 * expert * 17 / 32 < 12 * (128 * 528 + 512 * 288) + 6 * 4096 * 68
    more = step_bytes(policy, 1, 1 << 20, [6] * 12) - one
    scanned = sum((1 << 20) // config for config in (2, 2, 2, 1)) * 68
    assert 0.9 * scanned < more < scanned + 2 * 16384 * 68
