from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.types import Replay
from model.policy import PackedTokens
from rl.algorithms import AlgorithmConfig
from rl.algorithms.advantages import NonFiniteAdvantageError
from rl.algorithms.losses import LOSSES
from rl.rollout.recorded import pack
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer, trajectory_samples
from rl.trainers.base import NonFiniteLossError
from rl.watch.metrics import split_families

PROMPT, GOOD, BAD = [4, 10, 11, 20], [30, 31, 2], [32, 33, 2]


def fast(**settings):
    return RLConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0), **settings)


@pytest.fixture
def sampled(make_turn, make_trajectory, make_group):
    """A group of two answers with rewards, as the trainer's own policy would have sampled them."""

    def make(trainer, rewards=(1.0, 0.0), number=0, completions=(GOOD, BAD), version=None, **turn):
        version = trainer.version if version is None else version
        trajectories = []
        for index, (reward, completion) in enumerate(zip(rewards, completions, strict=True)):
            bare = make_trajectory([[make_turn(PROMPT, completion)]])
            samples = trajectory_samples(bare, 1.0)
            logprobs = trainer.logprobs(samples)[0][len(PROMPT) :].tolist() if samples else []
            turns = [make_turn(PROMPT, completion, version, turn.get("logprobs", logprobs))]
            trajectories.append(make_trajectory([turns], reward, group=number, index=index))
        return make_group(trajectories, number)

    return make


def probability(trainer, completion, make_turn, make_trajectory):
    return trainer.logprobs(trajectory_samples(make_trajectory([[make_turn(PROMPT, completion)]]), 1.0))[
        0
    ].sum()


@pytest.mark.parametrize("loss", LOSSES.names())
def test_a_step_raises_the_rewarded_answer(make_policy, sampled, make_turn, make_trajectory, loss):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig(loss=loss, group_size=2))
    before = [probability(trainer, c, make_turn, make_trajectory) for c in (GOOD, BAD)]
    metrics = trainer.step([sampled(trainer)])
    after = [probability(trainer, c, make_turn, make_trajectory) for c in (GOOD, BAD)]
    assert after[0] > before[0] and after[1] < before[1]
    assert trainer.version == trainer.steps == 1 and metrics["train/updates"] == 1
    assert metrics["train/adv.std"] == pytest.approx(0.5) and metrics["train/tokens.trained"] == 6
    assert metrics["train/grad_norm"] > 0 and metrics["train/entropy"] > 0


def test_block_scales_are_counted_every_so_many_steps(make_policy, sampled):
    counted = []
    for fake_quant in (True, False):
        trainer = RLTrainer(make_policy(), fast(scales_every=2, fake_quant=fake_quant), AlgorithmConfig())
        metrics = [trainer.step([sampled(trainer)]) for _ in range(3)]
        counted.append([any(name.startswith("quant/train/") for name in step) for step in metrics])
        split_families(metrics[0])
    assert counted == [[True, False, True], [False] * 3]


def test_counting_scales_does_not_change_what_is_learnt(make_policy, sampled):
    weights = []
    for every in (0, 1):
        trainer = RLTrainer(make_policy(), fast(scales_every=every), AlgorithmConfig())
        trainer.step([sampled(trainer)])
        weights.append({name: value.clone() for name, value in trainer.policy.state_dict().items()})
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def test_on_policy_ratios_are_one_and_mismatch_is_zero(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(fake_quant=False), AlgorithmConfig())
    metrics = trainer.step([sampled(trainer)])
    assert metrics["train/ratio.mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/kl.mismatch.max"] < 1e-5 and metrics["train/kl.mismatch.share"] == 0
    assert metrics["train/kl.mismatch.tokens"] == 6 and metrics["train/staleness.max"] == 0


def test_mismatch_is_measured_on_the_present_weights_only(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(fake_quant=False), AlgorithmConfig())
    trainer.step([sampled(trainer)])
    stale = sampled(trainer, version=0, logprobs=[-9.0] * 3)
    metrics = trainer.step([sampled(trainer, number=1), stale])
    assert metrics["train/kl.mismatch.tokens"] == 6 and metrics["train/kl.mismatch.max"] < 1e-5
    assert metrics["train/staleness.mean"] == pytest.approx(0.5) and metrics["train/staleness.max"] == 1
    assert metrics["train/ratio.max"] > 10
    only_stale = trainer.step([stale])
    assert not any(name.startswith("train/kl.mismatch") for name in only_stale)


