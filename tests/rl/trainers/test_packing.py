import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.trainers.packing import micro_batches, pack


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 400))
def test_nothing_is_lost_or_doubled_and_the_budget_is_kept(lengths, budget):
    bins = pack(lengths, budget)
    assert sorted(i for group in bins for i in group) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in group) for group in bins]
    assert all(0 < load <= budget for load in loads)
    # First-fit-decreasing is within 11/9 of the fewest bins, plus one.
    assert len(bins) <= 11 / 9 * -(-sum(lengths) // budget) * 2 + 1


@given(st.lists(st.integers(1, 20), min_size=40, max_size=80))
def test_bins_are_even(lengths):
    loads = [sum(lengths[i] for i in group) for group in pack(lengths, 200)]
    assert max(loads) - min(loads) <= 20 or len(loads) == 1 or max(loads) > 180


def test_long_tailed_lengths_fill_the_budget():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 2000).astype(int) + 1, 8192).tolist()
    bins = pack(lengths, 8192)
    assert sum(lengths) / (len(bins) * 8192) >= 0.95


def test_a_sample_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="11 tokens, the micro-batch budget is 10"):
        pack([3, 11], 10)


def test_columns_stay_together(make_sample):
    samples = [make_sample(range(n, 2 * n), [0] + [1] * (n - 1), logprobs=np.arange(n)) for n in (3, 5, 2, 7)]
    for batch in micro_batches(samples, 8, torch.device("cpu")):
        bounds = batch.cu_seqlens.tolist()
        for segment, (index, start, stop) in enumerate(
            zip(batch.indices, bounds[:-1], bounds[1:], strict=True)
        ):
            assert batch.token_ids[start:stop].tolist() == samples[index].token_ids.tolist()
            assert batch.logprobs[start:stop].tolist() == samples[index].logprobs.tolist()
            assert batch.loss_mask[start:stop].tolist() == samples[index].loss_mask.tolist()
            assert set(batch.segment_ids[start:stop].tolist()) == {segment}
        assert bounds[-1] == len(batch.token_ids) <= 8
