"""Runs that do not learn, with a real policy and trainer: the alarms say so and say why."""

import pytest
import torch

from envs.sort import sort
from envs.types import (
    FinishReason,
    Group,
    Message,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from model.chat import nano_chat
from model.config import PolicyConfig
from model.policy import PackedTokens, Policy
from rl.algorithms import AlgorithmConfig
from rl.rollout.buffer import Batch
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer, SFTConfig, SFTTrainer
from rl.watch.alarms import Alarms
from rl.watch.metrics import batch_metrics

CHAT = nano_chat()
PROMPT, ANSWER = [4, 10, 11, 20], [30, 31, 2]


@pytest.fixture
def policy():
    made = Policy(PolicyConfig.preset("pico"))
    made.reset_parameters(0)
    return made


def sample_group(policy, prompt, judge, *, number, version, length, size=8):
    """Samples completions of `length` tokens and judges them."""
    generator = torch.Generator().manual_seed(number)
    rows, logprobs = [list(prompt) for _ in range(size)], [[] for _ in range(size)]
    policy.fake_quant = True
    for _ in range(length):
        ids, width = torch.tensor(rows).flatten(), len(rows[0])
        with torch.no_grad():
            hidden = policy(PackedTokens(ids, torch.arange(size + 1) * width)).hidden
            found = policy.logits(hidden.view(size, width, -1)[:, -1]).log_softmax(-1)
        drawn = torch.multinomial(found.exp(), 1, generator=generator)[:, 0].tolist()
        for row, column, token, values in zip(rows, logprobs, drawn, found, strict=True):
            row.append(token)
            column.append(values[token].item())
    trajectories = []
    for index, (row, column) in enumerate(zip(rows, logprobs, strict=True)):
        completion = row[len(prompt) :]
        turn = Turn(
            prompt_ids=tuple(prompt),
            completion_ids=tuple(completion),
            logprobs=tuple(column),
            policy_versions=(version,) * length,
            finish=FinishReason.STOP,
            message=Message(Role.ASSISTANT, ""),
        )
        key = TrajectoryKey("task", 50, "plain", number, index)
        score = Score(judge(completion))
        trajectories.append(Trajectory(key, ((turn,),), Status.FINISHED, StopReason.ANSWER, score))
    return Group(number, Task("task", (Message(Role.USER, "?"),)), 50, "plain", tuple(trajectories))


def train(trainer, draw, steps):
    """Takes steps on groups that `draw` samples; what the alarms say, and the mean rewards."""
    alarms, told, rewards = Alarms(), [], []
    for step in range(steps):
        groups = tuple(draw(number=2 * step + i, version=trainer.version) for i in range(2))
        tokens = sum(t.sampled_tokens for group in groups for t in group.trajectories)
        batch = Batch(groups, trainer.version, 0, tokens, 0)
        metrics = trainer.step(groups) | batch_metrics(batch)
        rewards.append(metrics["rollout/all/reward.mean"])
        told += alarms.check(metrics)
    return alarms, told, rewards


def test_too_little_imitation_is_told_as_groups_without_a_right_answer(policy):
    """A policy that was hardly warmed up never sorts a word: nothing is learned, which is no good news."""
    task = next(iter(sort().tasks("train", 0)))
    prompt = CHAT.render_prompt([{"role": "user", "content": task.prompt[0].content}], effort=50)

    def judge(completion):
        return float(CHAT.parse(completion).message.get("content") == task.gold)

    trainer = RLTrainer(policy, RLConfig(), AlgorithmConfig())
    before = policy.embed.weight.detach().clone()
    alarms, told, rewards = train(
        trainer, lambda **where: sample_group(policy, prompt, judge, length=6, **where), 5
    )
    assert not any(rewards) and list(alarms.active) == ["all_wrong"]
    assert "warm up longer" in told[0] and torch.equal(policy.embed.weight, before)


@pytest.mark.slow
def test_a_rate_far_too_high_without_warm_up_is_told_as_a_collapse(policy, make_sample):
    demonstration = make_sample(PROMPT + ANSWER, [0] * 4 + [1] * 3)
    teacher = SFTTrainer(policy, SFTConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0)))
    for _ in range(25):
        teacher.step([demonstration])

    def judge(completion):
        return float(completion == ANSWER)

    def draw(**where):
        return sample_group(policy, PROMPT, judge, length=3, size=4, **where)

    wild = OptimizerConfig(learning_rate=0.3, warmup_steps=0, weight_decay=0.5)
    # An entropy bonus: at a reward of 1 the advantages are zero, and only it would move the weights.
    trainer = RLTrainer(policy, RLConfig(optimizer=wild), AlgorithmConfig(entropy_coef=0.1))
    alarms, told, rewards = train(trainer, draw, 10)
    assert rewards[0] > 0.3 and not any(rewards[-4:])
    assert any(text.startswith("warning") for text in told)
    assert {"collapse", "all_wrong"} & set(alarms.active)


def test_a_reward_that_falls_to_zero_and_stays_is_a_collapse():
    """As sorting at a rate of 3e-4 without warm-up: from .25 to 0 within ten steps."""
    alarms = Alarms()
    told = []
    for reward in [0.25, 0.26, 0.24, 0.25, 0.27, 0.2, 0.15, 0.1, 0.05, 0.02, 0, 0, 0, 0]:
        told += alarms.check({"rollout/all/reward.mean": reward})
    assert [text for text in told if text.startswith("warning collapse: the reward fell from 0.25")] == told
    assert len(told) == 1
    again = [text for _ in range(3) for text in alarms.check({"rollout/all/reward.mean": 0.25})]
    assert again == ["warning collapse: over"]


def test_a_noisy_or_a_low_reward_is_no_collapse():
    for rewards in ([0.3, 0.1, 0.4, 0.1, 0.2] * 5, [0.0] * 20, [-0.1, -0.2] * 9):
        alarms = Alarms()
        assert not [text for r in rewards for text in alarms.check({"rollout/all/reward.mean": r})]
