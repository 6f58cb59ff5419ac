import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.engine.columns import ExpertIds
from model.engine.engine import Engine
from model.engine.errors import (
    BusySessionError,
    ContextOverflowError,
    EmptyPromptError,
    NonFiniteLogitsError,
    RequestError,
    SamplingError,
    StateError,
    TokenRangeError,
)
from model.engine.requests import Columns, Finish, Request
from model.engine.sampler import SamplingColumns, SamplingParams, sample

POISON = 63


def run(engine, *requests):
    """Submits requests and steps until all ended; returns the turns in the order of the requests."""
    ids = [engine.submit(request) for request in requests]
    ended = drain(engine)
    return [ended[i] for i in ids]


def drain(engine):
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished for finished in engine.step().finished}
    return ended


def expected(policy, prompt, params, *, context=64, scales=None):
    """Samples a turn one token at a time straight from the policy. `scales`: the weight at each token."""
    history, columns = list(prompt), SamplingColumns.empty(1)
    columns.set(0, params)
    tokens, logprobs = [], []
    while len(tokens) < params.max_tokens and len(history) < context:
        logits = policy.logits(policy.hidden(history)[None])
        if scales is not None:
            logits = logits / policy.scale * scales[len(tokens)]
        drawn = sample(logits, columns, np.array([len(history)]))
        tokens.append(int(drawn.token_ids[0]))
        logprobs.append(float(drawn.logprobs[0]))
        history.append(tokens[-1])
        if tokens[-1] in params.stop_ids:
            break
    return tokens, logprobs


def check(finished, policy, prompt, params, **options):
    tokens, logprobs = expected(policy, prompt, params, **options)
    assert finished.turn.token_ids.tolist() == tokens
    np.testing.assert_allclose(finished.turn.logprobs, logprobs, atol=1e-6)


def params(seed=0, **options):
    return SamplingParams(
        **({"max_tokens": 12, "stop_ids": frozenset({3, 4, 5, 6, 7, 8})} | options), seed=seed
    )


def test_many_requests_at_once_get_what_each_would_get_alone(scripted_policy):
    rng = np.random.default_rng(0)
    engine = Engine(scripted_policy, max_requests=7, max_tokens=64, prefill_tokens=16)
    requests = []
    for i in range(40):
        prompt = rng.integers(0, 60, rng.integers(1, 40)).tolist()
        sampling = params(i, temperature=float(rng.choice([0.0, 1.0, 0.7])), top_k=int(rng.choice([0, 5])))
        requests.append(Request(f"s{i}", prompt, sampling))
    for request, finished in zip(requests, run(engine, *requests), strict=True):
        if finished.finish is not Finish.ERROR:
            check(finished, scripted_policy, request.token_ids, request.sampling)
            assert (finished.turn.versions == 0).all()
    assert engine.scheduler.served == 0


def test_prefill_is_bounded_and_decoding_never_starves(scripted_policy):
    engine = Engine(scripted_policy, max_requests=8, max_tokens=64, prefill_tokens=8)
    engine.submit(Request("runs", [1], params(max_tokens=40, stop_ids=frozenset())))
    engine.step()
    for i in range(7):
        engine.submit(Request(f"long{i}", [9 + i] * 50, params(i, max_tokens=2, stop_ids=frozenset())))
    for _ in range(30):
        before = len(scripted_policy.calls)
        output = engine.step()
        assert 0 in output.request_ids
        calls = scripted_policy.calls[before:]
        assert calls[0][:1] == (1,)
        assert sum(sum(call) for call in calls[1:]) <= 8


def test_short_prompts_do_not_wait_for_long_ones(scripted_policy):
    engine = Engine(scripted_policy, max_requests=4, max_tokens=64, prefill_tokens=8)
    long = [engine.submit(Request(f"l{i}", [i + 1] * 60, params(i))) for i in range(3)]
    short = engine.submit(Request("short", [5, 6], params()))
    first = engine.step().request_ids.tolist()
    assert first == [short] and not set(first) & set(long)


def test_a_stop_id_or_the_budget_or_the_context_ends_a_turn(scripted_policy):
    engine = Engine(scripted_policy, max_requests=4, max_tokens=16)
    budget, context, stop = run(
        engine,
        Request("a", [1], params(max_tokens=1, stop_ids=frozenset())),
        Request("b", [1, 2, 3], params(max_tokens=99, stop_ids=frozenset())),
        Request("c", [1], params(max_tokens=15, stop_ids=frozenset(range(60)))),
    )
    assert (budget.finish, len(budget.turn.token_ids)) == (Finish.LENGTH, 1)
    assert (context.finish, len(context.turn.token_ids)) == (Finish.LENGTH, 13)
    assert stop.finish is Finish.STOP
    assert len(stop.turn.token_ids) == 1


