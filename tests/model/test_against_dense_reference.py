"""Forward and every gradient against a slow implementation that shares no layer code."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from model.policy import PackedTokens

_spec = importlib.util.spec_from_file_location(
    "dense_reference", Path(__file__).with_name("dense_reference.py")
)
dense_reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(dense_reference)

LENGTHS = [1, 2, 27, 34]


def _losses(policy):
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randint(0, 64, (length,), generator=generator) for length in LENGTHS]
    tokens = PackedTokens(torch.cat(parts), torch.tensor([0, *LENGTHS]).cumsum(0))
    targets = torch.randint(0, 64, (sum(LENGTHS),), generator=generator)
    reference = dense_reference.DenseReference(policy)
    packed = policy.logits(policy(tokens).hidden)
    single = torch.cat([reference.logits(part) for part in parts])
    return packed, single, targets


def _gradients(policy, logits, targets):
    loss = F.cross_entropy(logits, targets)
    grads = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
    return [grad if grad is None else grad.to_dense() for grad in grads]


@pytest.mark.parametrize("name", ["nano", "three_sources"])
@pytest.mark.parametrize("fake_quant", [False, True])
@pytest.mark.parametrize("dense_limit", [1024, 0])
def test_logits_and_gradients(request, name, fake_quant, dense_limit):
    policy = request.getfixturevalue(name)
    policy.fake_quant, policy.dense_limit = fake_quant, dense_limit
    packed, single, targets = _losses(policy)
    close = (packed - single).abs().amax(-1)
    assert close.quantile(0.95) <= (1e-2 if fake_quant else 1e-4)
    if fake_quant and close.max() > 1e-4:
        return  # a rounding flip: gradients then belong to different functions
    names = [name for name, _ in policy.named_parameters()]
    grads, wanted = _gradients(policy, packed, targets), _gradients(policy, single, targets)
    for parameter, ours, theirs in zip(names, grads, wanted, strict=True):
        if theirs is None:
            assert ours is None or not ours.any(), parameter
            continue
        # Typical gradients are 1e-3 to 1e-2; those of hyper-connection scales are near rounding noise.
        assert (ours - theirs).abs().max() <= 2e-3 * theirs.abs().max() + 1e-6, parameter


def test_gradients_repeat_exactly(nano):
    def gradients():
        packed, _, targets = _losses(nano)
        return _gradients(nano, packed, targets)

    for first, second in zip(gradients(), gradients(), strict=True):
        assert first is second is None or torch.equal(first, second)
