"""Where windows start is fixed at admission, recorded, and kept for tokens that were sampled."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.batch import floors_from_starts
from model.config import PolicyConfig
from model.engine.columns import Columns, ContextState
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import PackedTokens, Policy

WINDOW = 16
TOOL_RESULTS = (0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 200, 2, 40)


@pytest.fixture
def policy():
    config = replace(PolicyConfig.preset("pico"), sliding_window=WINDOW)
    policy = Policy(config)
    policy.reset_parameters(5)
    with torch.no_grad():
        policy.head.weight *= 8  # pyright: ignore
    return policy


def generate(engine, session, history, **options):
    completed = options.pop("completed", Columns())
    continues = options.pop("continues", False)
    sampling = SamplingParams(**({"max_tokens": 5, "stop_ids": frozenset(), "seed": 1} | options))
    request_id = engine.submit(Request(session, history, sampling, completed, continues))
    while engine.has_work:
        for finished in engine.step().finished:
            if finished.request_id == request_id:
                return finished.turn
    raise AssertionError("the turn did not end")


def play(engine, between=lambda engine, turn: None, results=TOOL_RESULTS):
    """Plays turns with tool results of these lengths; returns the tokens, and where each turn's begin."""
    rng = np.random.default_rng(1)
    history, turns = rng.integers(0, 64, 60).tolist(), []
    for number, length in enumerate(results):
        history += rng.integers(0, 64, length).tolist()
        turn = generate(engine, "s", history, continues=number > 0)
        turns.append((len(history), turn))
        history += turn.token_ids.tolist()
        between(engine, number)
    return history, turns


def forward(policy, history, turns):
    """Log-probabilities of a training forward whose windows start where the turns say."""
    ids = torch.tensor(history)
    starts = [start for _, turn in turns for start in turn.replay_starts]
    tokens = PackedTokens(
        ids, torch.tensor([0, len(ids)]), window_floors=floors_from_starts(len(ids), starts)
    )
    with torch.no_grad():
        logprobs = torch.log_softmax(policy.logits(policy(tokens).hidden), dim=-1)
    return logprobs[torch.arange(len(ids) - 1), ids[1:]].numpy()


def evict(engine, turn):
    engine.release(f"other{turn}")
    generate(engine, f"other{turn + 1}", [1, 2])


@pytest.mark.parametrize("replay", ["bounded", "exact", "off"])
@pytest.mark.parametrize("between", [lambda *_: None, evict], ids=["kept", "evicted"])
def test_eight_turns_agree_with_one_training_forward(policy, replay, between):
    engine = Engine(policy, max_requests=1, max_tokens=512, idle_sessions=0, replay=replay, prefill_tokens=48)
    history, turns = play(engine, between)
    logprobs = forward(policy, history, turns)
    for begin, turn in turns:
        np.testing.assert_allclose(turn.logprobs, logprobs[begin - 1 : begin + 4], atol=1e-4)
        assert not turn.states.any()
    if replay != "bounded":
        assert {start for _, turn in turns for start in turn.replay_starts} == {(0, 0)}


def test_starts_are_those_of_the_last_window_and_stay_while_it_holds_the_tool_result(policy):
    engine = Engine(policy, max_requests=1, max_tokens=512, replay="bounded")
    _, turns = play(engine)
    decoder = [turn.replay_starts[-1][1] for _, turn in turns]
    expected = [begin - WINDOW for begin, _ in turns]
    # The last sampled token of a turn is computed with the tool result that follows it.
    gaps = [0, *(i for i, length in enumerate(TOOL_RESULTS) if length + 1 > WINDOW)]
    for turn in range(len(turns)):
        assert decoder[turn] == expected[max(gap for gap in gaps if gap <= turn)]


