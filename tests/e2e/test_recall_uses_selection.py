"""The long look-back at work: a value beyond every window is found through the learned selection."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from envs.recall import CHANCE
from envs.registry import load
from envs.types import Message, Role
from model.chat.nano import NanoChat, nano_chat
from model.config import PolicyConfig
from model.policy import Policy
from rl.trainers import Sample, SFTConfig, SFTTrainer
from rl.trainers.data import demonstration_sample
from rl.trainers.forward import token_outputs
from rl.trainers.packing import micro_batches

PAIRS, STEPS, SCHEDULE, BATCH = 12, 225, 300, 48
RECALL = load("recall", length=PAIRS, window=PolicyConfig.preset("nano").sliding_window)


def window_only(config: PolicyConfig) -> PolicyConfig:
    """The same policy without main keys: every layer sees its sliding window and nothing else."""
    return replace(
        config,
        compress_ratios=(0,) * config.num_hidden_layers,
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=-1,
    )


def lessons(chat: NanoChat, seed: int) -> Iterator[Sample]:
    """The environment's training tasks, asked for all letters one after the other, the task's own first."""
    draw = random.Random(seed)
    for task in RECALL.tasks("train", seed):
        pairs, _ = task.prompt[0].content.split("?")
        digit_of = {pairs[i]: pairs[i + 1] for i in range(0, len(pairs), 2)}
        turns = [Message(Role.ASSISTANT, task.gold or "")]
        for letter in draw.sample(sorted(digit_of), PAIRS - 1):
            turns += [Message(Role.USER, f"?{letter}"), Message(Role.ASSISTANT, digit_of[letter])]
        yield demonstration_sample(task, turns, chat)


def accuracy(policy: Policy, chat: NanoChat, count: int = 400) -> float:
    """The share of held-out tasks whose digit is the policy's most likely token."""
    tasks = islice(RECALL.tasks("eval", 0), count)
    samples = [demonstration_sample(t, [Message(Role.ASSISTANT, t.gold or "")], chat) for t in tasks]
    right = 0
    with torch.no_grad():
        for batch in micro_batches(samples, 8192, policy.device):
            digits = batch.cu_seqlens[1:] - 2  # the last token ends the turn, the digit stands before it
            right += int(token_outputs(policy, batch).correct[digits].sum())
    return right / count


def train(config: PolicyConfig, indexer_coef: float) -> float:
    chat, policy = nano_chat(), Policy(config)
    trainer = SFTTrainer(policy, SFTConfig(steps=SCHEDULE, indexer_coef=indexer_coef, indexer_over="dense"))
    stream = lessons(chat, seed=0)
    for _ in range(STEPS):
        trainer.step(list(islice(stream, BATCH)))
    return accuracy(policy, chat)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices gain little from a second thread, and lose much when others use the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.timeout(3600)
def test_selection_finds_what_the_window_cannot_hold():
    nano = PolicyConfig.preset("nano")
    selecting, windowed = train(nano, indexer_coef=1.0), train(window_only(nano), indexer_coef=0.0)
    assert selecting >= 0.9
    assert windowed <= CHANCE + 0.2