def test_a_session_computes_only_what_is_new(scripted_policy):
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
    prompt = [1, 2, 3, 4]
    (first,) = run(engine, Request("s", prompt, params(1)))
    history = [*prompt, *first.turn.token_ids.tolist(), 40, 41]
    scripted_policy.calls.clear()
    (second,) = run(engine, Request("s", history, params(1)))
    assert scripted_policy.calls[0] == (3,)  # the last sampled token and the two new ones
    check(second, scripted_policy, history, params(1))


@pytest.mark.parametrize("change", ["other", "same", "shorter"])
def test_a_history_that_does_not_extend_the_caches_is_computed_anew(scripted_policy, change):
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
    prompt = [1, 2, 3, 4]
    run(engine, Request("s", prompt, params(1)))
    history = {"other": [1, 9, 3, 4, 5, 6, 7, 8, 9, 10], "same": prompt, "shorter": [1]}[change]
    (second,) = run(engine, Request("s", history, params(2)))
    check(second, scripted_policy, history, params(2))


def test_the_least_recently_used_session_is_evicted_and_nothing_is_lost(scripted_policy):
    engine = Engine(scripted_policy, max_requests=1, max_tokens=64, idle_sessions=1)
    prompts = {name: [i + 1, 2, 3] for i, name in enumerate("abc")}
    turns = {name: run(engine, Request(name, prompt, params()))[0] for name, prompt in prompts.items()}
    assert engine.scheduler.idle_sessions == ("b", "c")
    assert engine.scheduler.evictions == 1
    for name in "bac":
        history = [*prompts[name], *turns[name].turn.token_ids.tolist(), 50]
        (second,) = run(engine, Request(name, history, params(5)))
        check(second, scripted_policy, history, params(5))


def test_samples_of_one_prompt_share_its_computation(scripted_policy):
    engine = Engine(scripted_policy, max_requests=8, max_tokens=64, prefill_tokens=8)
    prompt = list(range(1, 21))
    requests = [Request(f"s{i}", prompt, params(i)) for i in range(8)]
    turns = run(engine, *requests)
    for request, finished in zip(requests, turns, strict=True):
        check(finished, scripted_policy, prompt, request.sampling)
    assert engine.scheduler.forks == 7
    assert engine.counters.prefilled_tokens == 20


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_shared_prompt_survives_the_abort_of_one_that_shares_it(scripted_policy, victim):
    engine = Engine(scripted_policy, max_requests=4, max_tokens=64, prefill_tokens=4)
    prompt = list(range(1, 21))
    ids = [engine.submit(Request(f"s{i}", prompt, params(i))) for i in range(3)]
    engine.step()
    aborted = engine.abort(ids[victim])
    assert aborted is not None and aborted.finish is Finish.ABORT
    ended = drain(engine)
    for i in {0, 1, 2} - {victim}:
        check(ended[ids[i]], scripted_policy, prompt, params(i))
    release_all(engine, scripted_policy, [f"s{i}" for i in range(3)])


def release_all(engine, policy, sessions):
    for session in sessions:
        engine.release(session)
    assert policy.cache.sequences == {}
    assert engine.scheduler.served == 0 and not engine.has_work


def test_an_aborted_turn_keeps_its_tokens_and_continues_with_the_same_draws(scripted_policy):
    sampling = params(3, max_tokens=20, stop_ids=frozenset({3}))
    whole, _ = expected(scripted_policy, [1, 2], sampling)
    for cut in range(1, len(whole)):
        engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
        request_id = engine.submit(Request("s", [1, 2], sampling))
        for _ in range(cut):
            engine.step()
        aborted = engine.abort(request_id)
        assert aborted is not None and aborted.turn.token_ids.tolist() == whole[:cut]
        other = Engine(scripted_policy, max_requests=2, max_tokens=64, version=4)
        (finished,) = run(other, Request("s", [1, 2], sampling, aborted.turn))
        check(finished, scripted_policy, [1, 2], sampling)
        assert finished.turn.versions.tolist() == [0] * cut + [4] * (len(whole) - cut)
        (finished,) = run(engine, Request("s", [1, 2], sampling, aborted.turn))
        check(finished, scripted_policy, [1, 2], sampling)


def test_a_turn_that_had_ended_before_the_interruption_ends_at_once(scripted_policy):
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
    done = Columns(np.array([9, 3]), np.array([-1.0, -2.0]), np.array([1, 2]))
    stopped, full = run(
        engine,
        Request("a", [1], params(), done),
        Request("b", [1], params(max_tokens=2, stop_ids=frozenset()), done),
    )
    assert (stopped.finish, full.finish) == (Finish.STOP, Finish.LENGTH)
    assert stopped.turn.versions.tolist() == [1, 2]
    assert scripted_policy.calls == []