def test_tokens_of_a_version_that_does_not_exist_are_refused(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
    with pytest.raises(ValueError, match="policy version 3, but the trainer is at version 0"):
        trainer.step([sampled(trainer, version=3)])


def test_what_cannot_teach_is_dropped_and_counted(make_policy, sampled, make_group):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
    before = trainer.policy.embed.weight.clone()
    groups = [
        sampled(trainer, (1.0, 1.0), 0),
        sampled(trainer, (None, 1.0), 1),
        sampled(trainer, (None, None), 2),
        make_group([], 3),
    ]
    metrics = trainer.step(groups)
    assert metrics["train/groups.dropped.zero_advantage"] == 1
    assert metrics["train/groups.dropped.missing"] == 2 and metrics["train/groups.dropped.empty"] == 1
    assert metrics["train/updates"] == 0 and trainer.version == trainer.steps == 1
    assert torch.equal(trainer.policy.embed.weight, before)


def step_gradients(trainer, groups):
    kept = {}
    trainer.optimizer.step = lambda fraction: kept.update(
        {n: p.grad.to_dense().clone() for n, p in trainer.optimizer.parameters.items() if p.grad is not None}
    )
    return trainer.step(groups), kept


def test_silent_groups_stay_in_the_denominator(make_policy, sampled):
    """Their forward pass is saved and nothing else changes: the same gradient over twice the tokens."""
    norms = []
    for silent in (False, True):
        trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
        groups = [sampled(trainer), *([sampled(trainer, (1.0, 1.0), 1)] if silent else [])]
        norms.append(trainer.step(groups)["train/grad_norm"])
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-5)


