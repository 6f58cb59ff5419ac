"""Decoding with drafts on a real policy, against decoding without."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.config import PolicyConfig
from model.engine import speculative
from model.engine.acceptance import Attempt
from model.engine.engine import Engine
from model.engine.requests import Finish, Request
from model.engine.sampler import SamplingParams
from model.engine.speculative import Speculation
from model.layers.exact import is_exact
from model.policy import PackedTokens, Policy
from model.presets import NANO_DRAFT

RULES = ["rejection", "coupled"]
FIXED = [Speculation(rule=rule, length=length) for rule in RULES for length in (1, 5)]
ALL = [*FIXED, Speculation(rule="rejection"), Speculation(rule="coupled")]


@pytest.fixture(scope="module")
def shared():
    made = Policy(PolicyConfig.preset("nano_draft"))
    made.reset_parameters(4)
    return made


@pytest.fixture
def policy(shared):
    shared.exact = shared.fake_quant = False
    return shared


def requests(count, temperature, **shape):
    draw = np.random.default_rng(3)
    made = []
    for number in range(count):
        prompt = draw.integers(10, 60, size=1 + 5 * number).tolist()
        shape |= {"seed": number, "max_tokens": 3 + 4 * number, "stop_ids": frozenset({5, 6})}
        params = SamplingParams(temperature=temperature, **shape)
        made.append(Request(f"s{number}", prompt, params))
    return made


def run(policy, speculate, wanted, max_requests=4, **options):
    engine = Engine(policy, max_requests=max_requests, max_tokens=128, speculate=speculate, **options)
    ids = [engine.submit(request) for request in wanted]
    return collect(engine, ids), engine


def collect(engine, ids):
    """Finished turns in the order of `ids`; the columns of the steps must add up to them."""
    finished, tokens, logprobs = {}, {i: [] for i in ids}, {i: [] for i in ids}
    while engine.has_work:
        output = engine.step()
        for number, token, logprob in zip(output.request_ids, output.token_ids, output.logprobs, strict=True):
            tokens[int(number)].append(int(token))
            logprobs[int(number)].append(float(logprob))
        finished |= {end.request_id: end for end in output.finished}
    for number, end in finished.items():
        assert end.turn.token_ids.tolist() == tokens[number]
        assert end.turn.logprobs.tolist() == pytest.approx(logprobs[number])
    return [finished[i] for i in ids]


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.finish == b.finish and a.turn.token_ids.tolist() == b.turn.token_ids.tolist()
        np.testing.assert_allclose(a.turn.logprobs, b.turn.logprobs, atol=1e-4)


@pytest.mark.parametrize("speculate", ALL, ids=str)
def test_greedy_tokens_are_the_same(policy, speculate):
    policy.fake_quant = speculate.rule == "rejection"
    plain, _ = run(policy, None, requests(6, 0.0))
    drafted, engine = run(policy, speculate, requests(6, 0.0))
    same(drafted, plain)
    assert engine.speculator.counters.rows > 0


@pytest.mark.parametrize(("length", "shape"), [(1, {}), (5, {"top_k": 3}), (5, {"top_p": 0.7}), (None, {})])
def test_coupled_draws_give_the_tokens_of_plain_decoding(policy, length, shape):
    plain, _ = run(policy, None, requests(7, 0.9, **shape))
    drafted, _ = run(policy, Speculation(rule="coupled", length=length), requests(7, 0.9, **shape))
    same(drafted, plain)


def test_stops_and_budgets_end_turns_in_the_middle_of_a_draft(policy):
    drafted, engine = run(policy, Speculation(length=5), requests(9, 1.5))
    assert {end.finish for end in drafted} == {Finish.STOP, Finish.LENGTH}
    for number, end in enumerate(drafted):
        ids = end.turn.token_ids.tolist()
        assert not {5, 6} & set(ids[:-1])
        assert len(ids) == 3 + 4 * number if end.finish is Finish.LENGTH else ids[-1] in (5, 6)
    assert engine.speculator.counters.checked > engine.speculator.counters.accepted > 0


@pytest.mark.parametrize("rule", RULES)
def test_results_do_not_depend_on_the_batch(policy, rule):
    speculate = Speculation(rule=rule, length=3)
    together, _ = run(policy, speculate, requests(6, 1.0))
    alone = [run(policy, speculate, [request], 1)[0][0] for request in requests(6, 1.0)]
    same(alone, together)


@pytest.fixture
def exact(policy):
    policy.exact = policy.fake_quant = True
    return policy


def bits(ends):
    return [(end.turn.token_ids.tolist(), end.turn.logprobs.tobytes()) for end in ends]


def test_in_exact_mode_coupled_draws_give_the_bits_of_plain_decoding(exact):
    plain, _ = run(exact, None, requests(4, 0.8))
    drafted, engine = run(exact, Speculation(rule="coupled", length=5), requests(4, 0.8))
    assert bits(drafted) == bits(plain) and engine.speculator.counters.accepted > 0


def test_in_exact_mode_no_bit_depends_on_the_batch(exact):
    together, _ = run(exact, Speculation(length=4), requests(4, 0.8))
    alone = [run(exact, Speculation(length=4), [request], 1)[0][0] for request in requests(4, 0.8)]
    assert bits(alone) == bits(together)


def test_a_session_goes_on_from_what_drafts_left_in_the_cache(policy):
    """Three turns; the second and third begin where a draft was cut, with a tool's answer between."""
    policy.fake_quant = True
    texts = {}
    for speculate in (None, Speculation(length=5)):
        engine = Engine(policy, max_requests=2, max_tokens=128, speculate=speculate)
        history, turns = [10, 20, 30], []
        for turn in range(3):
            params = SamplingParams(temperature=0.0, max_tokens=5 + turn)
            end = collect(engine, [engine.submit(Request("s", history, params))])[0]
            turns.append(end.turn.token_ids.tolist())
            history = [*history, *turns[-1], 40, 41, 42]
        texts[speculate is None] = turns
        # What stayed in the cache is not computed again.
        assert engine.counters.prefilled_tokens == 3 + 2 * 4
    assert texts[True] == texts[False]


