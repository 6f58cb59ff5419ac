"""The critic: values of a process whose values are known, and a policy that learns by them."""

import numpy as np
import pytest
import torch

from rl.algorithms import AlgorithmConfig
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer
from rl.trainers.base import TrainerStateError
from rl.trainers.critic import Critic, CriticConfig, Estimates, estimate
from rl.trainers.packing import micro_batches
from rl.trainers.ranks import Ranks

STATES = 5
TRUE = np.arange(1, STATES + 1) / (STATES + 1)
"""A random walk that ends left of the first state (reward 0) or right of the last (reward 1): P(right)."""


def walk(rng):
    """The states visited from the middle on, and the reward."""
    state, visited = STATES // 2, []
    while 0 <= state < STATES:
        visited.append(state)
        state += int(rng.choice((-1, 1)))
    return visited, float(state == STATES)


def as_sample(make_sample, visited, reward):
    """A token is sampled in each state; after every third one a tool answers with a token of its own.

    What is known before a token, its state, stands in the hidden row before it.
    """
    ids, mask, hidden = [0], [0], []
    for number, state in enumerate(visited):
        ids.append(state + 1)
        mask.append(1)
        hidden.append(torch.eye(STATES)[state])
        if number % 3 == 2 and number + 1 < len(visited):
            ids.append(9)
            mask.append(0)
            hidden.append(torch.zeros(STATES))
    hidden.append(torch.zeros(STATES))
    return make_sample(ids, mask, advantages=[reward * m for m in mask]), torch.stack(hidden)


def test_it_finds_the_values_of_a_random_walk(make_sample):
    rng = np.random.default_rng(0)
    critic = Critic(STATES, CriticConfig(width=0, learning_rate=0.05, max_grad_norm=100.0))
    mask = torch.tensor([False] + [True] * STATES)
    rows_of_states = torch.cat([torch.eye(STATES), torch.zeros(1, STATES)])
    found = []
    for _ in range(60):
        made = [as_sample(make_sample, *walk(rng)) for _ in range(16)]
        samples, hidden = [m[0] for m in made], [m[1] for m in made]
        with torch.no_grad():
            values = [critic.values(h, torch.from_numpy(s.loss_mask)).numpy() for s, h in made]
        _, estimates = estimate(samples, values, gamma=1.0, lam=0.9, whiten=False)
        count = sum(s.trained_tokens for s in samples)
        for batch in micro_batches(samples, 256, torch.device("cpu")):
            rows = torch.cat([hidden[i] for i in batch.indices])
            critic.accumulate(rows, batch, [estimates[i] for i in batch.indices], count)
        critic.update(count)
        found.append(critic.values(rows_of_states, mask)[1:].detach().numpy())
    np.testing.assert_allclose(np.mean(found[30:], axis=0), TRUE, atol=0.08)


def test_advantages_under_the_true_values_say_what_a_step_gained(make_sample):
    sample, hidden = as_sample(make_sample, [2, 3, 4, 4], 1.0)
    mask = sample.loss_mask
    states = sample.token_ids - 1
    values = np.where(mask, TRUE[np.clip(states, 0, STATES - 1)], 0.0)
    (made,), (estimated,) = estimate([sample], [values], gamma=1.0, lam=0.0, whiten=False)
    np.testing.assert_allclose(made.advantages[mask], [1 / 6, 1 / 6, 0, 1 / 6], atol=1e-6)
    assert not made.advantages[~mask].any() and not estimated.returns[~mask].any()
    assert hidden.shape[0] == len(sample)


def test_whitened_advantages_have_mean_0_and_variance_1(make_sample):
    rng = np.random.default_rng(1)
    samples = [as_sample(make_sample, *walk(rng))[0] for _ in range(8)]
    made, _ = estimate(samples, [np.zeros(len(s)) for s in samples], gamma=0.9, lam=0.9, whiten=True)
    every = np.concatenate([s.advantages[s.loss_mask] for s in made])
    assert every.mean() == pytest.approx(0, abs=1e-5) and every.std() == pytest.approx(1, abs=1e-4)


def test_clipping_stops_values_that_moved_far_enough(make_sample):
    sample = make_sample([1, 2, 3], [0, 1, 1])
    (batch,) = micro_batches([sample], 8, torch.device("cpu"))
    gradients = []
    for before in (0.0, -1.0):
        critic = Critic(4, CriticConfig(width=0, clip=0.2))
        estimates = [Estimates(np.full(3, before, np.float32), np.full(3, 5.0, np.float32))]
        critic.accumulate(torch.randn(3, 4), batch, estimates, 2)
        gradients.append(critic.head[-1].bias.grad.abs().item())
    # From -1 to 0 a value has moved beyond the clip towards its target: the worse of both losses is constant.
    assert gradients[0] > 0 and gradients[1] == 0


@pytest.fixture
def sampled(make_turn, make_trajectory, make_group):
    def make(trainer, reward, number):
        turn = make_turn([4, 10, 11, 20], [30, 31, 2], trainer.version, [-4.0] * 3)
        trajectory = make_trajectory([[turn]], reward, group=number)
        return make_group([trajectory], number)

    return make


def ppo(make_policy, **settings):
    config = RLConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0), **settings)
    algorithm = AlgorithmConfig(advantage="gae", corrections=(), group_size=1, gae_whiten=False)
    return RLTrainer(make_policy(), config, algorithm)


def test_a_step_teaches_policy_and_critic_and_resumes(make_policy, sampled):
    trainer = ppo(make_policy)
    first = trainer.step([sampled(trainer, 1.0, 0)])
    assert first["train/value.returns"] == pytest.approx(1.0)
    assert first["train/value.loss"] == pytest.approx(0.5)
    resumed = ppo(make_policy)
    resumed.policy.load_state_dict(trainer.policy.state_dict())
    resumed.load_state_dict(trainer.state_dict())
    groups = [sampled(trainer, 1.0, 1)]
    second = trainer.step(groups)
    assert second == resumed.step(groups)
    assert second["train/value.loss"] < first["train/value.loss"]


def test_a_reward_of_zero_teaches_the_critic_too(make_policy, sampled):
    trainer = ppo(make_policy)
    metrics = trainer.step([sampled(trainer, 0.0, 0)])
    assert metrics["train/updates"] == 1 and metrics["train/groups.dropped.zero_advantage"] == 0


def test_a_critic_without_use_is_refused(make_policy):
    with pytest.raises(ValueError, match=r"trainer\.critic has no effect"):
        RLTrainer(make_policy(), RLConfig(critic=CriticConfig(width=8)), AlgorithmConfig())
    plain = RLTrainer(make_policy(), RLConfig(), AlgorithmConfig())
    with pytest.raises(TrainerStateError, match="needs one"):
        ppo(make_policy).load_state_dict(plain.state_dict())


def test_the_critic_is_the_same_on_every_rank():
    first, second = (Critic(4, CriticConfig(), ranks=Ranks()) for _ in range(2))
    for a, b in zip(first.head.parameters(), second.head.parameters(), strict=True):
        assert torch.equal(a, b)
