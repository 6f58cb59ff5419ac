from __future__ import annotations

from dataclasses import replace

import pytest

from rl.rollout.buffer import Batch
from rl.watch.metrics import MetricNameError, batch_metrics, split_families, summary


def test_a_batch_is_counted_over_what_has_a_score(batch: Batch):
    found = batch_metrics(batch)
    assert (found["rollout/all/n"], found["rollout/all/n_valid"]) == (5, 4)
    assert found["rollout/all/reward.mean"] == 0.75
    assert found["rollout/all/missing"] == 0.2
    assert found["rollout/all/tool_use"] == 0.5
    assert found["rollout/all/masked"] == 0.5
    assert found["rollout/all/len.sampled.mean"] == 2
    assert (found["rollout/all/group.mixed"], found["rollout/all/group.all_good"]) == (0.5, 0.5)
    assert found["rollout/all/dup_in_group"] == 0.25
    assert found["rollout/all/stop.answer"] == 1


def test_efforts_are_told_apart_when_they_differ(batch: Batch):
    assert not [name for name in batch_metrics(batch) if "effort" in name]
    low = replace(
        batch.groups[0],
        effort=1,
        trajectories=tuple(replace(t, key=replace(t.key, effort=1)) for t in batch.groups[0].trajectories),
    )
    found = batch_metrics(replace(batch, groups=(low, batch.groups[1])))
    assert (found["rollout/effort.1/reward.mean"], found["rollout/effort.50/reward.mean"]) == (0.5, 1.0)


def test_an_empty_batch_has_no_means():
    found = batch_metrics(Batch((), 0, 0, 0, 0))
    assert found["rollout/all/n"] == 0
    assert "rollout/all/reward.mean" not in found


def test_names_belong_to_families():
    assert split_families({"train/loss": 1, "eval/calc/n": 2}) == {
        "train": {"train/loss": 1.0},
        "eval": {"eval/calc/n": 2.0},
    }
    with pytest.raises(MetricNameError, match="'loss' belongs to no family"):
        split_families({"loss": 1.0})


def test_a_summary_has_the_right_values():
    found = summary("x", [1.0, 2.0, 3.0, 4.0])
    assert (found["x.mean"], found["x.min"], found["x.p50"], found["x.max"]) == (2.5, 1.0, 2.5, 4.0)
    assert found["x.std"] == pytest.approx(1.25**0.5)
    assert summary("x", []) == {}
