import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms import AlgorithmConfig, AlgorithmError, LossInputs, objective
from rl.algorithms.aggregation import MODES, sequence_weights

LOSSES = [np.array([1.0, 2, 3]), np.array([4.0]), np.array([5.0, 6])]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 21 / 6),
        ("seq_mean_token_mean", (2 + 4 + 5.5) / 3),
        ("seq_mean_token_sum", 21 / 3),
        ("seq_mean_token_sum_norm", 21 / 3 / 10),
        ("prompt_mean", (10 / 4 + 5.5) / 2),
    ],
)
def test_values(mode, expected):
    length = 10 if mode.endswith("norm") else None
    weights = sequence_weights(mode, [len(x) for x in LOSSES], prompts=["p", "p", "q"], max_length=length)
    assert sum(w * x.sum() for w, x in zip(weights, LOSSES, strict=True)) == pytest.approx(expected)


def test_a_response_that_branched_is_one_response():
    weights = sequence_weights("seq_mean_token_mean", [3, 1, 2], responses=["a", "a", "b"])
    np.testing.assert_allclose(weights, [1 / 8, 1 / 8, 1 / 4])


@pytest.mark.parametrize("mode", MODES)
def test_empty_sequences_and_empty_batches_are_harmless(mode):
    length = 10 if mode.endswith("norm") else None
    assert np.isfinite(sequence_weights(mode, [0, 0], prompts=[0, 1], max_length=length)).all()
    assert len(sequence_weights(mode, [], prompts=[], max_length=length)) == 0
    with_empty = sequence_weights(mode, [3, 0, 2], prompts=[0, 1, 2], max_length=length)[[0, 2]]
    np.testing.assert_allclose(with_empty, sequence_weights(mode, [3, 2], prompts=[0, 2], max_length=length))


def test_what_is_missing_is_asked_for():
    with pytest.raises(AlgorithmError, match="needs the prompt"):
        sequence_weights("prompt_mean", [1])
    with pytest.raises(AlgorithmError, match="needs max_length"):
        sequence_weights("seq_mean_token_sum_norm", [1])
    with pytest.raises(AlgorithmError, match="unknown aggregation"):
        sequence_weights("mean", [1])
    with pytest.raises(ValueError, match="one each"):
        sequence_weights("prompt_mean", [1], prompts=[])


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.sampled_from(MODES), st.data())
def test_loss_and_gradient_do_not_depend_on_micro_batches(lengths, mode, data):
    norm = 7 if mode.endswith("norm") else None
    config = AlgorithmConfig(aggregation=mode, max_length=norm, kl="k3", kl_coef=0.1, entropy_coef=0.01)
    prompts = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    bins = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randn(6, n, generator=generator, dtype=torch.float64) for n in lengths]
    masks = [torch.rand(n, generator=generator) < 0.7 for n in lengths]
    weights = torch.from_numpy(
        sequence_weights(mode, [int(m.sum()) for m in masks], prompts=prompts, max_length=norm)
    )

    def run(parts):
        leaves = [row[0].clone().requires_grad_() for row in rows]
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            total = total + objective(config, _inputs(part, leaves, rows, masks), weights[part]).loss
        return total, torch.autograd.grad(total, leaves)

    whole, whole_grads = run([list(range(len(lengths)))])
    cut, cut_grads = run([part for b in range(4) if (part := [i for i, x in enumerate(bins) if x == b])])
    torch.testing.assert_close(cut, whole)
    for a, b in zip(cut_grads, whole_grads, strict=True):
        torch.testing.assert_close(a, b)


def _inputs(part, leaves, rows, masks):
    columns = ("sampler_logprobs", "old_logprobs", "advantages", "reference_logprobs", "entropy")
    sizes = torch.tensor([len(leaves[i]) for i in part])
    return LossInputs(
        logprobs=torch.cat([leaves[i] for i in part]),
        **{name: torch.cat([rows[i][k + 1] for i in part]) for k, name in enumerate(columns)},
        mask=torch.cat([masks[i] for i in part]),
        versions=torch.zeros(int(sizes.sum()), dtype=torch.int64),
        segment_ids=torch.repeat_interleave(torch.arange(len(part)), sizes),
        segments=len(part),
        current_version=0,
    )