@pytest.mark.parametrize("shape", [{"top_k": 4}, {}])
def test_what_a_turn_records_is_the_same(policy, shape):
    """Experts, masks, floors and full log-probabilities, and in steps the same as in turns."""
    policy.fake_quant = True
    turns = []
    for speculate in (None, Speculation(rule="coupled", length=5)):
        ends, _ = run(policy, speculate, requests(4, 0.9, **shape), capture=True, replay="bounded")
        turns.append([end.turn for end in ends])
    for plain, drafted in zip(*turns, strict=True):
        assert drafted.token_ids.tolist() == plain.token_ids.tolist()
        assert drafted.expert_ids.start == plain.expert_ids.start
        np.testing.assert_array_equal(drafted.expert_ids.ids, plain.expert_ids.ids)
        np.testing.assert_allclose(drafted.full_logprobs, plain.full_logprobs, atol=1e-4)
        assert drafted.replay_starts == plain.replay_starts
        assert drafted.states.tolist() == plain.states.tolist()
        assert (drafted.sampling_mask is None) == (not shape)
        if shape:
            assert torch.equal(drafted.sampling_mask.ids, plain.sampling_mask.ids)


@pytest.mark.parametrize("rule", RULES)
def test_with_few_pages_requests_give_way_and_lose_nothing(policy, rule):
    """Pages for about two of six requests: they are preempted between drafts and computed anew."""
    policy.fake_quant = True
    plain, _ = run(policy, None, requests(6, 0.0), 6, storage="packed")
    page = policy.new_cache(1, 128, storage="packed").pages.page_tokens
    drafted, engine = run(
        policy, Speculation(rule=rule, length=5), requests(6, 0.0), 6, storage="packed", pages=128 // page
    )
    assert engine.scheduler.preemptions + engine.scheduler.evictions > 0
    assert [end.turn.token_ids.tolist() for end in drafted] == [end.turn.token_ids.tolist() for end in plain]


@pytest.mark.parametrize("fake_quant", [False, True])
def test_a_request_moves_between_engines_in_the_middle(policy, fake_quant):
    """After every step from one engine with drafts to another, and to one without and back."""
    policy.fake_quant = fake_quant
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=30)
    wanted = Request("s", list(range(10, 30)), params)
    plain = run(policy, None, [wanted])[0][0]
    ways = [Speculation(rule="coupled", length=3), None, Speculation(rule="coupled", length=5)]
    engines = [Engine(policy, max_requests=2, max_tokens=128, speculate=way) for way in ways]
    number, current = engines[0].submit(wanted), 0
    while not (finished := engines[current].step().finished):
        state = engines[current].export_state(number, remove=True)
        current = (current + 1) % len(engines)
        number = engines[current].import_state(state)
    same(finished, [plain])
    assert engines[0].speculator.counters.accepted + engines[2].speculator.counters.accepted > 0


def test_shared_prompts_share_the_window(policy):
    """Samples of one prompt are forks: their drafts are those of a prompt computed alone."""
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=8) for seed in range(4)]
    prompt = list(range(10, 40))
    wanted = [Request(f"s{i}", prompt, p) for i, p in enumerate(params)]
    shared, engine = run(policy, Speculation(length=5), wanted)
    assert engine.scheduler.forks == 3
    alone = [run(policy, Speculation(length=5), [request])[0][0] for request in wanted]
    same(shared, alone)


@pytest.mark.parametrize("caches", ["keep", "recompute"])
def test_weights_change_in_the_middle(policy, caches):
    engine = Engine(policy, max_requests=4, max_tokens=128, speculate=Speculation(length=5))
    ids = [engine.submit(request) for request in requests(4, 1.0)]
    ends = engine.step().finished
    engine.load_state(policy.state_dict(), 1, caches=caches)
    while engine.has_work:
        ends += engine.step().finished
    assert len(ends) == len(ids) and all(end.error is None for end in ends)
    assert {int(version) for end in ends for version in end.turn.versions} == {0, 1}