def test_a_missing_score_never_becomes_a_zero(make_policy, sampled):
    completions = (GOOD, BAD, [34, 35, 2])
    results = []
    for rewards, used in (((1.0, 0.0, None), completions), ((1.0, 0.0), completions[:2])):
        trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
        trainer.step([sampled(trainer, rewards, completions=used)])
        results.append(trainer.policy.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_nan_rewards_count_as_missing_and_infinite_ones_stop(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
    assert trainer.step([sampled(trainer, (float("nan"), 1.0))])["train/groups.dropped.missing"] == 1
    with pytest.raises(NonFiniteAdvantageError, match="index=1"):
        trainer.step([sampled(trainer, (1.0, float("inf")))])


def test_an_empty_completion_teaches_nothing_and_harms_nothing(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
    metrics = trainer.step([sampled(trainer, completions=(GOOD, []))])
    assert metrics["train/tokens.trained"] == 3 and np.isfinite(list(metrics.values())).all()


def test_a_sampler_logprob_that_is_not_finite_stops_and_names_the_sample(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
    before = trainer.policy.embed.weight.clone()
    with pytest.raises(NonFiniteLossError, match=r"sampler's log-probability.*group 0"):
        trainer.step([sampled(trainer, logprobs=[-1.0, float("nan"), -1.0])])
    assert torch.equal(trainer.policy.embed.weight, before)
    assert all(p.grad is None for p in trainer.policy.parameters())


@settings(max_examples=6)
@given(seed=st.integers(0, 1000), mode=st.sampled_from(["token_mean", "seq_mean_token_mean", "prompt_mean"]))
def test_gradients_do_not_depend_on_micro_batches(make_policy, sampled, seed, mode):
    rng = np.random.default_rng(seed)
    algorithm = AlgorithmConfig(aggregation=mode, entropy_coef=0.01)
    completions = [rng.integers(3, 60, size=rng.integers(1, 6)).tolist() for _ in range(3)]
    results = []
    for budget in (8192, 10):
        policy = make_policy()
        # A token's forward is then the same to the bit, also where the n-gram gate's root has no slope.
        policy.exact = True
        trainer = RLTrainer(policy, fast(token_budget=budget, balance_coef=0.01, fake_quant=False), algorithm)
        groups = [sampled(trainer, (1.0, 0.0, 0.3), number, completions) for number in range(2)]
        results.append(step_gradients(trainer, groups))
    (whole, whole_grads), (cut, cut_grads) = results
    for name in ("train/loss", "train/entropy", "train/grad_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6)
    for name, grad in whole_grads.items():
        assert (cut_grads[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


def test_changing_an_observation_that_comes_last_changes_nothing(
    make_policy, make_turn, make_trajectory, make_group
):
    """A turn aborted before its first token leaves an observation at the end of the sequence."""
    results = []
    for observation in ([40, 41], [50, 51]):
        trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig())
        trajectories = [
            make_trajectory([[make_turn(PROMPT, c), make_turn(observation, [])]], r, index=i)
            for i, (c, r) in enumerate(((GOOD, 1.0), (BAD, 0.0)))
        ]
        _, grads = step_gradients(trainer, [make_group(trajectories)])
        results.append(grads)
    assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])


def test_a_kl_term_pulls_towards_the_reference(make_policy, sampled):
    policy, reference = make_policy(), make_policy(seed=5)
    algorithm = AlgorithmConfig(kl="unbiased", kl_coef=10.0)
    trainer = RLTrainer(policy, fast(), algorithm, reference=reference)
    first = trainer.step([sampled(trainer, (1.0, 1.0))])
    for _ in range(4):
        last = trainer.step([sampled(trainer, (1.0, 1.0))])
    assert first["train/groups.dropped.zero_advantage"] == 0 and last["train/kl.ref"] < first["train/kl.ref"]
    with pytest.raises(ValueError, match="reference is missing"):
        RLTrainer(policy, fast(), algorithm)
    with pytest.raises(ValueError, match="reference is given"):
        RLTrainer(policy, fast(), AlgorithmConfig(), reference=reference)


def test_the_entropy_bonus_follows_its_target_and_its_weight_survives_a_restore(make_policy, sampled):
    algorithm = AlgorithmConfig(entropy_target=9.0, entropy_rate=0.01)  # more than any policy has
    trainer = RLTrainer(make_policy(), fast(steps=100), algorithm)
    metrics = [trainer.step([sampled(trainer, (1.0, 1.0))]) for _ in range(3)]
    weights = [m["train/entropy.coef"] for m in metrics]
    assert weights[0] == 0 < weights[1] < weights[2] < trainer.entropy_coef <= 0.05
    assert [m["train/entropy.target"] for m in metrics] == [9.0] * 3
    assert all(m["train/groups.dropped.zero_advantage"] == 0 for m in metrics), "they feel the bonus too"
    resumed = RLTrainer(make_policy(), fast(steps=100), algorithm)
    resumed.load_state_dict(trainer.state_dict())
    assert resumed.entropy_coef == trainer.entropy_coef


def test_an_entropy_bonus_spreads_what_is_sampled(make_policy, sampled):
    spread = []
    for target in (0.0, 9.0):
        settings = {"entropy_target": target, "entropy_coef": 0.05} if target else {"entropy_coef": 1e-9}
        trainer = RLTrainer(make_policy(), fast(steps=100), AlgorithmConfig(**settings))
        for _ in range(3):
            metrics = trainer.step([sampled(trainer, (1.0, 1.0))])
        spread.append(metrics["train/entropy"])
    assert spread[1] > spread[0]


def test_without_a_target_the_weight_is_the_configurations(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig(entropy_coef=0.01))
    metrics = trainer.step([sampled(trainer)])
    assert "train/entropy.coef" not in metrics and trainer.entropy_coef == 0.01
    other = RLTrainer(make_policy(), fast(), AlgorithmConfig(entropy_coef=0.02))
    other.load_state_dict(trainer.state_dict())
    assert other.entropy_coef == 0.02


def test_continues_bit_equally_after_a_restore(make_policy, sampled):
    straight = RLTrainer(make_policy(), fast(), AlgorithmConfig())
    straight.step([sampled(straight)])
    resumed = RLTrainer(make_policy(seed=1), fast(), AlgorithmConfig())
    resumed.policy.load_state_dict(straight.policy.state_dict())
    resumed.load_state_dict(straight.state_dict())
    groups = [sampled(straight, number=1)]
    assert straight.step(groups) == resumed.step(groups)
    for name, tensor in straight.policy.state_dict().items():
        assert torch.equal(tensor, resumed.policy.state_dict()[name]), name


def test_a_ratio_taken_against_the_trainer_is_one(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(), AlgorithmConfig(corrections=("token_tis",)))
    metrics = trainer.step([sampled(trainer, logprobs=[-8.0] * 3)])
    assert metrics["train/ratio.max"] == 1 and np.isfinite(metrics["train/loss"])


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="above 0"):
        RLConfig(temperature=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_logprobs_follow_the_trainers_temperature_and_rounding(
    make_policy, make_turn, make_trajectory, temperature
):
    samples = trajectory_samples(make_trajectory([[make_turn(PROMPT, GOOD)]]), 1.0)
    policy = make_policy()
    (ours,) = RLTrainer(policy, fast(temperature=temperature), AlgorithmConfig()).logprobs(samples)
    assert policy.fake_quant and not ours[: len(PROMPT)].any()
    tokens = PackedTokens(torch.tensor([*PROMPT, *GOOD]), torch.tensor([0, 7]))
    with torch.no_grad():
        expected = (policy.logits(policy(tokens).hidden) / temperature).log_softmax(-1)
    want = [expected[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(GOOD)]
    np.testing.assert_allclose(ours[len(PROMPT) :], want, atol=1e-5)


def test_a_step_tells_kept_caches_from_own_ones(make_policy, sampled):
    trainer = RLTrainer(make_policy(), fast(fake_quant=False, replay_choices="off"), AlgorithmConfig())
    group = sampled(trainer)

    def with_states(trajectory, states, off=0.0):
        (turn,) = trajectory.branches[0]
        record = Replay(states=pack(np.array(states, np.uint8), "u1"))
        logprobs = tuple(value - off for value in turn.logprobs)
        return replace(trajectory, branches=((replace(turn, replay=record, logprobs=logprobs),),))

    first, second = group.trajectories
    group = replace(group, trajectories=(with_states(first, [0, 0, 0]), with_states(second, [1, 1, 2], 0.25)))
    metrics = trainer.step([group])
    assert metrics["train/kl.mismatch.own.tokens"] == 3 and metrics["train/kl.mismatch.own"] < 1e-5
    assert metrics["train/kl.mismatch.mixed.tokens"] == 2
    assert metrics["train/kl.mismatch.mixed"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["train/kl.mismatch.replayed.tokens"] == 1
    trainer.recovered_groups = group.id + 1
    old = trainer.step([sampled(trainer)])
    assert not any(name.startswith("train/kl.mismatch.own") for name in old)
