"""The optimiser of n-gram tables: dense AdamW on what is touched, nothing on what is not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from model.policy import PackedTokens
from rl.trainers.optim import Optimizer, OptimizerConfig, OptimizerError
from rl.trainers.row_adamw import RowAdamW

ROWS, WIDTH = 12, 4


def gradients(touched, seed):
    """A gradient for each step, zero outside the touched rows: dense and sparse."""
    generator = torch.Generator().manual_seed(seed)
    for rows in touched:
        index = torch.tensor(sorted(rows), dtype=torch.int64)
        values = torch.randn(len(index), WIDTH, generator=generator)
        sparse = torch.sparse_coo_tensor(index[None], values, (ROWS, WIDTH), check_invariants=False)
        yield sparse.to_dense(), sparse


def run(touched, *, betas, weight_decay=0.0, seed=0):
    """The table after dense AdamW and after ours, with both states."""
    start = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9))
    dense, ours = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    adamw = torch.optim.AdamW([dense], lr=1e-2, betas=betas, eps=1e-8, weight_decay=weight_decay)
    rows = RowAdamW({"t": ours}, betas=betas, epsilon=1e-8, weight_decay=weight_decay)
    for full, sparse in gradients(touched, seed):
        dense.grad, ours.grad = full, sparse
        adamw.step()
        rows.step(1e-2)
    return dense.detach(), ours.detach(), adamw.state[dense], rows.states["t"], start


TOUCHED = st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=12)


@given(
    rows=st.sets(st.integers(0, ROWS - 1), min_size=1),
    steps=st.integers(1, 8),
    decay=st.sampled_from([0, 0.1]),
)
def test_rows_touched_at_every_step_are_those_of_dense_adamw(rows, steps, decay):
    dense, ours, *_, start = run([rows] * steps, betas=(0.9, 0.98), weight_decay=decay)
    index = sorted(rows)
    others = sorted(set(range(ROWS)) - rows)
    torch.testing.assert_close(ours[index], dense[index], rtol=1e-5, atol=1e-6)
    assert torch.equal(ours[others], start[others])


@given(touched=TOUCHED, seed=st.integers(0, 9))
def test_the_momenta_of_touched_rows_are_those_of_dense_adamw_after_any_pause(touched, seed):
    _, _, dense, ours, _ = run(touched, betas=(0.9, 0.98), seed=seed)
    index = sorted(touched[-1])
    torch.testing.assert_close(ours.exp_avg[index], dense["exp_avg"][index], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(ours.exp_avg_sq[index], dense["exp_avg_sq"][index], rtol=1e-4, atol=1e-9)


@given(touched=TOUCHED, seed=st.integers(0, 9))
def test_without_momentum_the_whole_table_is_that_of_dense_adamw(touched, seed):
    dense, ours, *_ = run(touched, betas=(0.0, 0.98), seed=seed)
    torch.testing.assert_close(ours, dense, rtol=1e-4, atol=1e-6)


def test_a_dense_gradient_touches_all_rows():
    tables = [nn.Parameter(torch.ones(ROWS, WIDTH)) for _ in range(2)]
    grad = torch.randn(ROWS, WIDTH)
    tables[0].grad = grad
    tables[1].grad = grad.to_sparse(1)
    for table in tables:
        RowAdamW({"t": table}, betas=(0.9, 0.98), epsilon=1e-8, weight_decay=0.0).step(0.1)
    assert torch.equal(tables[0], tables[1]) and (tables[0] != 1).all()


def loss(policy, ids):
    hidden = policy(PackedTokens(ids, torch.tensor([0, len(ids)]))).hidden
    return hidden.mul(torch.linspace(-1, 1, hidden.shape[1])).pow(3).sum()


def train(policy, optimizer, steps, begin=0):
    """Steps on two micro-batches each; returns the gradient norms."""
    norms = []
    for step in range(begin, begin + steps):
        for part in range(2):
            ids = (torch.arange(20) * (step + 2) + part) % 60
            loss(policy, ids).backward()
        norms.append(optimizer.clip())
        optimizer.step(1.0)
    return norms


CONFIG = OptimizerConfig(learning_rate=1e-3, muon_learning_rate=1e-2, max_grad_norm=0.5)
TABLE = "layers.1.engram.embed.weight"


def test_only_touched_rows_of_a_policy_move_and_no_dense_gradient_exists(make_policy):
    policy = make_policy()
    optimizer = Optimizer(policy, CONFIG)
    table = dict(policy.named_parameters())[TABLE]
    before = table.detach().clone()
    ids = torch.arange(5)
    loss(policy, ids).backward()
    assert table.grad.is_sparse
    read = set(table.grad.coalesce().indices()[0].tolist())
    norm = optimizer.clip()
    dense = [p.grad.to_dense() for p in policy.parameters() if p.grad is not None]
    assert (
        torch.cat([g.flatten() for g in dense]).norm().item() == pytest.approx(0.5, rel=1e-3) and norm > 0.5
    )
    optimizer.step(1.0)
    moved = set((table != before).any(1).nonzero()[:, 0].tolist())
    assert moved == read and 0 < len(read) < len(table)
    assert all(p.grad is None for p in policy.parameters())


def test_a_stored_state_continues_with_the_same_bits(make_policy):
    first, second = make_policy(), make_policy()
    optimizers = [Optimizer(policy, CONFIG) for policy in (first, second)]
    train(first, optimizers[0], 3)
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    assert train(first, optimizers[0], 2, 3) == train(second, optimizers[1], 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_state_without_the_tables_is_refused(make_policy):
    optimizer = Optimizer(make_policy(), CONFIG)
    state = optimizer.state_dict()
    del state["tables"]
    with pytest.raises(OptimizerError, match="n-gram table state does not fit"):
        optimizer.load_state_dict(state)


def test_a_gradient_that_is_not_finite_in_a_table_is_named(make_policy):
    policy = make_policy()
    optimizer = Optimizer(policy, CONFIG)
    table = dict(policy.named_parameters())[TABLE]
    values = torch.full((1, table.shape[1]), float("inf"))
    table.grad = torch.sparse_coo_tensor([[3]], values, table.shape, check_invariants=False)
    with pytest.raises(OptimizerError, match="engram"):
        optimizer.clip()


def test_a_frozen_table_gathers_no_gradient(make_policy):
    policy = make_policy()
    optimizer = Optimizer(policy, OptimizerConfig(learning_rate=1e-3, frozen=("engram",)))
    train(policy, optimizer, 2)
    assert dict(policy.named_parameters())[TABLE].grad is None
