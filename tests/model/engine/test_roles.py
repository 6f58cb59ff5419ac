"""Engines of one role each do together what one engine does alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.errors import ImageError, RoleError
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import PackedTokens, Policy
from model.vision import ImageTokens, span_types

SAMPLING = SamplingParams(max_tokens=9, stop_ids=frozenset(), seed=2)
IMAGE = 63
GRID = (6, 9)


@pytest.fixture(scope="module")
def policy(small_vision):
    policy = Policy(replace(PolicyConfig.preset("pico"), vision=small_vision, image_token_id=IMAGE))
    policy.reset_parameters(6)
    for block in policy.blocks:
        torch.nn.init.normal_(block.ffn.gate.bias_vl)
    return policy


def drain(engine):
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished.turn for finished in engine.step().finished}
    return ended


def image_request(rows, session="s", text=5):
    span = span_types(GRID, 3)
    ids = [*range(text), *[IMAGE] * len(span), *range(text)]
    types = torch.tensor([-1] * text + [int(kind) for kind in span] + [-1] * text)
    return Request(session, ids, SAMPLING, images=ImageTokens(types, rows))


def patches(seed):
    return torch.randn(GRID[0] * GRID[1], 3, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_encode_prefill_and_decode_engines_pass_a_request_on(policy):
    options = {"max_requests": 3, "max_tokens": 96, "exact": True}
    alone = Engine(policy, **options)
    rows = alone.encode_images([(patches(0), GRID)])[0]
    requests = [image_request(rows), Request("t", [4] * 30, SAMPLING)]
    ids = [alone.submit(request) for request in requests]
    expected = drain(alone)

    encoder = Engine(policy, role="encode", **options)
    prefill, decode = Engine(policy, role="prefill", **options), Engine(policy, role="decode", **options)
    encoded = encoder.encode_images([(patches(0), GRID)])[0]
    assert torch.equal(encoded, rows)
    for request in (image_request(encoded), requests[1]):
        prefill.submit(request)
    taken = {}
    while prefill.has_work:
        output = prefill.step()
        for request_id in output.ready:
            taken[decode.import_state(prefill.export_state(request_id, remove=True))] = ids[request_id]
    calls = decode.counters.prefilled_tokens
    turns = drain(decode)
    assert prefill.running == 0 and decode.counters.prefilled_tokens == calls == 0
    for request_id, turn in turns.items():
        whole = expected[taken[request_id]]
        assert np.array_equal(turn.token_ids, whole.token_ids)
        assert np.array_equal(turn.logprobs, whole.logprobs)


def test_a_prefill_engine_waits_with_what_is_ready_and_ends_what_is_done(scripted_policy):
    engine = Engine(scripted_policy, max_requests=2, max_tokens=32, role="prefill")
    engine.submit(Request("one", [1, 2], replace(SAMPLING, max_tokens=1)))
    ready = engine.submit(Request("more", [1, 3], SAMPLING))
    output = engine.step()
    assert [finished.session for finished in output.finished] == ["one"]
    assert output.ready == (ready,) and not engine.has_work
    assert engine.step().token_ids.size == 0
    aborted = engine.abort(ready)
    assert aborted is not None and len(aborted.turn.token_ids) == 1


@pytest.mark.parametrize(
    ("role", "refused"),
    [("encode", ("submit", "import")), ("prefill", ("import", "encode")), ("decode", ("submit", "encode"))],
)
def test_work_of_another_role_is_a_typed_error(policy, role, refused):
    source = Engine(policy, max_requests=1, max_tokens=32)
    state = source.export_state(source.submit(Request("s", [1, 2], SAMPLING)))
    engine = Engine(policy, max_requests=1, max_tokens=32, role=role)
    asks = {
        "submit": lambda: engine.submit(Request("s", [1], SAMPLING)),
        "import": lambda: engine.import_state(state),
        "encode": lambda: engine.encode_images([(patches(0), GRID)]),
    }
    for name in refused:
        with pytest.raises(RoleError, match=f"role '{role}' does not"):
            asks[name]()
    (allowed,) = set(asks) - set(refused)
    asks[allowed]()


def test_an_unknown_role_is_refused(scripted_policy):
    with pytest.raises(ValueError, match="all, encode, prefill, decode"):
        Engine(scripted_policy, max_requests=1, max_tokens=8, role="judge")  # pyright: ignore


@pytest.mark.parametrize("prefill_tokens", [512, 7])
def test_images_in_a_prompt_are_those_of_the_training_forward(policy, prefill_tokens):
    engine = Engine(policy, max_requests=2, max_tokens=96, replay="off", prefill_tokens=prefill_tokens)
    rows = engine.encode_images([(patches(1), GRID), (patches(2), GRID)])
    requests = [image_request(r, f"s{i}", text=3 + i) for i, r in enumerate(rows)]
    ids = [engine.submit(request) for request in requests]
    turns = drain(engine)
    for request_id, request in zip(ids, requests, strict=True):
        turn, start = turns[request_id], len(request.token_ids)
        tokens = torch.tensor([*request.token_ids, *turn.token_ids.tolist()])
        assert request.images is not None
        types = torch.cat([request.images.types, torch.full((len(turn.token_ids),), -1)])
        packed = PackedTokens(
            tokens, torch.tensor([0, len(tokens)]), images=ImageTokens(types, request.images.rows)
        )
        with torch.no_grad():
            logprobs = torch.log_softmax(policy.logits(policy(packed).hidden), dim=-1)
        expected = logprobs[torch.arange(start - 1, len(tokens) - 1), tokens[start:]]
        np.testing.assert_allclose(turn.logprobs, expected.numpy(), atol=1e-4)


def test_prompts_that_differ_in_their_image_alone_share_nothing(policy):
    engine = Engine(policy, max_requests=3, max_tokens=96)
    rows = engine.encode_images([(patches(1), GRID), (patches(2), GRID)])
    ids = [engine.submit(image_request(rows[i], f"s{n}")) for n, i in enumerate((0, 0, 1))]
    turns = drain(engine)
    assert engine.scheduler.forks == 1
    assert np.array_equal(turns[ids[0]].logprobs, turns[ids[1]].logprobs)
    assert not np.allclose(turns[ids[0]].logprobs[:1], turns[ids[2]].logprobs[:1])
    history = [*image_request(rows[0]).token_ids, *turns[ids[0]].token_ids.tolist(), 1]
    before = engine.counters.prefilled_tokens
    for image, computed in ((0, 2), (1, len(history))):
        given = image_request(rows[image]).images
        types = torch.cat([given.types, torch.full((len(history) - len(given.types),), -1)])
        images = ImageTokens(types, given.rows)
        engine.submit(Request(f"s{image}", history, SAMPLING, images=images))
        drain(engine)
        assert engine.counters.prefilled_tokens - before == computed
        before = engine.counters.prefilled_tokens
        history = [*image_request(rows[1]).token_ids, *turns[ids[1]].token_ids.tolist(), 1]


def test_images_that_do_not_fit_are_refused(policy):
    engine = Engine(policy, max_requests=1, max_tokens=96)
    rows = engine.encode_images([(patches(1), GRID)])[0]
    good = image_request(rows)
    for images in (ImageTokens(good.images.types[1:], rows), ImageTokens(good.images.types, rows[1:])):
        with pytest.raises(ImageError, match="do not fit a history"):
            engine.submit(replace(good, images=images))
    text_only = Engine(Policy(PolicyConfig.preset("pico")), max_requests=1, max_tokens=96)
    with pytest.raises(ImageError, match="no image tower"):
        text_only.submit(good)
    with pytest.raises(ValueError, match="no image tower"):
        text_only.encode_images([(patches(0), GRID)])
