from dataclasses import replace

import pytest
import torch

from model.config import PolicyConfig, VisionConfig
from model.policy import Policy


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    """Random tensors of a test do not depend on which tests its process ran before."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def nano() -> Policy:
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(3)
    return policy


@pytest.fixture
def three_sources() -> Policy:
    """Another schedule than the presets': ratios 3, 2 and 1, odd widths, candidates that restrict twice."""
    config = replace(
        PolicyConfig.preset("nano"),
        num_hidden_layers=9,
        compress_ratios=(3, 0, 3, 2, 2, 1, 1, 1, 0),
        kv_source_layer_ids=(0, 3, 5),
        index_source_layer_ids=(0, 2, 3, 5, 6, 7),
        candidate_source_layer_id=5,
        candidate_topk_blocks=3,
        candidate_block_size=3,
        index_topk=5,
        sliding_window=7,
        num_attention_heads=6,
        head_dim=64,
        o_groups=3,
        index_n_heads=12,
        hc_mult=3,
        hc_sinkhorn_iters=2,
        n_routed_experts=5,
        num_experts_per_tok=3,
        n_shared_experts=2,
        engram_layer_ids=(0, 4),
        engram_max_ngram_size=3,
        engram_num_embeddings=(61 + 67 + 71 + 73, 79 + 83 + 89 + 97),
    )
    policy = Policy(config)
    policy.reset_parameters(5)
    return policy


@pytest.fixture(scope="session")
def small_vision() -> VisionConfig:
    """An image tower of one layer, for images of a few patches."""
    return VisionConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=32,
        patch_size=4,
        rope_theta=10000.0,
        downsample_ratio=3,
        max_image_tokens=64,
        min_pixels=16,
        max_wh_ratio=None,
    )
