"""A request that is stopped, moved or written to disk goes on with the same bits."""

import json

import numpy as np
import pytest
import torch

from model.config import PolicyConfig
from model.engine.columns import ContextState
from model.engine.engine import Engine
from model.engine.errors import BusySessionError, RequestError, StateError
from model.engine.requests import Finish, Request
from model.engine.sampler import SamplingParams
from model.engine.state import RequestState
from model.policy import Policy

SAMPLING = SamplingParams(max_tokens=14, stop_ids=frozenset(), seed=3)


def drain(engine):
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished for finished in engine.step().finished}
    return ended


def assert_same_turn(one, other):
    for name in ("token_ids", "logprobs", "full_logprobs", "versions", "states"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert one.replay_starts == other.replay_starts
    if one.expert_ids is not None:
        assert one.expert_ids.start == other.expert_ids.start
        assert np.array_equal(one.expert_ids.ids, other.expert_ids.ids)
    if one.sampling_mask is not None:
        assert torch.equal(one.sampling_mask.ids, other.sampling_mask.ids)
        assert torch.equal(one.sampling_mask.offsets, other.sampling_mask.offsets)


def make_policy(rounded):
    policy = Policy(PolicyConfig.preset("pico"))
    policy.reset_parameters(4)
    policy.fake_quant = rounded
    return policy


def moved(storage, count, every, folder):
    """Exports all of `count` requests at every `every`-th step; returns expected and continued turns."""
    policy = make_policy(storage == "packed")
    options = {"max_requests": count, "max_tokens": 96, "storage": storage, "exact": True, "capture": True}
    engine = Engine(policy, **options)
    rng = np.random.default_rng(count)
    ids = []
    for i in range(count):
        prompt = rng.integers(0, 64, int(rng.integers(1, 60))).tolist()
        sampling = SamplingParams(
            top_k=[0, 9][i % 2], max_tokens=int(rng.integers(6, 20)), stop_ids=frozenset(), seed=i
        )
        ids.append(engine.submit(Request(f"s{i}", prompt, sampling)))
    cuts, ended, step = [], {}, 0
    while engine.has_work:
        if step % every == every - 1:
            alive = [i for i in ids if i not in ended]
            cuts.append({i: engine.export_state(i).to_bytes() for i in alive})
        ended |= {finished.request_id: finished.turn for finished in engine.step().finished}
        step += 1
    pairs = []
    for cut in cuts:
        other = Engine(policy, **options)
        names = {}
        for i, data in cut.items():
            path = folder / f"{i}.state"
            RequestState.from_bytes(data).write(path)
            names[other.import_state(RequestState.read(path))] = i
        pairs += [(ended[names[i]], finished.turn) for i, finished in drain(other).items()]
    return pairs


@pytest.mark.parametrize(("storage", "every"), [("dense", 4), ("packed", 4)])
def test_requests_continue_elsewhere_bit_for_bit(storage, every, tmp_path):
    pairs = moved(storage, 5, every, tmp_path)
    assert len(pairs) >= 5
    for whole, continued in pairs:
        assert_same_turn(whole, continued)


@pytest.mark.slow
def test_a_hundred_cuts_continue_bit_for_bit(tmp_path):
    pairs = moved("packed", 12, 1, tmp_path)
    assert len(pairs) >= 100
    for whole, continued in pairs:
        assert_same_turn(whole, continued)


def test_a_request_that_still_waits_or_prefills_can_be_moved(scripted_policy):
    whole = Engine(scripted_policy, max_requests=2, max_tokens=64)
    prompts = [[1, 2] * 10, [3] * 20, [4, 5]]
    for i, prompt in enumerate(prompts):
        whole.submit(Request(f"s{i}", prompt, SAMPLING))
    expected = {finished.session: finished.turn for finished in drain(whole).values()}
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64, prefill_tokens=4)
    ids = [engine.submit(Request(f"s{i}", prompt, SAMPLING)) for i, prompt in enumerate(prompts)]
    engine.step()
    other = Engine(scripted_policy, max_requests=3, max_tokens=64)
    for i in ids:
        other.import_state(engine.export_state(i, remove=True))
    assert not engine.has_work and engine.scheduler.idle_sessions == ()
    for finished in drain(other).values():
        assert_same_turn(finished.turn, expected[finished.session])


