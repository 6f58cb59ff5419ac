"""Whether the policy on kernels computes what its definition does on the same card, layer by layer.

The definition runs in float32 between roundings. Choices (experts, keys) are recorded from it and forced in
the other pass, so that a layer's error is its own and not that of another choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.model_gpu_setup import cache_of, fill
from model.batch import Trace
from model.choices import Capture, Choices, truncated_logprobs
from model.ops.dispatch import reference_only
from model.policy import PackedTokens, Policy


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative L2."""
    return ((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-20)).item()


def documents(policy: Policy, lengths: list[int], seed: int = 0) -> PackedTokens:
    """Random documents of these lengths."""
    torch.manual_seed(seed)
    ids = torch.randint(0, policy.config.vocab_size, (sum(lengths),), device="cuda")
    return PackedTokens(ids, torch.tensor([0, *lengths], device="cuda").cumsum(0))


@torch.no_grad()
def forward(policy: Policy, lengths: list[int]) -> dict[str, float]:
    """Errors of a training forward pass, by what is traced."""
    tokens, expected, got, capture = (
        documents(policy, lengths),
        Trace(),
        Trace(),
        Capture(selections_too=True),
    )
    with reference_only():
        before = policy(tokens, trace=expected, capture=capture).hidden
    forced = PackedTokens(
        tokens.token_ids, tokens.cu_seqlens, None, Choices(capture.expert_ids, capture.selections)
    )
    after = policy(forced, trace=got).hidden
    errors = {
        name: distance(value, expected.values[name])
        for name, value in got.values.items()
        if name in expected.values and not name.endswith("ids")
    }
    return {**errors, "hidden": distance(after, before)}


def gradients(policy: Policy, lengths: list[int]) -> dict[str, float]:
    """Errors of every parameter's gradient, with the definition's choices forced."""
    tokens, capture = documents(policy, lengths), Capture(selections_too=True)
    with torch.no_grad(), reference_only():
        policy(tokens, capture=capture)
    forced = PackedTokens(
        tokens.token_ids, tokens.cu_seqlens, None, Choices(capture.expert_ids, capture.selections)
    )
    found = []
    for reference in (True, False):
        policy.zero_grad(set_to_none=True)
        if reference:
            with reference_only():
                _loss(policy, forced).backward()
        else:
            _loss(policy, forced).backward()
        grads = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        found.append(grads)
    policy.zero_grad(set_to_none=True)
    return {
        name: distance(found[1][name], grad) if name in found[1] else 9.0 for name, grad in found[0].items()
    }


def _loss(policy: Policy, tokens: PackedTokens) -> Tensor:
    logits = policy.logits(policy(tokens).hidden)
    return torch.nn.functional.cross_entropy(logits[:-1], tokens.token_ids[1:])


@torch.no_grad()
def at_context(policy: Policy, tokens: int) -> dict[str, float]:
    """Errors of one decoded token behind `tokens` cached ones: by layer, and of the decode step's result."""
    cache = cache_of(policy, 1, tokens)
    slots = torch.tensor(fill(policy, cache, 1, tokens), device="cuda")
    ids, one = torch.tensor([[17]], device="cuda"), torch.ones(1, dtype=torch.int64, device="cuda")
    expected, got, capture = Trace(), Trace(), Capture(selections_too=True)
    with reference_only():
        before = policy.extend(cache, slots, ids, one, trace=expected, capture=capture)
    cache.truncate(int(slots[0]), tokens)
    choices = Choices(capture.expert_ids, capture.selections)
    after = policy.extend(cache, slots, ids, one, trace=got, choices=choices)
    policy.exact = True
    cache.truncate(int(slots[0]), tokens)
    free = policy.extend(cache, slots, ids, one, trace=Trace())
    cache.truncate(int(slots[0]), tokens)
    step = policy.extend(cache, slots, ids, one)
    policy.exact = False
    errors = {
        name: distance(value, expected.values[name])
        for name, value in got.values.items()
        if name in expected.values and not name.endswith("ids")
    }
    return {**errors, "hidden": distance(after, before), "decode step against prefill": distance(step, free)}


@torch.no_grad()
def exact(policy: Policy, documents_: int = 24, prompt: int = 900, length: int = 100) -> dict[str, float]:
    """Largest difference of log-probabilities, trainer against sampler, over ways to sample.

    Keys: all decoded side by side, others in the batch, prompt in two pieces (a tool's answer), and a
    sequence that was interrupted and prefilled again.
    """
    torch.manual_seed(1)
    total = prompt + length
    ids = torch.randint(0, policy.config.vocab_size, (documents_, total), device="cuda")
    policy.exact = True
    trained = _logprobs(
        policy,
        policy(PackedTokens(ids.flatten(), torch.arange(documents_ + 1, device="cuda") * total)).hidden,
    )
    trained = trained.view(documents_, total, -1)
    expected = trained[:, prompt - 1 : -1].gather(2, ids[:, prompt:, None])[..., 0]
    ways = {
        "side by side": (list(range(documents_)), [prompt], 0),
        "alone": ([2], [prompt], 0),
        "another batch": ([4, 1, 3], [prompt], 0),
        "in pieces": ([0, 5], [301, prompt - 301], 0),
        "after interruption": ([1, 2], [prompt], length // 2),
    }
    errors = {}
    for name, (rows, pieces, cut) in ways.items():
        sampled = _sampled(policy, ids[rows], pieces, length, cut)
        errors[name] = (sampled - expected[rows]).abs().max().item()
    policy.exact = False
    return errors


def _logprobs(policy: Policy, hidden: Tensor) -> Tensor:
    return truncated_logprobs(policy.logits(hidden), None)


def _sampled(policy: Policy, ids: Tensor, pieces: list[int], length: int, cut: int) -> Tensor:
    """[B, length] log-probabilities of the last tokens; the first `cut` of them prefilled with the prompt."""
    count, prompt = len(ids), sum(pieces)
    cache = policy.new_cache(count, ids.shape[1] + 64, storage="packed")
    slots = torch.tensor([cache.allocate() for _ in range(count)], device="cuda")
    at, found = 0, []
    for piece in pieces:
        hidden = policy.extend(cache, slots, ids[:, at : at + piece], torch.full_like(slots, piece))
        at += piece
    for step in range(length):
        logprobs = _logprobs(policy, hidden)
        found.append(logprobs.gather(1, ids[:, prompt + step, None])[:, 0])
        if cut and step + 1 == cut:
            for slot in slots.tolist():
                cache.free(slot)
            slots = torch.tensor([cache.allocate() for _ in range(count)], device="cuda")
            again = ids[:, : prompt + cut]
            hidden = policy.extend(cache, slots, again, torch.full_like(slots, again.shape[1]))
        else:
            hidden = policy.extend(cache, slots, ids[:, prompt + step, None], torch.ones_like(slots))
    return torch.stack(found, 1)
