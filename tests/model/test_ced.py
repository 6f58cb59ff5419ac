"""The decoder's keys come from the encoder's output, and it may leave out tokens nobody asks it about."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from model.batch import Trace, floors_from_starts
from model.config import PolicyConfig
from model.policy import PackedTokens, Policy
from model.vision import ImageTokens, TokenType

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
    return {
        (name, layer): store[layer].gather(slots, length // cache.ratios[layer]).dense()
        for name, store in (("main", cache.main), ("index", cache.index_keys))
        for layer in store
    }


def test_where_the_decoder_starts():
    assert PolicyConfig.preset("official").decoder_start == 20
    assert NANO.decoder_start == 3
    assert TWO_DECODER_SOURCES.decoder_start == 4
    only_lower = replace(
        NANO,
        compress_ratios=(0, 2, 2, 2, 2, 2),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
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


@pytest.mark.parametrize("dense_limit", [1024, 0])
def test_the_decoder_sees_windows_from_where_it_starts(policy, dense_limit):
    """Bounded replay is the training forward under the recorded floors, and not the one without."""
    policy.dense_limit = dense_limit
    ids, window = token_ids(70, seed=3), policy.config.sliding_window
    cache = policy.new_cache(1, 80)
    slot = cache.allocate()
    found = [feed(policy, cache, slot, ids[:60], decode_from=60 - window)]
    starts = [cache.floors(slot)]
    found += [feed(policy, cache, slot, ids[at : at + 1]) for at in range(60, 70)]
    floors = floors_from_starts(70, starts)
    documents = torch.tensor([0, 70])
    with torch.inference_mode():
        bounded = policy(PackedTokens(ids, documents, window_floors=floors)).hidden[59:]
        full = policy(PackedTokens(ids, documents)).hidden[59:]
    assert (torch.stack(found) - bounded).abs().max() < 1e-4
    assert (full - bounded).abs().max() > 1e-3


def test_rows_of_a_batch_skip_on_their_own(policy):
    """One row decodes all, one its end, one nothing; chunks of a prompt leave the same behind."""
    cache, lengths = policy.new_cache(6, 80), [40, 40, 40]
    ids = torch.stack([token_ids(40, seed) for seed in range(3)])
    slots = torch.tensor([cache.allocate() for _ in range(3)])
    decode_from = torch.tensor([0, 30, 60])
    with torch.inference_mode():
        together = policy.extend(cache, slots, ids, torch.tensor(lengths), decode_from=decode_from)
    alone = [
        feed(policy, cache, cache.allocate(), row, start)
        for row, start in zip(ids, decode_from.tolist(), strict=True)
    ]
    assert torch.allclose(together, torch.stack(alone), atol=1e-5)
    assert not together[2].any() and together[1].any()
    assert [cache.decoded(slot) for slot in slots.tolist()] == [40, 40, 0]
    assert [cache.floors(slot) for slot in slots.tolist()] == [(0, 0), (0, 30), (0, 0)]


@pytest.mark.parametrize("storage", ["dense", "packed"])
@pytest.mark.parametrize("size", [1, 2, 5, 16, 23])
def test_chunks_of_any_size_leave_the_same_caches(policy, storage, size):
    policy.fake_quant = storage == "packed"
    ids, start = token_ids(50, seed=size), 50 - policy.config.sliding_window
    cache = policy.new_cache(2, 60, storage=storage)
    whole, chunked = cache.allocate(), cache.allocate()
    expected = feed(policy, cache, whole, ids, start)
    for chunk in ids.split(size):
        got = feed(policy, cache, chunked, chunk, start)
    assert cache.progress(whole) == cache.progress(chunked)
    near = 1e-5 if storage == "dense" else 2e-2
    assert torch.allclose(got, expected, atol=near)
    ours, theirs = key_state(cache, chunked), key_state(cache, whole)
    errors = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours])
    assert errors.quantile(0.99) < 1e-5 and errors.max() < (1e-5 if storage == "dense" else 1.0)
    following = torch.tensor([7])
    assert torch.allclose(
        feed(policy, cache, whole, following), feed(policy, cache, chunked, following), atol=near
    )


@pytest.mark.parametrize("storage", ["dense", "packed"])
@pytest.mark.parametrize("config", [NANO, TWO_DECODER_SOURCES], ids=["nano", "two_decoder_sources"])
@pytest.mark.parametrize("back", [1, 3, 8])
def test_tokens_can_be_taken_back(config, storage, back):
    """Also across a page, with a fork that keeps what its origin takes back."""
    policy = made(config)
    policy.fake_quant = storage == "packed"
    cache = policy.new_cache(4, 160, storage=storage)
    ids, undone, rest = token_ids(62, seed=back), token_ids(back, seed=5), token_ids(12, seed=99)
    slot, straight, kept = (cache.allocate() for _ in range(3))
    feed(policy, cache, straight, ids)
    feed(policy, cache, slot, ids)
    feed(policy, cache, kept, ids)
    feed(policy, cache, slot, undone)
    feed(policy, cache, kept, undone)
    fork = cache.fork(slot)
    cache.truncate(slot, 62)
    assert cache.length(slot) == cache.decoded(slot) == 62
    for token in rest.split(1):
        assert torch.equal(feed(policy, cache, slot, token), feed(policy, cache, straight, token))
    assert torch.equal(feed(policy, cache, fork, rest), feed(policy, cache, kept, rest))


def test_what_cannot_be_taken_back_is_refused(nano):
    cache = nano.new_cache(2, 80)
    slot = cache.allocate()
    feed(nano, cache, slot, token_ids(40), decode_from=35)
    for length, least in ((41, 35), (34, 35)):
        with pytest.raises(ValueError, match=f"can be cut to {least} .. 40 tokens, not to {length}"):
            cache.truncate(slot, length)
    feed(nano, cache, slot, token_ids(20))
    cache.truncate(slot, 55)
    with pytest.raises(ValueError, match=r"can be cut to 52 .. 55 tokens, not to 51"):
        cache.truncate(slot, 51)


@pytest.mark.parametrize("floors", [[[0, 0]] * 9, [[0, 0]] * 8 + [[0, 10]], [[-1, 0]] * 10])
def test_floors_that_do_not_fit_are_refused(nano, floors):
    tokens = PackedTokens(token_ids(10), torch.tensor([0, 10]), window_floors=torch.tensor(floors))
    with pytest.raises(ValueError, match="window_floors"):
        nano(tokens)
    with pytest.raises(ValueError, match="positions count from 0"):
        floors_from_starts(10, [(0, -1)])


def test_floors_are_the_latest_start():
    floors = floors_from_starts(6, [(0, 4), (0, 2), (3, 9)])
    assert floors.tolist() == [[0, 0], [0, 0], [0, 2], [3, 2], [3, 4], [3, 4]]


def test_images_and_draft_features_follow_the_decoders_tokens(small_vision):
    config = replace(
        TWO_DECODER_SOURCES,
        vision=small_vision,
        image_token_id=63,
        num_nextn_predict_layers=1,
        compress_ratios=(*TWO_DECODER_SOURCES.compress_ratios, 0),
        dspark_block_size=3,
        dspark_noise_token_id=62,
        dspark_target_layer_ids=(3, 5),
        dspark_markov_rank=8,
        dspark_n_routed_experts=4,
        dspark_num_experts_per_tok=2,
    )
    policy, ids = made(config), token_ids(50)
    for block in policy.blocks:
        torch.nn.init.normal_(block.ffn.gate.bias_vl)
    types = torch.full((50,), -1)
    span = torch.tensor([TokenType.START, *[TokenType.IMAGE] * 8, TokenType.NEWLINE, TokenType.END])
    types[38:49], ids[38:49] = span, 63
    rows = torch.randn(8, config.hidden_size, generator=torch.Generator().manual_seed(0))
    cache, trace, whole = policy.new_cache(1, 64), Trace(), Trace()
    slot = cache.allocate()
    with torch.inference_mode():
        hidden = policy.extend(
            cache,
            torch.tensor([slot]),
            ids[None],
            torch.tensor([50]),
            decode_from=torch.tensor([42]),
            images=ImageTokens(types[None], rows),
            trace=trace,
        )
        floors = floors_from_starts(50, [cache.floors(slot)])
        images = ImageTokens(types, rows)
        tokens = PackedTokens(ids, torch.tensor([0, 50]), images, window_floors=floors)
        expected = policy(tokens, trace=whole).hidden
    assert torch.allclose(hidden[0], expected[-1], atol=1e-4)
    assert trace.values["main_hidden"].shape == (8, 2 * config.hidden_size)
    assert torch.allclose(trace.values["main_hidden"], whole.values["main_hidden"][42:], atol=1e-4)