def test_pause_stops_every_request_within_a_step_and_resume_goes_on(scripted_policy):
    whole = Engine(scripted_policy, max_requests=2, max_tokens=64)
    whole.submit(Request("s", [1, 2], SAMPLING))
    expected = drain(whole)[0].turn
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
    engine.submit(Request("s", [1, 2], SAMPLING))
    engine.step()
    engine.pause()
    calls = len(scripted_policy.calls)
    late = engine.submit(Request("late", [9], SAMPLING))
    assert not engine.has_work
    assert engine.step().token_ids.size == 0 and len(scripted_policy.calls) == calls
    engine.resume()
    ended = drain(engine)
    assert_same_turn(ended[0].turn, expected)
    assert ended[late].finish is Finish.LENGTH


def exported(policy, **options):
    engine = Engine(policy, max_requests=2, max_tokens=64, **options)
    i = engine.submit(Request("s", [1, 2, 3], SAMPLING))
    for _ in range(3):
        engine.step()
    return engine.export_state(i)


def test_caches_of_other_weights_are_kept_and_flagged_or_computed_anew():
    state = exported(make_policy(False))
    for caches, flag in (("keep", ContextState.MIXED), ("recompute", ContextState.OWN)):
        other = Engine(make_policy(False), max_requests=2, max_tokens=64, version=1)
        i = other.import_state(state, caches=caches)
        turn = drain(other)[i].turn
        assert turn.versions.tolist() == [0] * 3 + [1] * 11
        assert turn.states.tolist() == [ContextState.OWN] * 3 + [flag] * 11


def test_caches_that_do_not_fit_are_refused_and_can_be_computed_anew():
    state = exported(make_policy(True), storage="packed")
    dense = Engine(make_policy(True), max_requests=2, max_tokens=64, storage="dense")
    with pytest.raises(StateError, match=r"caches are packed, this engine's are dense"):
        dense.import_state(state)
    unrounded = Engine(make_policy(False), max_requests=2, max_tokens=64)
    with pytest.raises(StateError, match="another configuration or rounding"):
        unrounded.import_state(state)
    assert not dense.has_work
    i = dense.import_state(state, caches="recompute")
    assert len(drain(dense)[i].turn.token_ids) == 14


NESTED = (100_000).to_bytes(8, "little") + b"[" * 100_000


def test_damaged_states_are_refused(scripted_policy):
    data = exported(scripted_policy).to_bytes()
    for bad in (b"", data[:50], data[: len(data) // 2], b"x" * 100, data[:8] + b"{}" + data[10:], NESTED):
        with pytest.raises(StateError, match="export it again"):
            RequestState.from_bytes(bad)
    state = RequestState.from_bytes(data)
    newer = RequestState(state.header | {"format": 99}, state.tensors)
    with pytest.raises(StateError, match="has format 99"):
        RequestState.from_bytes(newer.to_bytes())
    engine = Engine(scripted_policy, max_requests=1, max_tokens=64)
    with pytest.raises(StateError, match="lacks a part"):
        engine.import_state(RequestState({**state.header, "sampling": {"heat": 1}}, state.tensors))
    with pytest.raises(StateError, match="it is damaged"):
        engine.import_state(RequestState(state.header | {"cached": 2}, state.tensors))
    for part in ({"start": "x"}, {"floor": [1, 2, 3]}, {"replay_starts": ["x"]}, {"cached": "x"}):
        with pytest.raises(StateError, match="damaged"):
            engine.import_state(RequestState(state.header | part, state.tensors))
    for part in ({"logprobs": torch.zeros(1)}, {"mask.ids": torch.zeros(0), "mask.offsets": torch.zeros(4)}):
        with pytest.raises(StateError, match="damaged"):
            engine.import_state(RequestState(state.header, state.tensors | part))
    assert not engine.has_work


def test_a_state_is_a_safetensors_file_with_a_json_header(scripted_policy):
    data = exported(scripted_policy).to_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tempering.request"])
    assert (header["format"], header["session"], header["counter"]) == (1, "s", 6)


def test_a_busy_session_and_an_unknown_request_are_refused(scripted_policy):
    state = exported(scripted_policy)
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
    engine.submit(Request("s", [1], SAMPLING))
    with pytest.raises(BusySessionError):
        engine.import_state(state)
    with pytest.raises(RequestError, match="request 7 is not being served"):
        engine.export_state(7)
