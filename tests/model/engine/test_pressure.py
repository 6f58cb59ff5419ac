"""An engine whose pages run out gives the tokens of one that has room for everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Finish, Request
from model.engine.sampler import SamplingParams
from model.policy import Policy
from tests.model.engine.scripted import PAGE_TOKENS, ScriptedPolicy

CONTEXT = 32
FULL = CONTEXT // PAGE_TOKENS


@st.composite
def workloads(draw):
    """Requests of several sessions in several turns; some start from the same prompt."""
    prompts = draw(st.lists(st.lists(st.integers(0, 61), min_size=1, max_size=20), min_size=1, max_size=3))
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        sessions = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
        turns.append([(s, draw(st.integers(0, 2)), draw(st.integers(1, 14))) for s in sessions])
    return prompts, turns, draw(st.sampled_from([0.0, 1.0])), draw(st.integers(0, 5))


def play(engine, workload, before_step=lambda engine: None):
    """Runs the turns one after the other; returns what each session got in each."""
    prompts, turns, temperature, seed = workload
    histories, results = {}, []
    for turn in turns:
        ids = {}
        for session, extra, budget in turn:
            history = histories.get(session, prompts[session % len(prompts)])
            history = [*history, *range(extra)]
            if len(history) < CONTEXT:
                sampling = SamplingParams(temperature, max_tokens=budget, seed=seed + session)
                ids[engine.submit(Request(f"s{session}", history, sampling))] = (session, history)
        steps = 0
        while engine.has_work:
            before_step(engine)
            for finished in engine.step().finished:
                session, history = ids.pop(finished.request_id)
                tokens, logprobs = finished.turn.token_ids.tolist(), finished.turn.logprobs.tolist()
                assert finished.finish is Finish.LENGTH
                results.append((session, tokens, logprobs))
                histories[session] = [*history, *tokens]
            steps += 1
            assert steps < 3000, "requests take each other's pages for ever"
        assert not ids
    return sorted(results)


@settings(max_examples=40, deadline=None)
@given(
    workload=workloads(),
    pages=st.integers(FULL, FULL + 6),
    served=st.integers(1, 6),
    idle=st.integers(0, 3),
    prefill=st.sampled_from([1, 5, 64]),
)
def test_few_pages_change_no_token(workload, pages, served, idle, prefill):
    whole = play(Engine(ScriptedPolicy(), max_requests=6, max_tokens=CONTEXT), workload)
    policy = ScriptedPolicy()
    policy.fake_quant = True
    engine = Engine(
        policy,
        max_requests=served,
        max_tokens=CONTEXT,
        idle_sessions=idle,
        prefill_tokens=prefill,
        storage="packed",
        pages=pages,
    )
    assert play(engine, workload) == whole
    for session in range(6):
        engine.release(f"s{session}")
    assert policy.cache.pages.free_pages == pages and not policy.cache.sequences


def crowded(policy, served=4, pages=FULL, **options):
    policy.fake_quant = True
    return Engine(policy, max_requests=served, max_tokens=CONTEXT, storage="packed", pages=pages, **options)


def test_the_request_that_came_first_never_gives_way(scripted_policy):
    engine = crowded(scripted_policy)
    sampling = SamplingParams(max_tokens=26, stop_ids=frozenset())
    ids = [engine.submit(Request(f"s{i}", [i + 1] * 3, sampling)) for i in range(4)]
    order = []
    while engine.has_work:
        output = engine.step()
        unfinished = [i for i in ids if i not in order]
        if engine.scheduler.preemptions:
            assert unfinished[0] in output.request_ids
        order += [finished.request_id for finished in output.finished]
    assert order == ids
    assert engine.scheduler.preemptions > 0


def test_idle_sessions_give_way_before_any_request(scripted_policy):
    engine = crowded(scripted_policy, served=2)
    engine.submit(Request("idle", [1] * 20, SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.idle_sessions == ("idle",)
    engine.submit(Request("new", [2] * 10, SamplingParams(max_tokens=4)))
    while engine.has_work:
        engine.step()
    assert (engine.scheduler.evictions, engine.scheduler.preemptions) == (1, 0)


def test_a_request_that_gave_way_can_be_aborted_with_its_tokens(scripted_policy):
    engine = crowded(scripted_policy, served=2)
    sampling = SamplingParams(max_tokens=26, stop_ids=frozenset())
    _, last = (engine.submit(Request(name, [i] * 4, sampling)) for i, name in enumerate("ab"))
    sampled = []
    while not engine.scheduler.preemptions:
        output = engine.step()
        sampled += output.token_ids[output.request_ids == last].tolist()
    aborted = engine.abort(last)
    assert aborted is not None and len(sampled) > 2
    assert aborted.turn.token_ids.tolist() == sampled
    assert len(aborted.turn.full_logprobs) == len(aborted.turn.states) == len(sampled)


def test_pages_for_less_than_one_sequence_are_refused(scripted_policy):
    with pytest.raises(ValueError, match=f"needs {FULL} pages, not {FULL - 1}"):
        crowded(scripted_policy, pages=FULL - 1)


def test_the_policy_on_few_pages_gives_the_same_bits():
    policy = Policy(PolicyConfig.preset("pico"))
    policy.reset_parameters(2)
    policy.fake_quant = True
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, 60).tolist() for _ in range(3)]
    turns = {}
    for pages in (None, 4):
        engine = Engine(
            policy, max_requests=3, max_tokens=192, storage="packed", pages=pages, exact=True, capture=True
        )
        ids = []
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(float(i > 0), max_tokens=8 + i, seed=i)
            ids.append(engine.submit(Request(f"s{i}", prompt, sampling)))
        ended = {}
        while engine.has_work:
            ended |= {finished.request_id: finished.turn for finished in engine.step().finished}
        turns[pages] = [ended[i] for i in ids]
        assert (engine.scheduler.preemptions > 0) == (pages is not None)
    for whole, crowded_turn in zip(turns[None], turns[4], strict=True):
        assert whole.token_ids.tolist() == crowded_turn.token_ids.tolist()
        assert np.array_equal(whole.logprobs, crowded_turn.logprobs)
        assert whole.replay_starts == crowded_turn.replay_starts
        assert np.array_equal(whole.expert_ids.ids, crowded_turn.expert_ids.ids)
        assert not crowded_turn.states.any()
