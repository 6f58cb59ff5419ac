"""What a turn records of its choices is what a training forward chooses, token by token."""

import numpy as np
import pytest
import torch

from model.batch import floors_from_starts
from model.choices import FREE, Capture, Choices
from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import PackedTokens, Policy


@pytest.fixture
def policy():
    policy = Policy(PolicyConfig.preset("pico"))
    policy.reset_parameters(7)
    return policy


def drain(engine):
    ended, steps = {}, []
    while engine.has_work:
        steps.append(engine.step())
        ended |= {finished.request_id: finished.turn for finished in steps[-1].finished}
    return ended, steps


def forward(policy, ids, starts, choices=None):
    capture = Capture()
    tokens = PackedTokens(
        torch.tensor(ids),
        torch.tensor([0, len(ids)]),
        window_floors=floors_from_starts(len(ids), starts),
        choices=choices,
    )
    with torch.no_grad():
        hidden = policy(tokens, capture=capture).hidden
        return capture.expert_ids.numpy(), torch.log_softmax(policy.logits(hidden), -1).numpy()


def test_expert_ids_belong_to_the_inputs_of_a_turn_over_several_turns(policy):
    engine = Engine(policy, max_requests=2, max_tokens=128, capture=True, prefill_tokens=16)
    history, starts, parts, position = list(range(40)), [], [], 0
    for turn_number in range(3):
        prompt = len(history)
        request_id = engine.submit(Request("s", history, SamplingParams(max_tokens=6, seed=turn_number)))
        ended, steps = drain(engine)
        turn = ended[request_id]
        assert turn.expert_ids.start == position
        assert len(turn.expert_ids.ids) == prompt + 5 - position
        by_step = [step.expert_ids[0] for step in steps if step.token_ids.size]
        assert np.array_equal(by_step, turn.expert_ids.ids[prompt - 1 - position :])
        position = prompt + 5
        parts.append(turn.expert_ids.ids)
        starts += turn.replay_starts
        history = [*history, *turn.token_ids.tolist(), *range(turn_number)]
    recorded = np.concatenate(parts)
    chosen, _ = forward(policy, history[: len(recorded)], starts)
    decoded = recorded != FREE
    assert np.array_equal(recorded[decoded], chosen[decoded])
    decoder, layers = policy.config.decoder_start, policy.config.num_hidden_layers
    skipped = np.argwhere(~decoded.all(-1))
    assert {tuple(place) for place in skipped} == {
        (token, layer)
        for token in range(40 - policy.config.sliding_window)
        for layer in range(decoder, layers)
    }


def test_samples_of_one_prompt_all_report_its_experts(policy):
    engine = Engine(policy, max_requests=3, max_tokens=64, capture=True)
    prompt = list(range(20))
    ids = [engine.submit(Request(f"s{i}", prompt, SamplingParams(max_tokens=4, seed=i))) for i in range(3)]
    turns = drain(engine)[0]
    for request_id in ids:
        experts = turns[request_id].expert_ids
        assert experts.start == 0 and experts.ids.shape[0] == 23
        assert np.array_equal(experts.ids[:20], turns[ids[0]].expert_ids.ids[:20])


def test_forcing_what_was_recorded_gives_the_sampled_log_probabilities(policy):
    engine = Engine(policy, max_requests=2, max_tokens=64, capture=True, exact=True)
    prompt = list(range(30))
    request_id = engine.submit(Request("s", prompt, SamplingParams(max_tokens=8)))
    turn = drain(engine)[0][request_id]
    ids = [*prompt, *turn.token_ids.tolist()]
    forced = torch.full((len(ids), *turn.expert_ids.ids.shape[1:]), FREE)
    forced[: len(ids) - 1] = torch.from_numpy(turn.expert_ids.ids.astype(np.int64))
    _, logprobs = forward(policy, ids, turn.replay_starts, Choices(forced))
    own = logprobs[np.arange(29, len(ids) - 1), ids[30:]]
    assert np.array_equal(own, turn.logprobs)


def test_the_sampling_mask_and_both_log_probabilities_of_each_token(policy):
    engine = Engine(policy, max_requests=2, max_tokens=64)
    plain = engine.submit(Request("plain", [1, 2], SamplingParams(max_tokens=5)))
    cut = engine.submit(Request("cut", [1, 2, 3], SamplingParams(top_k=4, temperature=0.7, max_tokens=5)))
    turns, steps = drain(engine)
    assert turns[plain].sampling_mask is None
    assert np.array_equal(turns[plain].logprobs, turns[plain].full_logprobs)
    turn = turns[cut]
    ids = [1, 2, 3, *turn.token_ids.tolist()]
    _, logprobs = forward(policy, ids, turn.replay_starts)
    scaled = torch.log_softmax(torch.from_numpy(logprobs[2:7]) / 0.7, -1)
    best = scaled.topk(4).indices.sort().values
    assert torch.equal(turn.sampling_mask.ids.view(5, 4), best)
    tokens = torch.tensor(ids[3:])[:, None]
    np.testing.assert_allclose(turn.full_logprobs, scaled.gather(1, tokens)[:, 0], atol=1e-5)
    own = scaled.gather(1, tokens)[:, 0] - scaled.gather(1, best).logsumexp(1)
    np.testing.assert_allclose(turn.logprobs, own, atol=1e-5)
    lengths = [len(step.sampling_mask) for step in steps if step.sampling_mask is not None]
    assert lengths == [step.token_ids.size for step in steps if step.sampling_mask is not None]


def test_without_capture_no_experts_are_kept(policy):
    engine = Engine(policy, max_requests=1, max_tokens=32)
    request_id = engine.submit(Request("s", [1], SamplingParams(max_tokens=2)))
    turn = drain(engine)[0][request_id]
    assert turn.expert_ids is None
