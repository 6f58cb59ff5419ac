"""The decoder's keys come from the encoder's output, and it may leave out tokens nobody asks it about."""

import random
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from model.batch import Trace
from model.config import PolicyConfig
from model.policy import PackedTokens, Policy

NANO = PolicyConfig.preset("nano")
TWO_DECODER_SOURCES = replace(
    NANO,
    num_hidden_layers=8,
    compress_ratios=(0, 2, 2, 2, 1, 1, 2, 2),
    kv_source_layer_ids=(1, 4, 6),
    index_source_layer_ids=(1, 4, 5, 6, 7),
    candidate_source_layer_id=4,
    engram_layer_ids=(1, 5),
    sliding_window=8,
)


def made(config, seed=4):
    policy = Policy(config)
    policy.reset_parameters(seed)
    return policy


@pytest.fixture(params=["nano", "two_decoder_sources"])
def policy(request):
    return made(NANO if request.param == "nano" else TWO_DECODER_SOURCES)


def token_ids(length, seed=0):
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed))


def feed(policy, cache, slot, ids, decode_from=None, trace=None):
    start = None if decode_from is None else torch.tensor([decode_from])
    with torch.inference_mode():
        return policy.extend(
            cache, torch.tensor([slot]), ids[None], torch.tensor([len(ids)]), decode_from=start, trace=trace
        )[0]


def key_state(cache, slot):
    """All compressed keys of a slot."""
    slots, length = torch.tensor([slot]), cache.length(slot)
    ratios = {layer: 1 if layer not in cache.pending else cache.pending_ratio(layer) for layer in cache.main}
    return {
        (name, layer): store[layer].gather(slots, length // ratios[layer]).dense()
        for name, store in (("main", cache.main), ("index", cache.index_keys))
        for layer in store
    }


def test_where_the_decoder_starts():
    assert PolicyConfig.preset("official").decoder_start == 20
    assert NANO.decoder_start == 3
    assert TWO_DECODER_SOURCES.decoder_start == 4
    only_lower = replace(
        NANO, compress_ratios=(0, 2, 2, 2, 2, 2), kv_source_layer_ids=(1,), index_source_layer_ids=(1,),
        candidate_source_layer_id=-1,
    )
    assert only_lower.decoder_start is None
    policy = made(only_lower)
    cache = policy.new_cache(1, 32)
    slot = cache.allocate()
    with pytest.raises(ValueError, match="no decoder of its own"):
        feed(policy, cache, slot, token_ids(12), decode_from=4)
    feed(policy, cache, slot, token_ids(12))


def test_every_decoder_source_projects_the_encoders_output():
    """C_l = H W_l^KV and Z_l = H W_l^Z, for one source with m = 1 and one with m = 2."""
    policy, trace = made(TWO_DECODER_SOURCES), Trace()
    with torch.inference_mode():
        policy(PackedTokens(token_ids(40), torch.tensor([0, 40])), trace=trace)
    boundary = trace.values["boundary"]
    for source in (4, 6):
        compressor = policy.blocks[source].attn.compressor
        values = F.linear(boundary, compressor.wkv.weight)
        if source == 6:
            gates = F.linear(boundary, compressor.wgate.weight).unflatten(0, (20, 2)).softmax(1)
            values = (values.unflatten(0, (20, 2)) * gates).sum(1)
        latent = F.rms_norm(values, values.shape[-1:], compressor.norm.weight, 1e-20)
        assert (trace.values[f"layers.{source}.latent"][0] - latent).abs().max() < 1e-5


@pytest.mark.parametrize("dense_limit", [1024, 0])
@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_skipping_decoder_tokens_writes_the_same_compressed_keys(policy, storage, dense_limit):
    policy.fake_quant, policy.dense_limit = storage == "packed", dense_limit
    ids = token_ids(60)
    cache = policy.new_cache(2, 80, storage=storage)
    whole, skipping = cache.allocate(), cache.allocate()
    feed(policy, cache, whole, ids)
    feed(policy, cache, skipping, ids, decode_from=60 - 5)
    assert (cache.decoded(skipping), cache.floors(skipping)) == (60, (0, 55))
    for name, keys in key_state(cache, whole).items():
        assert torch.allclose(keys, key_state(cache, skipping)[name], atol=1e-5), name
