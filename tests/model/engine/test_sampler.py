import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.engine.sampler import SamplingColumns, SamplingParams, sample, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0, -2.0, 0.5, -30.0])


def columns(count, **params):
    result = SamplingColumns.empty(count)
    for row in range(count):
        result.set(row, SamplingParams(**({"seed": row} | params)))
    return result


def draw(logits, count, **params):
    return sample(logits.repeat(count, 1), columns(count, **params), np.arange(count))


def truncated(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The definition, one id at a time."""
    p = torch.softmax(logits.double() / temperature, 0).numpy()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = order[: top_k or len(order)]
    total = sum(p[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and top_p < 1 and mass / total >= top_p:
            break
        kept.append(i)
        mass += p[i]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


def test_draws_are_uniform_and_independent_over_seeds_and_positions():
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 500)
    positions = np.tile(np.arange(500), 200)
    grid = uniforms(seeds, positions).reshape(200, 500)
    assert grid.min() >= 0 and grid.max() < 1
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    chi2 = ((counts - 1000) ** 2 / 1000).sum()
    assert 50 < chi2 < 160  # 99 degrees of freedom: 4.3 standard deviations to either side
    for a, b in [(grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:]), (grid[:-1, 1:], grid[1:, :-1])]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_draws_are_fixed_values_of_seed_and_position():
    expected = uniforms(np.array([5], np.uint64), np.array([9]))
    batch = uniforms(np.arange(64, dtype=np.uint64), np.full(64, 9))
    assert batch[5] == expected[0]
    assert uniforms(np.array([5], np.uint64), np.array([10]))[0] != expected[0]
    big = SamplingColumns.empty(1)
    big.set(0, SamplingParams(seed=-1))
    assert big.seed[0] == 2**64 - 1


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"top_k": 4, "top_p": 0.8, "temperature": 1.5},
        {"top_p": 1e-9},
        {"top_k": 100},
    ],
)
def test_frequencies_and_logprobs_follow_the_distribution(params):
    count = 20_000
    drawn = draw(LOGITS, count, **params)
    expected = truncated(LOGITS, **params)
    frequencies = np.bincount(drawn.token_ids, minlength=8) / count
    bound = 4.5 * np.sqrt(expected * (1 - expected) / count)
    assert (np.abs(frequencies - expected) <= bound + 1e-9).all()
    np.testing.assert_allclose(drawn.logprobs, np.log(expected[drawn.token_ids]), atol=1e-5)
    full = truncated(LOGITS, params.get("temperature", 1.0))
    np.testing.assert_allclose(drawn.full_logprobs, np.log(full[drawn.token_ids]), atol=1e-5)
    assert drawn.finite.all()


def test_ties_go_to_the_lower_id():
    tied = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert set(draw(tied, 500, top_k=2).token_ids.tolist()) == {1, 2}
    assert set(draw(tied, 10, temperature=0.0).token_ids.tolist()) == {1}


def test_greedy_takes_the_best_id_with_its_logprob_at_temperature_one():
    drawn = draw(LOGITS, 4, temperature=0.0, top_k=2, top_p=0.5)
    assert drawn.token_ids.tolist() == [0] * 4
    np.testing.assert_allclose(drawn.logprobs, np.log(truncated(LOGITS)[0]), atol=1e-6)
    np.testing.assert_allclose(drawn.full_logprobs, drawn.logprobs)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(2, 90))
def test_a_row_does_not_depend_on_the_batch(seed, count, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    logits = torch.randn(count, vocabulary, generator=generator) * 3
    table = SamplingColumns.empty(count)
    for row in range(count):
        temperature, top_p = rng.choice([0.0, 0.7, 1.0, 1.3]), rng.choice([0.3, 0.9, 1.0])
        params = SamplingParams(
            float(temperature), float(top_p), int(rng.integers(0, 5)), seed=int(rng.integers(2**40))
        )
        table.set(row, params)
    positions = rng.integers(0, 1000, count)
    together = sample(logits, table, positions)
    order = rng.permutation(count)
    shuffled = sample(logits[torch.from_numpy(order)], table.take(order), positions[order])
    assert (shuffled.token_ids == together.token_ids[order]).all()
    for row in range(count):
        index = np.array([row])
        alone = sample(logits[row : row + 1], table.take(index), positions[index])
        assert alone.token_ids[0] == together.token_ids[row]
        assert abs(alone.logprobs[0] - together.logprobs[row]) < 1e-5
        assert np.isfinite(together.logprobs[row])


def test_rows_that_are_not_finite_are_marked_and_leave_the_others_alone():
    logits = LOGITS.repeat(5, 1)
    logits[1, 3] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    logits[4, 0] = -torch.inf
    for params in ({}, {"top_k": 3, "top_p": 0.9}, {"temperature": 0.0}):
        drawn = sample(logits, columns(5, **params), np.arange(5))
        assert drawn.finite.tolist() == [True, False, False, False, True]
        assert ((drawn.token_ids >= 0) & (drawn.token_ids < 8)).all()
        assert drawn.token_ids[4] != 0


def test_an_id_of_probability_zero_is_never_drawn():
    logits = torch.full((4096, 16), -torch.inf)
    logits[:, 7] = 0.0
    drawn = sample(logits, columns(4096), np.arange(4096))
    assert set(drawn.token_ids.tolist()) == {7}


def test_truncated_rows_say_what_they_could_have_been():
    params = [
        {"top_k": 3},
        {},
        {"top_p": 0.7, "temperature": 1.5},
        {"temperature": 0.0, "top_k": 2},
        {"top_k": 100},
    ]
    rows = SamplingColumns.empty(len(params))
    for row, options in enumerate(params):
        rows.set(row, SamplingParams(seed=row, **options))
    drawn = sample(LOGITS.repeat(len(params), 1), rows, np.arange(len(params)))
    kept = drawn.kept.allowed(8)
    for row, options in enumerate(params):
        greedy = options.get("temperature") == 0
        expected = np.ones(8, bool) if greedy else truncated(LOGITS, **options) > 0
        assert kept[row].tolist() == expected.tolist()
    assert drawn.kept.offsets.diff().tolist() == [3, 0, int(kept[2].sum()), 0, 0]
    picked = drawn.take(np.array([False, False, True, True, False]))
    assert torch.equal(picked.kept.allowed(8), kept[2:4])
    assert picked.token_ids.tolist() == drawn.token_ids[2:4].tolist()


def test_a_row_that_is_not_truncated_has_no_mask_beside_one_that_is():
    """Also where some of its logits are -inf."""
    logits = LOGITS.repeat(2, 1)
    logits[:, 4] = -torch.inf
    rows = columns(2, top_k=3)
    rows.top_k[0] = 0
    assert sample(logits, rows, np.arange(2)).kept.offsets.diff().tolist() == [0, 3]


def test_rows_that_keep_everything_have_no_mask():
    assert draw(LOGITS, 3, temperature=0.7).kept is None
