"""What the sampler reports is what the trainer computes, to the last bit, and so is what it chose."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.choices import FREE, Capture, Choices, SamplingMask
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingColumns, SamplingParams, sample
from rl.algorithms import AlgorithmConfig
from rl.trainers import RLConfig, RLTrainer, Sample
from rl.trainers.forward import token_outputs
from rl.trainers.packing import micro_batches

PROMPTS = [[5, 9, 2], [7] * 21, [1, 2, 3, 4, 5, 6, 7], [40], [11, 12]]


@pytest.fixture
def policy(make_policy):
    policy = make_policy(3)
    policy.exact = True
    with torch.no_grad():
        policy.head.weight *= 8  # a distribution that is neither flat nor a point
    return policy


def as_sample(prompt, token_ids, logprobs, **replay):
    ids = np.array([*prompt, *token_ids], dtype=np.int32)
    mask = np.arange(len(ids)) >= len(prompt)
    columns = np.zeros(len(ids), dtype=np.float32)
    columns[mask] = logprobs
    versions = np.where(mask, 0, -1).astype(np.int32)
    return Sample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=columns,
        advantages=mask.astype(np.float32),
        policy_version=versions,
        **replay,
    )


def engine_samples(policy, **sampling):
    engine = Engine(policy, max_requests=3, max_tokens=64, prefill_tokens=16, capture=True)
    ids = [
        engine.submit(Request(f"s{i}", prompt, SamplingParams(max_tokens=20, seed=i, **sampling)))
        for i, prompt in enumerate(PROMPTS)
    ]
    ended = {}
    while engine.has_work:
        ended |= {finished.request_id: finished.turn for finished in engine.step().finished}
    return [as_recorded(prompt, ended[i]) for prompt, i in zip(PROMPTS, ids, strict=True)]


def as_recorded(prompt, turn):
    """The sample of a turn, with all that the engine recorded of it."""
    experts = torch.full((len(prompt) + len(turn.token_ids), 6, 2), FREE)
    ran = turn.expert_ids
    experts[ran.start : ran.start + len(ran.ids)] = torch.from_numpy(ran.ids.astype(np.int64))
    mask = turn.sampling_mask
    if mask is not None:
        mask = SamplingMask.join([SamplingMask.none(len(prompt)), mask])
    return as_sample(
        prompt,
        turn.token_ids,
        turn.logprobs,
        replay_starts=turn.replay_starts,
        sampling_mask=mask,
        choices=Choices(experts),
    )


@pytest.mark.parametrize(
    ("fake_quant", "temperature", "top_p"), [(False, 1.0, 1.0), (True, 1.0, 0.8), (True, 0.7, 1.0)]
)
def test_trainer_and_engine_agree_to_the_last_bit(policy, fake_quant, temperature, top_p):
    policy.fake_quant = fake_quant
    samples = engine_samples(policy, temperature=temperature, top_p=top_p)
    config = RLConfig(temperature=temperature, fake_quant=fake_quant, token_budget=64)
    trainer = RLTrainer(policy, config, AlgorithmConfig())
    assert any(sample.replay_starts != ((0, 0),) for sample in samples)
    for found, expected in zip(trainer.logprobs(samples), samples, strict=True):
        assert np.array_equal(found, expected.logprobs)
        assert np.count_nonzero(found) > 5


@pytest.mark.parametrize("limit", [64 * 5, 64 * 1000])
def test_chunks_of_the_head_keep_the_bits(policy, limit):
    policy.fake_quant = True
    samples = engine_samples(policy)
    for batch in micro_batches(samples, 1000, policy.device):
        outputs = token_outputs(policy, batch, logits_limit=limit)
        assert torch.equal(outputs.logprobs.detach(), batch.logprobs)


def test_a_turn_after_a_bounded_prefill_agrees_with_its_recorded_start(policy):
    prompt, start = list(range(3, 43)), 40 - policy.config.sliding_window
    columns = SamplingColumns.empty(1)
    columns.set(0, SamplingParams(seed=7))
    ids, logprobs, new = list(prompt), [], torch.tensor([prompt])
    with torch.no_grad():
        cache = policy.new_cache(1, 64)
        slots = torch.tensor([cache.allocate()])
        for _ in range(20):
            lengths = torch.tensor([new.shape[1]])
            hidden = policy.extend(cache, slots, new, lengths, decode_from=torch.tensor([start]))
            drawn = sample(policy.logits(hidden), columns, np.array([len(ids)]))
            logprobs.append(drawn.logprobs[0])
            ids.append(int(drawn.token_ids[0]))
            new = torch.tensor([ids[-1:]])
        floors = cache.floors(int(slots[0]))
    assert floors == (0, start)
    trainer = RLTrainer(policy, RLConfig(fake_quant=False), AlgorithmConfig())
    whole = as_sample(prompt, ids[40:], logprobs)
    bounded = as_sample(prompt, ids[40:], logprobs, replay_starts=(floors,))
    other = as_sample(PROMPTS[0], ids[40:], logprobs)
    _, found, unaware = trainer.logprobs([other, bounded, whole])
    assert np.array_equal(found, bounded.logprobs)
    assert not np.array_equal(unaware, whole.logprobs)


def decode_truncated(policy, prompt, seed, steps=16):
    """One sequence drawn under top-p and top-k, with choices and masks recorded: a sample to replay."""
    columns = SamplingColumns.empty(1)
    columns.set(0, SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=seed))
    ids, logprobs, experts, masks = list(prompt), [], [], [SamplingMask.none(len(prompt))]
    with torch.no_grad():
        cache = policy.new_cache(1, 64)
        slots, new = torch.tensor([cache.allocate()]), torch.tensor([prompt])
        for _ in range(steps):
            capture = Capture()
            hidden = policy.extend(cache, slots, new, torch.tensor([new.shape[1]]), capture=capture)
            drawn = sample(policy.logits(hidden), columns, np.array([len(ids)]))
            experts.append(capture.expert_ids)
            masks.append(drawn.kept if drawn.kept is not None else SamplingMask.none(1))
            logprobs.append(drawn.logprobs[0])
            ids.append(int(drawn.token_ids[0]))
            new = torch.tensor([ids[-1:]])
    experts.append(torch.full_like(experts[-1], FREE))  # the last token was drawn and never run
    choices = Choices(torch.cat(experts))
    mask = SamplingMask.join(masks)
    return as_sample(prompt, ids[len(prompt) :], logprobs, choices=choices, sampling_mask=mask)


@pytest.mark.parametrize("limit", [64 * 5, 64 * 1000])
def test_truncated_draws_agree_too_and_choices_are_taken(policy, limit):
    samples = [decode_truncated(policy, prompt, seed) for seed, prompt in enumerate(PROMPTS)]
    free = [replace(sample, choices=None) for sample in engine_samples(policy)[:2]]
    (batch,) = micro_batches([*samples, *free], 1000, policy.device)
    outputs = token_outputs(policy, batch, temperature=0.7, logits_limit=limit)
    recorded = sum(len(sample) for sample in samples)
    assert torch.equal(outputs.logprobs[:recorded].detach(), batch.logprobs[:recorded])
    assert (batch.choices.expert_ids[recorded:] == FREE).all()
    with torch.no_grad():
        for block in policy.blocks:
            block.ffn.gate.bias += torch.randn(4, generator=torch.Generator().manual_seed(1))
    forced = token_outputs(policy, batch, temperature=0.7, logits_limit=limit)
    assert torch.equal(forced.logprobs[:recorded].detach(), batch.logprobs[:recorded])
    assert not torch.equal(forced.logprobs[recorded:], outputs.logprobs[recorded:])
    forced.logprobs.sum().backward()
    assert all(block.ffn.gate.weight.grad.abs().sum() > 0 for block in policy.blocks)
