"""From the engine through the records of turns to the trainer: who acted is who learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from envs.types import FinishReason, Message, Replay, Role, Turn
from model.choices import FREE, Capture
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import PackedTokens
from rl.algorithms import AlgorithmConfig
from rl.engines.turns import completion
from rl.rollout.history import Draft
from rl.rollout.recorded import pack
from rl.trainers import RLConfig, RLTrainer, trajectory_samples
from rl.trainers.choices import branch_choices, branch_mask

PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 5, 6, 7], [40]]


@pytest.fixture
def policy(make_policy):
    policy = make_policy(3)
    policy.exact = policy.fake_quant = True
    with torch.no_grad():
        policy.head.weight *= 8  # a distribution that is neither flat nor a point
    return policy


def as_turn(prompt, finished) -> Turn:
    return Draft(tuple(prompt), completion(finished), Message(Role.ASSISTANT), parse_error="").turn()


def two_turns(policy, engine, **sampling):
    """Branches of two turns each, as an engine samples and records them."""
    branches = {f"s{i}": [] for i in range(len(PROMPTS))}
    histories = {f"s{i}": [] for i in range(len(PROMPTS))}
    for turn in range(2):
        prompts = {name: (PROMPTS[int(name[1])] if turn == 0 else [3, 8]) for name in branches}
        for i, name in enumerate(branches):
            histories[name] += prompts[name]
            params = SamplingParams(max_tokens=9, seed=i, **sampling)
            engine.submit(Request(name, list(histories[name]), params, continues=turn > 0))
        while engine.has_work:
            for finished in engine.step().finished:
                branches[finished.session].append(as_turn(prompts[finished.session], finished))
                histories[finished.session] += finished.turn.token_ids.tolist()
    return list(branches.values())


@pytest.mark.parametrize("sampling", [{"top_k": 5}, {"top_p": 0.9, "top_k": 20}])
def test_truncated_turns_are_recomputed_to_the_last_bit(policy, make_trajectory, sampling) -> None:
    engine = Engine(policy, max_requests=4, max_tokens=64, prefill_tokens=16, capture=True)
    branches = two_turns(policy, engine, **sampling)
    samples = [s for branch in branches for s in trajectory_samples(make_trajectory([branch]), 1.0)]
    trainer = RLTrainer(policy, RLConfig(token_budget=64), AlgorithmConfig())
    for found, sample in zip(trainer.logprobs(samples), samples, strict=True):
        assert np.array_equal(found, sample.logprobs)
        mask = sample.sampling_mask
        assert mask is not None and (mask.offsets.diff()[sample.loss_mask] > 0).any()
        assert not mask.offsets.diff()[~sample.loss_mask].any()
    unaware = [trajectory_samples(make_trajectory([without(b, "kept_counts")]), 1.0)[0] for b in branches]
    assert not np.array_equal(trainer.logprobs(unaware)[0], samples[0].logprobs)


def without(branch, name):
    return [replace(turn, replay=replace(turn.replay, **{name: None})) for turn in branch]


def test_selections_are_recorded_and_repeated(policy, make_trajectory) -> None:
    engine = Engine(
        policy, max_requests=4, max_tokens=64, replay="off", capture=True, capture_selections=True
    )
    for branch in two_turns(policy, engine):
        (sample,) = trajectory_samples(make_trajectory([branch]), 1.0)
        assert sample.choices is not None and sample.choices.selections is not None
        free = free_choices(policy, sample)
        assert sample.choices.selections.keys() == free.selections.keys()
        for layer, keys in sample.choices.selections.items():
            ran = (keys != FREE).any(-1)
            assert ran.any() and torch.equal(keys[ran], free.selections[layer][ran])
        (fewer,) = trajectory_samples(make_trajectory([branch]), 1.0, replay="experts")
        assert fewer.choices is not None and fewer.choices.selections is None


def test_a_truncated_batch_trains_on_the_truncated_distribution(policy, make_trajectory, make_group) -> None:
    engine = Engine(policy, max_requests=4, max_tokens=64, capture=True)
    branches = two_turns(policy, engine, top_p=0.8)
    group = make_group([make_trajectory([b], float(i % 2), index=i) for i, b in enumerate(branches)])
    trainer = RLTrainer(policy, RLConfig(token_budget=256), AlgorithmConfig())
    metrics = trainer.step([group])
    assert metrics["train/kl.mismatch.max"] == 0.0
    assert metrics["train/updates"] == 1 and metrics["train/grad_norm"] > 0


def turn_of_two_versions(policy, caches) -> Turn:
    """A turn in whose middle the routers change; caches of the first weights are kept or computed anew."""
    engine = Engine(policy, max_requests=1, max_tokens=64, capture=True)
    engine.submit(Request("s", PROMPTS[2], SamplingParams(max_tokens=16, seed=1)))
    for _ in range(8):
        engine.step()
    engine.load_state(moved(policy.state_dict()), 1, caches=caches)
    ended = []
    while engine.has_work:
        ended += engine.step().finished
    return as_turn(PROMPTS[2], ended[0])


def test_a_turn_of_two_versions_keeps_the_routing_of_each(policy, make_trajectory) -> None:
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    turn = turn_of_two_versions(policy, "keep")
    assert set(turn.policy_versions) == {0, 1}
    (sample,) = trajectory_samples(make_trajectory([[turn]]), 1.0)
    assert sample.choices is not None and sample.choices.expert_ids is not None
    ids, switch = sample.choices.expert_ids, len(PROMPTS[2]) + turn.policy_versions.index(1) - 1
    new = free_choices(policy, sample).expert_ids
    policy.load_state_dict(before)
    old = free_choices(policy, sample).expert_ids
    assert torch.equal(ids[:switch], old[:switch]) and not torch.equal(ids[:switch], new[:switch])
    assert torch.equal(ids[switch:-1, 0], new[switch:-1, 0])  # the first layer's input is the same
    assert not torch.equal(ids[switch:-1], old[switch:-1])
    assert (ids[-1] == FREE).all() and (ids[:-1] != FREE).all()


def test_recomputed_caches_are_exact_when_the_trainer_chooses_for_itself(policy, make_trajectory) -> None:
    trajectory = make_trajectory([[turn_of_two_versions(policy, "recompute")]])
    trainer, equal = RLTrainer(policy, RLConfig(token_budget=64), AlgorithmConfig()), {}
    for replayed in ("off", "experts"):
        (sample,) = trajectory_samples(trajectory, 1.0, replay=replayed)
        assert sample.states is not None and (sample.states[sample.policy_version == 1] == 0).all()
        new = sample.policy_version == 1
        equal[replayed] = np.array_equal(trainer.logprobs([sample])[0][new], sample.logprobs[new])
    assert equal == {"off": True, "experts": False}


def moved(state):
    """The weights with other routers."""
    draw = torch.Generator().manual_seed(1)
    return {
        name: tensor + (torch.randn(tensor.shape, generator=draw) if name.endswith("gate.bias") else 0)
        for name, tensor in state.items()
    }


def free_choices(policy, sample) -> Capture:
    """What the present weights choose by themselves over a sample's tokens."""
    capture = Capture(selections_too=True)
    tokens = torch.from_numpy(sample.token_ids.astype(np.int64))
    with torch.no_grad():
        policy(PackedTokens(tokens, torch.tensor([0, len(tokens)])), capture=capture)
    return capture