def test_abort_of_a_waiting_or_unknown_request(scripted_policy):
    engine = Engine(scripted_policy, max_requests=1, max_tokens=64)
    first, second = (engine.submit(Request(s, [1], params())) for s in "ab")
    engine.step()
    aborted = engine.abort(second)
    assert aborted is not None and len(aborted.turn.token_ids) == 0
    assert engine.abort(second) is None and engine.abort(99) is None
    assert set(drain(engine)) == {first}


EXPERTS = ExpertIds(9, np.zeros((1, 6, 2), np.int16))


def recorded(**options):
    return Columns(np.ones(1, np.int32), np.zeros(1), np.zeros(1), **options)


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        (Request("x", [], params()), EmptyPromptError, "at least one token"),
        (Request("x", [1, 64], params()), TokenRangeError, r"id 64 is outside 0\.\.63"),
        (Request("x", [-1], params()), TokenRangeError, "id -1"),
        (Request("x", [1.5], params()), TokenRangeError, "integers"),
        (Request("x", [[1], [2, 3]], params()), TokenRangeError, "flat sequence"),
        (Request("x", [2**70], params()), TokenRangeError, "integers"),
        (Request("x", [1] * 64, params()), ContextOverflowError, "context of 64"),
        (Request("x", [1], params(max_tokens=0)), SamplingError, "max_tokens"),
        (Request("x", [1], params(temperature=-1.0)), SamplingError, "temperature"),
        (Request("x", [1], params(temperature=float("nan"))), SamplingError, "temperature"),
        (Request("x", [1], params(top_p=0.0)), SamplingError, "top_p"),
        (Request("x", [1], params(top_k=-1)), SamplingError, "top_k"),
        (Request("x", [1], params(temperature=1e-45)), SamplingError, "take 0"),
        (Request("x", [1], params(temperature="hot")), SamplingError, "temperature is a number"),
        (Request("x", [1], params(max_tokens=None)), SamplingError, "max_tokens is an integer"),
        (Request("x", [1], params(top_k=2**80)), SamplingError, "top_k"),
        (Request("x", [1], replace(params(), seed=None)), SamplingError, "seed is an integer"),
        (Request("x", [1], params(stop_ids=frozenset({None}))), SamplingError, "set of token ids"),
        (Request("x", [1], params(), recorded(replay_starts=((0, 50),))), RequestError, "windows start at"),
        (Request("x", [1], params(), recorded(replay_starts=((-1, 0),))), RequestError, "windows start at"),
        (Request("x", [1], params(), recorded(expert_ids=EXPERTS)), RequestError, "experts of tokens 9"),
        (Request("busy", [1], params()), BusySessionError, "is being served"),
        (
            Request("x", [1], params(max_tokens=1), Columns(np.zeros(2, np.int32), np.zeros(2), np.zeros(2))),
            ContextOverflowError,
            "2 completed tokens",
        ),
    ],
)
def test_a_request_at_fault_is_refused_and_the_others_go_on(scripted_policy, request_, error, match):
    engine = Engine(scripted_policy, max_requests=2, max_tokens=64)
    good = engine.submit(Request("busy", [1, 2], params(7)))
    engine.step()
    with pytest.raises(error, match=match) as caught:
        engine.submit(request_)
    assert isinstance(caught.value, RequestError) and isinstance(caught.value, ValueError)
    check(drain(engine)[good], scripted_policy, [1, 2], params(7))


def test_an_engine_keeps_no_negative_number_of_sessions(scripted_policy):
    with pytest.raises(ValueError, match="idle_sessions is at least 0"):
        Engine(scripted_policy, max_requests=2, max_tokens=64, idle_sessions=-1)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(RequestError, match="different lengths"):
        Columns(np.zeros(2, np.int32), np.zeros(1), np.zeros(2))


def test_logits_that_are_not_finite_fail_that_request_only(scripted_policy):
    engine = Engine(scripted_policy, max_requests=4, max_tokens=64)
    good, bad, shared = run(
        engine,
        Request("good", [1, 2], params(1)),
        Request("bad", [1, POISON], params(1)),
        Request("shared", [1, POISON], params(2)),
    )
    check(good, scripted_policy, [1, 2], params(1))
    for finished in (bad, shared):
        assert finished.finish is Finish.ERROR
        assert isinstance(finished.error, NonFiniteLogitsError)
    assert engine.scheduler.idle_sessions == ("good",)
    release_all(engine, scripted_policy, ["good"])