@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_chunks_and_lost_caches_change_no_bit(policy, replay):
    outcomes = []
    for prefill, between in ((512, lambda *_: None), (7, lambda *_: None), (100, evict)):
        engine = Engine(
            policy,
            max_requests=1,
            max_tokens=192,
            idle_sessions=0,
            replay=replay,
            exact=True,
            prefill_tokens=prefill,
        )
        history, turns = play(engine, between, (0, 5, 20))
        outcomes.append((history, [turn.logprobs.tolist() for _, turn in turns]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_recomputed_caches_have_the_windows_they_had(policy):
    def swap(engine, turn):
        engine.load_state(policy.state_dict(), turn + 1, caches="recompute")

    engine = Engine(policy, max_requests=1, max_tokens=512, replay="bounded")
    history, turns = play(engine, swap)
    logprobs = forward(policy, history, turns)
    for begin, turn in turns:
        np.testing.assert_allclose(turn.logprobs, logprobs[begin - 1 : begin + 4], atol=1e-4)
        assert not turn.states.any()


def test_kept_caches_of_earlier_weights_flag_what_follows(policy):
    engine = Engine(policy, max_requests=2, max_tokens=128)
    history = list(range(20))
    first = generate(engine, "s", history)
    engine.load_state(policy.state_dict(), 1)
    second = generate(engine, "s", [*history, *first.token_ids.tolist(), 3], continues=True)
    fresh = generate(engine, "t", history)
    assert (first.states == ContextState.OWN).all() and (fresh.states == ContextState.OWN).all()
    assert (second.states == ContextState.MIXED).all()


def test_a_turn_taken_over_goes_on_with_the_starts_it_recorded(policy):
    engine = Engine(policy, max_requests=1, max_tokens=128, exact=True)
    history = list(range(40))
    whole = generate(engine, "s", history, max_tokens=12)
    part = Columns(
        whole.token_ids[:7], whole.logprobs[:7], whole.versions[:7], replay_starts=whole.replay_starts
    )
    for completed in (part, replace(part, replay_starts=())):  # the prompt alone says it too
        other = Engine(policy, max_requests=1, max_tokens=128, exact=True)
        turn = generate(other, "s", history, max_tokens=12, completed=completed)
        assert np.array_equal(turn.logprobs, whole.logprobs)
        assert turn.replay_starts == whole.replay_starts and not turn.states.any()


def test_a_session_whose_starts_nobody_knows_is_flagged_and_records_none(policy):
    history, turns = play(Engine(policy, max_requests=1, max_tokens=512), results=(0, 5))
    stranger = Engine(policy, max_requests=1, max_tokens=512)
    turn = generate(stranger, "s", [*history, 7], continues=True)
    assert (turn.states == ContextState.REPLAYED).all() and turn.replay_starts == ()
    later = generate(stranger, "s", [*history, 7, *turn.token_ids.tolist(), 8], continues=True)
    assert (later.states == ContextState.REPLAYED).all()
    begin = len(history) + 1
    past_a_window = [*history, 7, *turn.token_ids.tolist(), 8, *later.token_ids.tolist(), *range(30)]
    clean = generate(stranger, "s", past_a_window, continues=True)
    assert not clean.states.any() and clean.replay_starts == ((0, len(past_a_window) - WINDOW),)
    assert begin < len(past_a_window) and len(turns) == 2


def test_a_history_that_was_written_anew_is_a_prompt_like_any_other(policy):
    engine = Engine(policy, max_requests=1, max_tokens=128)
    generate(engine, "s", list(range(30)))
    turn = generate(engine, "s", list(range(40, 0, -1)), continues=True)
    assert not turn.states.any() and turn.replay_starts == ((0, 40 - WINDOW),)


def test_a_turn_aborted_while_its_prompt_is_computed_leaves_the_windows_of_the_last(policy):
    engine = Engine(policy, max_requests=1, max_tokens=256, prefill_tokens=8, exact=True)
    history = list(range(40))
    first = generate(engine, "s", history)
    history += first.token_ids.tolist()
    aborted = engine.submit(Request("s", [*history, *range(50)], SamplingParams(max_tokens=3)))
    engine.step()
    assert engine.abort(aborted) is not None
    second = generate(engine, "s", [*history, 5, 6], continues=True)
    undisturbed = Engine(policy, max_requests=1, max_tokens=256, exact=True)
    generate(undisturbed, "s", list(range(40)))
    expected = generate(undisturbed, "s", [*history, 5, 6], continues=True)
    assert np.array_equal(second.logprobs, expected.logprobs)
    assert second.replay_starts == expected.replay_starts and not second.states.any()


def test_a_policy_without_a_decoder_replays_nothing():
    config = replace(
        PolicyConfig.preset("pico"),
        compress_ratios=(0, 2, 2, 2, 2, 2),
        kv_source_layer_ids=(1, 2),
        index_source_layer_ids=(1, 2, 4),
        candidate_source_layer_id=2,
    )
    policy = Policy(config)
    assert config.decoder_start is None
    with pytest.raises(ValueError, match="use replay='off'"):
        Engine(policy, max_requests=1, max_tokens=64, replay="bounded")
    with pytest.raises(ValueError, match="bounded, exact, off"):
        Engine(policy, max_requests=1, max_tokens=64, replay="some")  # pyright: ignore
    assert Engine(policy, max_requests=1, max_tokens=64).replay == "off"
