from __future__ import annotations

import math

import pytest

from rl.watch.alarms import Alarms, Level


def feed(alarms: Alarms, name: str, values: list[float], **more: float) -> list[str]:
    return [text for value in values for text in alarms.check({name: value, **more})]


@pytest.mark.parametrize(
    ("name", "metric", "bad", "good"),
    [
        ("errors", "rollout/all/error", 0.06, 0.04),
        ("truncation", "rollout/all/truncated", 0.31, 0.3),
        ("all_wrong", "rollout/all/group.all_bad", 0.9, 0.8),
        ("queue_empty", "sys/idle.trainer", 0.6, 0.5),
    ],
)
def test_a_share_must_hold_for_five_steps_and_speaks_once(name: str, metric: str, bad: float, good: float):
    alarms = Alarms()
    assert feed(alarms, metric, [bad] * 4 + [good] + [bad] * 4) == []
    (told,) = feed(alarms, metric, [bad] * 3)
    assert told.startswith(f"warning {name}: ")
    assert list(alarms.active) == [name]
    assert feed(alarms, metric, [good]) == [f"warning {name}: over"]
    assert not alarms.active


def test_all_right_is_only_a_notice():
    (told,) = feed(Alarms(), "rollout/all/group.all_good", [0.9] * 5)
    assert told.startswith("notice all_right")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_told_at_once_by_name(value: float):
    (told,) = feed(Alarms(), "train/loss", [1.0, value])
    assert "train/loss not finite" in told


def test_entropy_that_halves_within_twenty_steps():
    falling = [1.0 - 0.03 * i for i in range(20)]
    (told,) = feed(Alarms(), "train/entropy", falling)
    assert told.startswith("warning entropy: entropy fell from 1.000")
    assert feed(Alarms(), "train/entropy", [1.0 - 0.01 * i for i in range(20)]) == []
    alarms = Alarms()
    feed(alarms, "train/entropy", falling, **{"rollout/all/reward.mean": 0.95})
    assert alarms.active["entropy"].level is Level.NOTICE


def test_mismatch_by_size_and_by_rise():
    assert "differ by 0.2" in feed(Alarms(), "train/kl.mismatch", [0.2])[0]
    assert len(feed(Alarms(), "train/kl.mismatch", [0.001] * 10 + [0.006])) == 1
    assert feed(Alarms(), "train/kl.mismatch", [1e-7] * 10 + [6e-6]) == []


def test_in_exact_mode_any_difference_on_a_token_of_its_own_version_is_told():
    own = "train/kl.mismatch.own.max"
    exact = Alarms(exact=True)
    assert feed(exact, own, [0.0], **{"train/kl.mismatch.mixed.max": 0.01}) == []
    (told,) = feed(exact, own, [1e-7])
    assert told.startswith("warning inexact: exact mode is on") and "1e-07" in told
    assert feed(exact, own, [0.0]) == ["warning inexact: over"]
    assert feed(Alarms(), own, [1e-7]) == []


def test_gradient_norm_ten_times_the_usual():
    assert len(feed(Alarms(), "train/grad_norm", [1.0] * 10 + [11.0])) == 1
    assert feed(Alarms(), "train/grad_norm", [1.0] * 10 + [9.0]) == []


def test_staleness_at_its_bound_and_none_when_synchronous():
    assert len(feed(Alarms(staleness_bound=2), "train/staleness.mean", [2.0] * 5)) == 1
    assert feed(Alarms(staleness_bound=0), "train/staleness.mean", [0.0] * 9) == []


def test_an_evaluation_that_drops():
    alarms = Alarms()
    assert feed(alarms, "eval/calc/greedy/score.mean", [0.5, 0.9, 0.85]) == []
    assert "is 0.70, it was 0.90" in feed(alarms, "eval/calc/greedy/score.mean", [0.7])[0]


def test_silence_and_disk():
    alarms = Alarms()
    assert alarms.check_silence(119) == []
    assert "no progress for 130 s" in alarms.check_silence(130)[0]
    assert alarms.check_silence(1) == ["warning silence: over"]
    assert "9% free" in alarms.check_disk(0.09)[0]