@pytest.mark.parametrize("caches", ["keep", "recompute"])
def test_a_weight_swap_between_two_tokens(scripted_policy, caches):
    sampling = params(2, max_tokens=10, stop_ids=frozenset())
    engine = Engine(scripted_policy, max_requests=3, max_tokens=64, prefill_tokens=8)
    run(engine, Request("idle", [7, 8], params(1, max_tokens=3)))
    ids = [engine.submit(Request(f"s{i}", [i + 1, 2], sampling)) for i in range(3)]
    for _ in range(4):
        engine.step()
    engine.load_state({"scale": np.array([0.25], np.float32)}, version=9, caches=caches)
    assert engine.version == 9
    assert engine.scheduler.idle_sessions == (("idle",) if caches == "keep" else ())
    ended = drain(engine)
    for i, request_id in enumerate(ids):
        versions = ended[request_id].turn.versions
        assert set(versions[:4]) == {0} and set(versions[4:]) == {9}
        check(
            ended[request_id],
            scripted_policy,
            [i + 1, 2],
            sampling,
            scales=np.where(versions == 0, 1.0, 0.25),
        )


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({}, r"missing \['scale'\]"),
        ({"scale": torch.ones(1), "bias": torch.ones(1)}, r"unknown \['bias'\]"),
        ({"scale": torch.ones(2)}, r"scale is \(2,\), not \(1,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(scripted_policy, state, match):
    engine = Engine(scripted_policy, max_requests=1, max_tokens=8)
    with pytest.raises(StateError, match=match):
        engine.load_state(state, version=1)
    assert engine.version == 0 and scripted_policy.scale.item() == 1.0
    with pytest.raises(ValueError, match="keep or recompute"):
        engine.load_state({"scale": torch.ones(1)}, version=1, caches="drop")  # pyright: ignore


def test_read_only_arrays_can_be_loaded(scripted_policy):
    value = np.array([0.5], np.float32)
    value.flags.writeable = False
    engine = Engine(scripted_policy, max_requests=1, max_tokens=8)
    engine.load_state({"scale": value}, version=1)
    assert scripted_policy.scale.item() == 0.5


def test_an_engine_needs_room(scripted_policy):
    with pytest.raises(ValueError, match="at least 1 request of 2 tokens"):
        Engine(scripted_policy, max_requests=0, max_tokens=8)


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_lose_no_token_and_leak_no_slot(scripted_policy, seed):
    rng = np.random.default_rng(seed)
    policy = scripted_policy
    engine = Engine(policy, max_requests=4, max_tokens=48, idle_sessions=2, prefill_tokens=6)
    histories, live, scales = {}, {}, [1.0]
    sessions = [f"s{i}" for i in range(9)]

    def finish(finished):
        history, sampling = live.pop(finished.request_id)
        turn = finished.turn
        assert (np.diff(turn.versions) >= 0).all()
        if finished.finish is Finish.ERROR:
            histories.pop(finished.session, None)
            return
        weights = [scales[v] for v in turn.versions] + [scales[-1]] * 48
        tokens, logprobs = expected(policy, history, sampling, context=48, scales=weights)
        count = len(turn.token_ids)
        if finished.finish is not Finish.ABORT:
            assert count == len(tokens)
        assert turn.token_ids.tolist() == tokens[:count]
        np.testing.assert_allclose(turn.logprobs, logprobs[:count], atol=1e-5)
        histories[finished.session] = [*history, *tokens[:count]]

    for step in range(200):
        match rng.choice(["submit", "submit", "step", "step", "step", "abort", "release", "swap", "bad"]):
            case "submit":
                session = str(rng.choice(sessions))
                known = histories.get(session, [])
                fresh = rng.integers(0, 3, 4).tolist() * int(rng.integers(1, 5))
                history = [*known, *rng.integers(0, 62, 3).tolist()] if len(known) in range(1, 40) else fresh
                sampling = params(int(rng.integers(3)), max_tokens=int(rng.integers(1, 12)))
                with contextlib.suppress(BusySessionError):
                    live[engine.submit(Request(session, history, sampling))] = (history, sampling)
            case "step":
                for finished in engine.step().finished:
                    finish(finished)
            case "abort" if live:
                finished = engine.abort(int(rng.choice(list(live))))
                assert finished is not None
                finish(finished)
            case "release":
                session = str(rng.choice(sessions))
                if finished := engine.release(session):
                    finish(finished)
                histories.pop(session, None)
            case "swap":
                scales.append(float(rng.choice([0.5, 1.0, 2.0])))
                caches = str(rng.choice(["keep", "recompute"]))
                engine.load_state({"scale": torch.tensor([scales[-1]])}, len(scales) - 1, caches=caches)  # pyright: ignore
            case "bad":
                with pytest.raises(EmptyPromptError):
                    engine.submit(Request("bad", [], params(step)))
        held = {int(s) for s in engine.scheduler.rows.slot if s >= 0}
        assert held == set(policy.cache.sequences)
        assert engine.running <= 4
    for finished in drain(engine).values():
        finish(finished)
    assert not live
    release_all(engine, policy, sessions)
    assert len(policy.cache.free_slots) == 6