def test_nan_weights_end_requests_and_the_engine_goes_on(policy):
    broken = Policy(policy.config)
    broken.load_state_dict(policy.state_dict())
    with torch.no_grad():
        broken.head.weight.fill_(torch.nan)
    ends, engine = run(broken, Speculation(length=5), requests(3, 1.0))
    assert all(end.finish is Finish.ERROR for end in ends)
    engine.load_state(policy.state_dict(), 1)
    again = collect(engine, [engine.submit(request) for request in requests(3, 0.0)])
    same(again, run(policy, None, requests(3, 0.0))[0])


def test_a_drafter_of_nan_is_not_listened_to(policy):
    """Its drafts are dropped; what the policy says comes out."""
    broken = Policy(policy.config)
    broken.load_state_dict(policy.state_dict())
    with torch.no_grad():
        broken.mtp.blocks[-1].norm.weight.fill_(torch.nan)
    ends, engine = run(broken, Speculation(length=5), requests(4, 0.0))
    same(ends, run(policy, None, requests(4, 0.0))[0])
    assert engine.speculator.counters.checked == 0


def test_what_does_not_fit_is_refused(policy, nano):
    with pytest.raises(ValueError, match="nano_draft"):
        Engine(nano, max_requests=1, max_tokens=8, speculate=Speculation(length=2))
    with pytest.raises(ValueError, match="block of 5"):
        Engine(policy, max_requests=1, max_tokens=8, speculate=Speculation(length=6))
    with pytest.raises(ValueError, match="at least 1"):
        Speculation(length=0)
    with pytest.raises(ValueError, match="rejection or coupled"):
        Speculation(rule="hope")


VOCAB, LENGTH, SAMPLES = 4, 4, 6000
# 99.99th percentile of chi-square with 4^4 - 1 = 255 degrees of freedom.
LIMIT = 346.0


@pytest.fixture(scope="module")
def small():
    """A policy over four tokens, its drafter half taught by luck alone."""
    config = replace(
        PolicyConfig.preset("nano_draft"),
        vocab_size=VOCAB,
        hidden_size=32,
        head_dim=16,
        qk_rope_head_dim=8,
        engram_head_dim=16,
        engram_compressed_vocab_size=VOCAB,
        engram_token_map=tuple(range(VOCAB)),
        sliding_window=4,
    )
    made = Policy(config)
    made.reset_parameters(0)
    with torch.no_grad():
        made.head.weight.mul_(3.0)
    return made


def chi_square(policy, speculate):
    """Of all sequences of LENGTH tokens after one prompt, and the accepted drafts a step."""
    prompt = [1, 2, 3, 0, 1, 1]
    engine = Engine(policy, max_requests=500, max_tokens=16, idle_sessions=0, speculate=speculate)
    ids = [
        engine.submit(Request(f"s{i}", prompt, SamplingParams(seed=1000 + i, max_tokens=LENGTH)))
        for i in range(SAMPLES)
    ]
    powers = VOCAB ** np.arange(LENGTH - 1, -1, -1)
    drawn = [int(end.turn.token_ids @ powers) for end in collect(engine, ids)]
    every = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    texts = torch.cat([torch.tensor(prompt).expand(len(every), -1), every], dim=1)
    with torch.no_grad():
        bounds = torch.arange(len(texts) + 1) * texts.shape[1]
        logits = policy.logits(policy(PackedTokens(texts.flatten(), bounds)).hidden).double()
    logprobs = logits.log_softmax(-1).view(*texts.shape, VOCAB)[:, len(prompt) - 1 : -1]
    expected = logprobs.gather(-1, every[:, :, None]).sum((1, 2)).exp().numpy() * SAMPLES
    counts = np.bincount(drawn, minlength=len(every))
    likely = expected > 1
    rest = [counts[~likely].sum(), expected[~likely].sum()]
    statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    statistic += (rest[0] - rest[1]) ** 2 / max(rest[1], 1e-9)
    counters = engine.speculator.counters
    return float(statistic), counters.accepted / counters.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculate", [Speculation(length=3), Speculation(), Speculation(rule="coupled", length=3)], ids=str
)
def test_sequences_have_the_distribution_of_the_policy(small, speculate):
    statistic, accepted = chi_square(small, speculate)
    assert statistic < LIMIT
    assert accepted > 0.1 or speculate.length is None


@pytest.mark.slow
def test_a_broken_acceptance_is_noticed(small, monkeypatch):
    class Generous(Attempt):
        def _reject(self, target, index, drafts, lengths, draws):
            return super()._reject(target, index, drafts, lengths, draws / np.exp(0.7))

    monkeypatch.setattr(speculative, "Attempt", Generous)
    statistic, _ = chi_square(small, Speculation(length=3))
    assert statistic > 2 * LIMIT


def test_costs_are_measured_in_the_mode_that_serves(monkeypatch):
    seen = []
    monkeypatch.setattr("model.engine.verification._draft", lambda *_: seen.append(is_exact()))
    policy = Policy(NANO_DRAFT)
    Engine(policy, max_requests=2, max_tokens=64, exact=True, speculate=Speculation())
    assert seen and all(seen) and not is_exact()
