"""The search for what first makes a decoded token differ from training."""

from dataclasses import replace

import pytest
import torch

import model.decode
import model.fused
from model.diagnostics.exactness import CAPTURED, PREFILL, STEP, differences
from model.ops import dispatch
from model.policy import Policy
from model.presets import NANO
from tests.model import wide_definitions

IDS = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def policy(monkeypatch):
    wide_definitions.put(monkeypatch)
    shape = replace(NANO, num_attention_heads=16, head_dim=64, index_head_dim=64, hc_sinkhorn_iters=20)
    policy = Policy(replace(shape, dtype="bfloat16"))
    policy.reset_parameters(3)
    policy.fake_quant = policy.exact = True
    return policy


def found(policy, pieces=(20, 13)):
    with dispatch.fused_everywhere():
        return differences(policy, IDS, pieces)


def test_an_exact_policy_has_no_difference(policy):
    assert found(policy) == []


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        ("sparse_decode", "layers.0.heads"),
        ("decode_scores", "layers.1.chosen_keys"),
        ("hyper_update_of_rows", "layers.0.streams"),
        ("latents", "layers.0.query_latent"),
        ("coefficients", "layers.0.attn_coefficients"),
    ],
)
def test_it_names_the_operation_that_differs(policy, monkeypatch, operation, name):
    right = getattr(model.decode, operation)

    def wrong(*args, **options):
        result = right(*args, **options)
        several = isinstance(result, tuple)
        changed = -(result[0] if several else result)
        return (changed, *result[1:]) if several else changed

    monkeypatch.setattr(model.decode, operation, wrong)
    differing = found(policy)
    assert {d.way for d in differing} == {STEP, CAPTURED}
    assert [d.token for d in differing if d.way == STEP] == list(range(33, 40))
    first = differing[0]
    assert (first.token, first.way, first.name) == (33, STEP, name)
    assert 0 < first.differing <= first.elements and first.largest > 0
    assert f"token 33 by step: {name}, " in str(first)


def test_it_names_a_memory_that_differs(policy, monkeypatch):
    gate = policy.blocks[1].engram.gate
    monkeypatch.setattr(
        policy.blocks[1].engram,
        "gate",
        lambda streams, *rest: gate(streams, *rest) * (1 + (len(streams) == 1)),
    )
    first = found(policy)[0]
    assert (first.token, first.way, first.name) == (33, STEP, "layers.1.engram_out")


def test_it_ends_where_the_cache_would_differ(policy, monkeypatch):
    right = model.fused.table_attention
    monkeypatch.setattr(
        model.fused,
        "table_attention",
        lambda query, *rest, **options: right(query, *rest, **options) * (1 + (len(query) == 1)),
    )
    differing = found(policy)
    assert [(d.token, d.way, d.name) for d in differing] == [(33, PREFILL, "layers.0.heads")]


@pytest.mark.parametrize("pieces", [(), (40,), (30, 30)])
def test_a_document_without_prompt_or_rest_is_refused(policy, pieces):
    with pytest.raises(ValueError, match="some must be left to decode"):
        found(policy, pieces)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 32, 64])
def test_on_a_card(heads):
    """Widths of the official policy; contexts of more keys than are selected; no token may differ."""
    from benchmarks.model_gpu_setup import configuration, policy_on_gpu

    shape = {"hidden_size": 512, "vocab_size": 1024, "engram_compressed_vocab_size": 1024}
    shape |= {"engram_token_map": tuple(range(1024)), "n_routed_experts": 8, "moe_intermediate_size": 128}
    policy = policy_on_gpu(replace(configuration(), num_attention_heads=heads, **shape))
    policy.exact = True
    ids = torch.randint(0, 1024, (1400,), generator=torch.Generator().manual_seed(0)).cuda()
    assert differences(policy, ids, (700, 561, 39)) == []
