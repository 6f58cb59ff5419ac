import random

import pytest
import torch

from envs.types import Message, Role, Task, ToolCall
from model.chat.nano import nano_chat
from rl.trainers import OptimizerConfig, SFTConfig, SFTTrainer
from rl.trainers.base import NonFiniteLossError, TrainerStateError
from rl.trainers.data import demonstration_sample

CHAT = nano_chat()


def calc_sample(draw):
    a, b = draw.randint(11, 99), draw.randint(11, 99)
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("calculate", {"expression": f"{a}*{b}"}),))
    turns = [call, Message(Role.TOOL, str(a * b)), Message(Role.ASSISTANT, str(a * b))]
    return demonstration_sample(Task(f"{a}*{b}", (Message(Role.USER, f"{a}*{b}="),)), turns, CHAT, effort=50)


def batch_of(count, seed):
    draw = random.Random(seed)
    return [calc_sample(draw) for _ in range(count)]


def test_the_loss_falls(make_policy):
    trainer = SFTTrainer(
        make_policy(), SFTConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2))
    )
    first = trainer.step(batch_of(8, 0))
    for seed in range(1, 15):
        last = trainer.step(batch_of(8, seed))
    assert first["sft/loss"] > 3.5 and last["sft/loss"] < 2.5 and last["sft/accuracy"] > first["sft/accuracy"]
    held_out = trainer.evaluate(batch_of(8, 99))
    assert held_out["sft/eval.loss"] < 2.6


def gradients(policy, samples, budget):
    config = SFTConfig(token_budget=budget, balance_coef=0.1, optimizer=OptimizerConfig(learning_rate=0.0))
    trainer = SFTTrainer(policy, config)
    kept = {}
    trainer.optimizer.step = lambda fraction: kept.update(
        {n: p.grad.clone() for n, p in trainer.optimizer.parameters.items() if p.grad is not None}
    )
    return trainer.step(samples), kept


def test_gradients_do_not_depend_on_micro_batches(make_policy):
    samples = batch_of(6, 3)
    whole, whole_grads = gradients(make_policy(), samples, 8192)
    cut, cut_grads = gradients(make_policy(), samples, 60)
    assert cut["sft/loss"] == pytest.approx(whole["sft/loss"], rel=1e-5)
    assert whole_grads.keys() == cut_grads.keys() and len(whole_grads) > 50
    for name, grad in whole_grads.items():
        torch.testing.assert_close(cut_grads[name], grad, rtol=1e-3, atol=1e-6)


def test_learning_rate_zero_changes_nothing(make_policy):
    policy = make_policy()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    SFTTrainer(policy, SFTConfig(optimizer=OptimizerConfig(learning_rate=0.0, weight_decay=0.1))).step(
        batch_of(2, 0)
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_continues_bit_equally_after_a_restore(make_policy):
    config = SFTConfig(steps=6)
    straight = SFTTrainer(make_policy(), config)
    for seed in range(2):
        straight.step(batch_of(4, seed))
    resumed = SFTTrainer(make_policy(seed=1), config)
    resumed.policy.load_state_dict(straight.policy.state_dict())
    resumed.load_state_dict(straight.state_dict())
    for seed in range(2, 4):
        assert straight.step(batch_of(4, seed)) == resumed.step(batch_of(4, seed))
    for name, tensor in straight.policy.state_dict().items():
        assert torch.equal(tensor, resumed.policy.state_dict()[name]), name
    assert (resumed.steps, resumed.version) == (4, 4)


def test_a_state_of_another_kind_is_refused(make_policy):
    trainer = SFTTrainer(make_policy(), SFTConfig())
    with pytest.raises(TrainerStateError, match="kind 'rl'"):
        trainer.load_state_dict({**trainer.state_dict(), "kind": "rl"})


def test_nothing_to_learn_from_is_an_error(make_policy):
    with pytest.raises(ValueError, match="no sample"):
        SFTTrainer(make_policy(), SFTConfig()).step([])


def test_a_loss_that_is_not_finite_names_the_samples_and_leaves_the_weights(make_policy):
    policy = make_policy()
    with torch.no_grad():
        policy.head.weight[0, 0] = float("inf")
    before = policy.embed.weight.clone()
    with pytest.raises(NonFiniteLossError, match="demonstration of"):
        SFTTrainer(policy, SFTConfig()).step(batch_of(2, 0))
    assert torch.equal(policy.embed.weight, before)