def recorded(start, rows, sampled=2, selections=None, kept=None) -> Turn:
    experts = None if rows is None else pack(np.reshape(rows, (-1, 1, 2)), "i2")
    keys = {layer: pack(np.array(value), "i4") for layer, value in (selections or {}).items()}
    counts = ids = None
    if kept is not None:
        counts = pack(np.array([len(row) for row in kept]), "u4")
        ids = pack(np.array([number for row in kept for number in row]), "i4")
    replay = Replay(start, experts, keys, counts, ids)
    return Turn((1, 2), (3,) * sampled, (-1.0,) * sampled, (0,) * sampled, FinishReason.STOP,
                Message(Role.ASSISTANT), replay=replay)  # fmt: skip


def test_the_first_record_of_a_token_counts_and_gaps_stay_free() -> None:
    branch = [recorded(1, [[1, 2], [3, 4]]), recorded(0, [[9, 9]] * 7)]
    choices = branch_choices(branch, "experts")
    assert choices is not None and choices.expert_ids is not None
    assert choices.expert_ids[:, 0].tolist() == [[9, 9], [1, 2], [3, 4], *[[9, 9]] * 4, [FREE, FREE]]
    assert branch_choices(branch, "off") is None


def test_selections_of_different_widths_are_joined_and_left_out_when_not_wanted() -> None:
    branch = [recorded(0, None, selections={3: [[0, FREE]]}), recorded(4, None, selections={3: [[1, 2, 3]]})]
    choices = branch_choices(branch, "selections")
    assert choices is not None and choices.selections is not None
    assert choices.selections[3].tolist() == [
        [0, FREE, FREE], *[[FREE] * 3] * 3, [1, 2, 3], *[[FREE] * 3] * 3
    ]  # fmt: skip
    assert branch_choices(branch, "experts") is None


def test_a_mask_spans_the_branch_and_must_fit_its_turn() -> None:
    mask = branch_mask([recorded(0, None), recorded(0, None, kept=[[4, 5], []])])
    assert mask is not None
    assert mask.offsets.tolist() == [0] * 7 + [2, 2] and mask.ids.tolist() == [4, 5]
    with pytest.raises(ValueError, match="2 sampled tokens records what 1"):
        branch_mask([recorded(0, None, kept=[[4]])])


def test_records_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a branch of 4 tokens"):
        branch_choices([recorded(3, [[1, 2], [3, 4]])], "experts")
