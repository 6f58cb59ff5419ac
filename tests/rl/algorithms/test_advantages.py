"""Estimators against published values, and what holds for all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl.algorithms import AlgorithmConfig, AlgorithmError
from rl.algorithms.advantages import ADVANTAGES, NonFiniteAdvantageError, compute, hierarchical, standalone
from rl.algorithms.advantages.registry import needs_group

COMPARING = [name for name in ADVANTAGES.names() if needs_group(ADVANTAGES.load(name))]


def values(name, rewards, **kwargs):
    return compute(AlgorithmConfig(advantage=name), rewards, lengths=[3] * len(rewards), **kwargs).values


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("mean_centered", [9, 12], [-1.5, 1.5]),
        ("mean_centered", [6, 3], [1.5, -1.5]),
        ("grpo", [1, 0, 0, 1], [0.866024, -0.866024, -0.866024, 0.866024]),
        ("grpo", [1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", [3, 1], [2, -2]),
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [0, 0], [0, 0]),
        ("maxrl", [1, 1], [0, 0]),
        ("pass_at_k", [1, 0.25, 0], [0.75, 0, 0]),
        ("pass_at_k", [1, 1, 0], [0, 0, 0]),
    ],
)
def test_published_values(name, rewards, expected):
    np.testing.assert_allclose(values(name, rewards), expected, atol=1e-6)


def test_two_groups_are_centred_apart():
    config = AlgorithmConfig(advantage="mean_centered")
    result = compute(config, [6, 3, 9, 12], groups=["a", "a", "b", "b"])
    np.testing.assert_allclose(result.values, [1.5, -1.5, -1.5, 1.5])


def test_opo_weighs_the_baseline_by_length():
    result = compute(AlgorithmConfig(advantage="opo"), [1, 0], lengths=[30, 10])
    np.testing.assert_allclose(result.values, [0.25, -0.75])


def test_opo_asks_for_lengths():
    with pytest.raises(AlgorithmError, match="pass the lengths"):
        compute(AlgorithmConfig(advantage="opo"), [1, 0])


def test_pass_at_k_scaled_by_the_standard_deviation():
    config = AlgorithmConfig(advantage="pass_at_k", passk_std=True)
    np.testing.assert_allclose(compute(config, [1, 0, 0, 0]).values, [2, 0, 0, 0], atol=1e-5)


def test_hierarchical_centres_solvers_under_their_proposal():
    np.testing.assert_allclose(hierarchical([1, 1, 0], [0, 0, 0]), [1 / 3, 1 / 3, -2 / 3])
    np.testing.assert_allclose(
        hierarchical([0.5, 0.1, 1, 1, 0, 1], [-1, -1, 0, 0, 0, 1]),
        [0.2, -0.2, 1 / 3, 1 / 3, -2 / 3, 0],
        atol=1e-12,
    )


def test_reinforce_pp_whitens_over_the_tokens_of_the_batch():
    rewards, lengths = [1.0, 0.0, 0.5], [2, 5, 1]
    tokens = np.repeat(rewards, lengths)
    expected = (np.array(rewards) - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    config = AlgorithmConfig(advantage="reinforce_pp", group_size=1)
    np.testing.assert_allclose(compute(config, rewards, groups=[0, 1, 2], lengths=lengths).values, expected)


def test_reinforce_pp_baseline_subtracts_the_group_mean_first():
    rewards = [1.0, 0.0, 5.0, 4.0]
    config = AlgorithmConfig(advantage="reinforce_pp_baseline")
    result = compute(config, rewards, groups=[0, 0, 1, 1], lengths=[2, 2, 2, 2]).values
    tokens = np.repeat([0.5, -0.5, 0.5, -0.5], 2)
    np.testing.assert_allclose(result, np.array([0.5, -0.5, 0.5, -0.5]) / np.sqrt(tokens.var(ddof=1) + 1e-8))


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_teaches_nothing(name):
    result = compute(AlgorithmConfig(advantage=name), [7.0], lengths=[3])
    assert result.values.tolist() == [0.0] and result.keep.all() and not result.dropped


@pytest.mark.parametrize("name", sorted(set(COMPARING) - {"reinforce_pp_baseline"}))
@pytest.mark.parametrize("reward", [0.1, -3.7, 0.0])
def test_equal_rewards_give_exact_zeros(name, reward):
    assert not values(name, [reward] * 7).any()


def test_missing_scores_enter_no_statistic():
    for missing in (None, float("nan")):
        result = compute(AlgorithmConfig(), [1, missing, 0, 1])
        np.testing.assert_allclose(result.values, [1 / 3, 0, -2 / 3, 1 / 3])
        assert result.keep.tolist() == [True, False, True, True]


def test_a_group_with_fewer_than_two_scores_is_dropped_and_counted():
    result = compute(AlgorithmConfig(), [1, None, None, 0, 1, None], groups=[0, 0, 0, 1, 1, 2])
    assert result.keep.tolist() == [False, False, False, True, True, False]
    assert result.dropped == {"missing": 2}


def test_an_infinite_reward_stops_and_names_the_sample():
    with pytest.raises(NonFiniteAdvantageError, match=r"reward of bad \(inf\)"):
        compute(AlgorithmConfig(), [1, float("inf")], ids=["good", "bad"])


@standalone
def broken(rewards):
    return np.where(rewards > 0, np.nan, rewards)


def mean_only(rewards):
    return rewards.mean()


def over_the_batch(rewards, groups):
    return rewards[:1]


@pytest.mark.parametrize("name", ["mean_only", "over_the_batch"])
def test_what_a_users_own_estimator_returns_is_not_broadcast(name):
    config = AlgorithmConfig(advantage=f"{__name__}:{name}")
    with pytest.raises(AlgorithmError, match="for 2 rewards; it returns one number for each"):
        compute(config, [0, 1])


def test_a_nan_advantage_stops_and_names_the_samples():
    config = AlgorithmConfig(advantage=f"{__name__}:broken")
    with pytest.raises(NonFiniteAdvantageError, match="advantage of second"):
        compute(config, [0, 1], ids=["first", "second"])


rewards_and_groups = st.lists(
    st.tuples(st.one_of(st.none(), st.floats(-10, 10)), st.integers(0, 4), st.integers(1, 50)),
    min_size=1,
    max_size=30,
)


@given(rewards_and_groups, st.sampled_from(ADVANTAGES.names()), st.randoms())
def test_order_and_missing_members_do_not_matter(batch, name, random):
    config = AlgorithmConfig(advantage=name)

    def run(rows):
        rewards, groups, lengths = zip(*rows, strict=True)
        return compute(config, rewards, groups=groups, lengths=lengths)

    result, order = run(batch), list(range(len(batch)))
    assert np.isfinite(result.values).all() and not result.values[~result.keep].any()
    random.shuffle(order)
    shuffled = run([batch[i] for i in order])
    if name != "pass_at_k":
        np.testing.assert_allclose(shuffled.values, result.values[order], rtol=1e-6, atol=1e-6)
    kept = [row for row, keep in zip(batch, result.keep, strict=True) if keep]
    if kept and not any(row[0] is None for row in batch):
        np.testing.assert_allclose(run(kept).values, result.values[result.keep], rtol=1e-6, atol=1e-6)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_centred_estimators_sum_to_zero(rewards):
    for name in ("mean_centered", "grpo", "rloo"):
        assert abs(values(name, rewards).sum()) < 1e-6 * len(rewards) * 1e3
