"""The engine on the real policy: its log-probabilities are those of a forward over the whole sequence."""

import numpy as np
import pytest
import torch

from model.batch import floors_from_starts
from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.errors import NonFiniteLogitsError
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import PackedTokens, Policy


@pytest.fixture
def policy():
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(3)
    with torch.no_grad():
        policy.head.weight *= 8  # a distribution that is neither flat nor a point  # pyright: ignore
    return policy


def requests(count, *, turns=1, **options):
    rng = np.random.default_rng(count)
    result = []
    for i in range(count):
        prompt = rng.integers(0, 64, int(rng.integers(1, 30))).tolist()
        sampling = SamplingParams(**({"max_tokens": 24, "stop_ids": frozenset({3}), "seed": i} | options))
        result.append(Request(f"s{i}", prompt, sampling))
    return result


def run(engine, batch):
    ids = [engine.submit(request) for request in batch]
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished for finished in engine.step().finished}
    return [ended[i].turn for i in ids]


def forward_logprobs(policy, request, turn, earlier=()):
    """Log-probabilities [n] of a turn's tokens from one training forward over the whole sequence.

    Its windows start where the turn, and the `earlier` ones, say.
    """
    ids = torch.tensor([*request.token_ids, *turn.token_ids.tolist()])
    with torch.no_grad():
        floors = floors_from_starts(len(ids), [*earlier, *turn.replay_starts])
        hidden = policy(PackedTokens(ids, torch.tensor([0, len(ids)]), window_floors=floors)).hidden
        logprobs = torch.log_softmax(policy.logits(hidden), dim=-1)
    start = len(request.token_ids)
    return logprobs[torch.arange(start - 1, len(ids) - 1), ids[start:]].numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuous_batching_equals_one_by_one(policy, temperature):
    batch = requests(10, temperature=temperature, max_tokens=12)
    together = run(Engine(policy, max_requests=4, max_tokens=64, prefill_tokens=24), batch)
    alone = [run(Engine(policy, max_requests=1, max_tokens=64), [request])[0] for request in batch]
    for one, other in zip(together, alone, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_without_quantisation_the_trainer_agrees_to_1e_4(policy):
    batch = requests(24)
    turns = run(Engine(policy, max_requests=24, max_tokens=64), batch)
    for request, turn in zip(batch, turns, strict=True):
        np.testing.assert_allclose(turn.logprobs, forward_logprobs(policy, request, turn), atol=1e-4)


def test_with_quantisation_the_trainer_agrees_but_for_rare_flips(policy):
    policy.fake_quant = True
    batch = requests(64, stop_ids=frozenset())
    turns = run(Engine(policy, max_requests=64, max_tokens=64), batch)
    pairs = zip(batch, turns, strict=True)
    gaps = np.concatenate([np.abs(turn.logprobs - forward_logprobs(policy, r, turn)) for r, turn in pairs])
    assert np.median(gaps) <= 1e-5
    assert np.mean(gaps <= 1e-3) >= 0.98
    assert gaps.mean() <= 1e-3


def test_turns_of_a_session_agree_with_one_forward(policy):
    engine = Engine(policy, max_requests=4, max_tokens=64)
    rng = np.random.default_rng(0)
    histories = {request.session: list(request.token_ids) for request in requests(4)}
    for turn_number in range(3):
        batch = [Request(s, h, SamplingParams(max_tokens=6, seed=turn_number)) for s, h in histories.items()]
        for request, turn in zip(batch, run(engine, batch), strict=True):
            np.testing.assert_allclose(turn.logprobs, forward_logprobs(policy, request, turn), atol=1e-4)
            extra = rng.integers(0, 64, int(rng.integers(1, 6))).tolist()
            histories[request.session] = [*request.token_ids, *turn.token_ids.tolist(), *extra]
    assert engine.counters.prefilled_tokens < sum(map(len, histories.values()))


@pytest.mark.parametrize("caches", ["keep", "recompute"])
def test_a_swap_to_equal_weights_changes_nothing(policy, caches):
    batch = requests(8, max_tokens=20)
    expected = run(Engine(policy, max_requests=8, max_tokens=64), batch)
    engine = Engine(policy, max_requests=8, max_tokens=64)
    ids = [engine.submit(request) for request in batch]
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    ended = {}
    for version in range(1, 100):
        ended |= {finished.request_id: finished.turn for finished in engine.step().finished}
        engine.load_state(state, version, caches=caches)
        if not engine.has_work:
            break
    for request_id, turn in zip(ids, expected, strict=True):
        assert ended[request_id].token_ids.tolist() == turn.token_ids.tolist()
        np.testing.assert_allclose(ended[request_id].logprobs, turn.logprobs, atol=1e-5)


def test_recomputed_caches_are_those_of_the_new_weights(policy):
    other = Policy(PolicyConfig.preset("nano"))
    other.reset_parameters(9)
    batch = requests(6, max_tokens=16, stop_ids=frozenset())
    engine = Engine(policy, max_requests=6, max_tokens=64)
    ids = [engine.submit(request) for request in batch]
    for _ in range(8):
        engine.step()
    engine.load_state(other.state_dict(), 1, caches="recompute")
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished.turn for finished in engine.step().finished}
    for request, request_id in zip(batch, ids, strict=True):
        turn = ended[request_id]
        new = turn.versions == 1
        assert 0 < new.sum() < len(new)
        np.testing.assert_allclose(turn.logprobs[new], forward_logprobs(other, request, turn)[new], atol=1e-4)


