import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms.advantages import discounted_returns, gae


def test_published_value():
    rewards, values = torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=1.0, lam=0.0)
    assert advantages.tolist() == [[1, 1, 2]] and returns.tolist() == [[2, 3, 5]]


@pytest.mark.parametrize("length", [127, 128, 129])
def test_chunked_equals_serial(length):
    generator = torch.Generator().manual_seed(length)
    rewards, values = torch.randn(2, 3, length + 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, length + 9, generator=generator) < 0.7
    mask[:, length:] = False
    for a, b in zip(
        gae(rewards, values, mask, gamma=0.99, lam=0.95),
        gae(rewards, values, mask, gamma=0.99, lam=0.95, chunk=32),
        strict=True,
    ):
        assert (a - b).abs().max() < 1e-5 and not a[:, length:].any() and not b[:, length:].any()
    serial, chunked = (discounted_returns(rewards, mask, gamma=0.99, chunk=c) for c in (0, 32))
    assert (serial - chunked).abs().max() < 1e-5


@given(st.integers(1, 40), st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1))
def test_tool_tokens_are_as_if_they_were_not_there(length, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 1, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(1, length, generator=generator) < 0.6
    rewards[~mask] = float("nan")
    values[~mask] = float("nan")
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, chunk=8)
    own = mask[0]
    short = torch.ones(1, int(own.sum()), dtype=torch.bool)
    alone, alone_returns = gae(rewards[:, own], values[:, own], short, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages[:, own], alone)
    torch.testing.assert_close(returns[:, own], alone_returns)
    assert not advantages[:, ~own].any() and not returns[:, ~own].any()