def test_samples_that_fork_a_prompt_equal_those_that_compute_it(policy):
    prompt = list(range(20))
    batch = [Request(f"s{i}", prompt, SamplingParams(max_tokens=16, seed=i)) for i in range(8)]
    engine = Engine(policy, max_requests=8, max_tokens=64)
    for request, turn in zip(batch, run(engine, batch), strict=True):
        np.testing.assert_allclose(turn.logprobs, forward_logprobs(policy, request, turn), atol=1e-4)
    assert engine.scheduler.forks == 7


def test_weights_with_nan_fail_the_requests_and_good_weights_serve_again(policy):
    good = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    bad = {name: torch.full_like(tensor, torch.nan) for name, tensor in good.items()}
    engine = Engine(policy, max_requests=4, max_tokens=64)
    batch = requests(4)
    expected = run(engine, batch)
    engine.load_state(bad, 1)
    for request in batch:
        engine.submit(request)
    finished = engine.step().finished
    assert len(finished) == 4
    assert all(isinstance(turn.error, NonFiniteLogitsError) for turn in finished)
    engine.load_state(good, 2)
    for turn, other in zip(run(engine, batch), expected, strict=True):
        assert turn.token_ids.tolist() == other.token_ids.tolist()


def test_one_row_of_nan_fails_those_that_read_it_and_the_others_go_on(policy):
    policy.embed.weight.data[5] = torch.nan
    engine = Engine(policy, max_requests=4, max_tokens=64)
    sampling = SamplingParams(max_tokens=6, stop_ids=frozenset())
    clean = [Request(f"s{i}", [i + 6] * 5, sampling) for i in range(3)]
    poisoned = Request("poisoned", [9, 5, 9], sampling)
    ids = [engine.submit(request) for request in (*clean, poisoned)]
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished for finished in engine.step().finished}
    assert isinstance(ended[ids[3]].error, NonFiniteLogitsError)
    for request, request_id in zip(clean, ids, strict=False):
        turn = ended[request_id].turn
        if 5 in turn.token_ids.tolist():
            continue  # it sampled the poison itself
        np.testing.assert_allclose(turn.logprobs, forward_logprobs(policy, request, turn), atol=1e-4)


def test_unknown_options_are_refused(policy):
    with pytest.raises(TypeError, match="cash"):
        Engine(policy, max_requests=1, max_tokens=8, cash=1)  # pyright: ignore
    with pytest.raises(ValueError, match="unknown cache storage"):
        Engine(policy, max_requests=1, max_tokens=8, storage="paper")  # pyright: ignore
    with pytest.raises(ValueError, match="belong to packed storage"):
        Engine(policy, max_requests=1, max_tokens=8, storage="dense", pages=4)
    with pytest.raises(ValueError, match="needs fake_quant"):
        Engine(policy, max_requests=1, max_tokens=8, storage="packed")
