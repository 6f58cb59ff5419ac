import json

import pytest

from envs.types import (
    Boundary,
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from rewards.length import LengthPenaltyConfig
from rl.rollout.buffer import Buffer, BufferError
from rl.rollout.config import FilterConfig, RolloutConfig

TASK = Task("t", (Message(Role.USER, "1+1"),), {"sum": 2})


def trajectory(
    group: int, index: int, reward: float | None = 1.0, versions: tuple[int, ...] = (0, 0), **parts: float
) -> Trajectory:
    turn = Turn(
        (1,), (2,) * len(versions), (-0.5,) * len(versions), versions, FinishReason.STOP, Message("assistant")
    )
    score = Missing("sandbox died", Boundary.SANDBOX) if reward is None else Score(reward, parts)
    return Trajectory(
        TrajectoryKey("t", 50, "loop", group, index), ((turn,),), Status.FINISHED, StopReason.ANSWER, score
    )


def buffer(size: int = 2, groups: int = 3, **settings: object) -> Buffer:
    made = Buffer(RolloutConfig(**{"groups_per_step": 1, **settings}))  # type: ignore[arg-type]
    for group in range(groups):
        made.open(group, TASK, 50, "loop", size)
    return made


def ids(made: Buffer, version: int = 0) -> list[int] | None:
    batch = made.take(version)
    return None if batch is None else [group.id for group in batch.groups]


def test_groups_leave_in_completion_order_with_members_in_index_order() -> None:
    b = buffer(groups_per_step=2)
    b.add(trajectory(1, 1, 0.0))
    b.add(trajectory(0, 0))
    b.add(trajectory(1, 0))
    assert b.take(0) is None
    b.add(trajectory(0, 1, 0.0))
    batch = b.take(0)
    assert batch is not None
    assert [group.id for group in batch.groups] == [1, 0]
    assert [t.key.index for t in batch.groups[0].trajectories] == [0, 1]
    assert (batch.sampled_tokens, batch.masked_tokens) == (8, 0)
    assert b.take(0) is None


def test_members_without_score_stay_visible_and_too_few_scored_ones_drop_the_group() -> None:
    b = buffer(size=3)
    for group, rewards in enumerate([(1.0, None, 0.0), (1.0, None, None)]):
        for index, reward in enumerate(rewards):
            b.add(trajectory(group, index, reward))
    batch = b.take(0)
    assert batch is not None
    assert [isinstance(t.score, Missing) for t in batch.groups[0].trajectories] == [False, True, False]
    assert batch.sampled_tokens == 4
    assert [(drop.id, drop.reason) for drop in b.take_dropped()] == [(1, "too_few_valid")]
    assert b.take_dropped() == []


def test_seven_of_eight_members_failing_drops_the_group() -> None:
    b = buffer(size=8, groups=1)
    for index in range(8):
        b.add(trajectory(0, index, 1.0 if index == 3 else None))
    assert b.take(0) is None
    assert b.counts["dropped.too_few_valid"] == 1


def test_groups_without_variance_are_counted_and_dropped_only_when_asked() -> None:
    for asked in (False, True):
        b = buffer(filter=FilterConfig() if asked else None)
        for group, rewards in enumerate([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)]):
            for index, reward in enumerate(rewards):
                b.add(trajectory(group, index, reward))
        assert b.counts["zero_variance"] == 2
        assert (b.counts["all_good"], b.counts["all_bad"], b.counts["mixed"]) == (1, 1, 1)
        assert [drop.id for drop in b.take_dropped()] == ([0, 1] if asked else [])


def test_the_filter_looks_at_the_outcome_not_at_the_length_penalty() -> None:
    b = buffer(filter=FilterConfig())
    b.add(trajectory(0, 0, 0.9, outcome=1.0, length=-0.1))
    b.add(trajectory(0, 1, 0.8, outcome=1.0, length=-0.2))
    assert [drop.reason for drop in b.take_dropped()] == ["zero_variance"]


def test_the_length_penalty_is_added_once_as_a_batch_leaves() -> None:
    length = LengthPenaltyConfig(k0=0.2, max_penalty=0.1, length_scale=8, efforts=(25, 50, 75, 100))
    b = Buffer(RolloutConfig(groups_per_step=1), length=length)
    b.open(0, TASK, 50, "loop", 2)
    b.add(trajectory(0, 0, 1.0))
    b.add(trajectory(0, 1, 0.0, versions=(0,) * 8))
    back = Buffer(RolloutConfig(groups_per_step=1), length=length)
    back.load_state_dict(json.loads(json.dumps(b.state_dict())))
    batch = back.take(0)
    assert batch is not None
    first, second = (t.score for t in batch.groups[0].trajectories)
    assert isinstance(first, Score) and isinstance(second, Score)
    assert first.parts["outcome"] == 1.0
    assert first.value == pytest.approx(1.0 - 0.073576 * 2 / 8, abs=1e-6)
    assert second.value == pytest.approx(-0.073576, abs=1e-6)


def test_too_old_tokens_are_masked_and_a_group_without_fresh_ones_is_dropped() -> None:
    b = buffer(staleness=1)
    b.add(trajectory(0, 0, versions=(2, 3, 4)))
    b.add(trajectory(0, 1, 0.0, versions=(4, 4, 4)))
    b.add(trajectory(1, 0, versions=(1, 2)))
    b.add(trajectory(1, 1, 0.0, versions=(2, 2)))
    batch = b.take(4)
    assert batch is not None
    assert (batch.min_version, batch.masked_tokens, batch.sampled_tokens) == (3, 1, 6)
    assert [(drop.id, drop.reason) for drop in b.take_dropped()] == [(1, "stale")]


def test_any_too_old_token_drops_the_group_when_asked() -> None:
    b = buffer(staleness=1, stale="drop")
    b.add(trajectory(0, 0, versions=(2, 3, 4)))
    b.add(trajectory(0, 1, 0.0, versions=(4, 4, 4)))
    assert b.take(4) is None
    assert b.counts["dropped.stale"] == 1


def test_old_tokens_of_unscored_members_do_not_count() -> None:
    b = buffer(size=3, staleness=0, stale="drop")
    for index, (reward, version) in enumerate([(1.0, 5), (0.0, 5), (None, 1)]):
        b.add(trajectory(0, index, reward, versions=(version,)))
    assert ids(b, 5) == [0]


def test_unannounced_and_doubled_members_are_refused() -> None:
    b = buffer()
    b.add(trajectory(0, 0))
    for wrong in (trajectory(0, 0), trajectory(0, 2), trajectory(9, 0)):
        with pytest.raises(BufferError, match="is not expected"):
            b.add(wrong)


def test_state_comes_back_through_json() -> None:
    b = buffer(groups_per_step=1, filter=FilterConfig())
    for index, reward in enumerate([1.0, 0.0]):
        b.add(trajectory(0, index, reward))
    for index in range(2):
        b.add(trajectory(1, index))
    b.add(trajectory(2, 1, None))
    state = json.loads(json.dumps(b.state_dict()))
    back = buffer(groups=0, groups_per_step=1, filter=FilterConfig())
    back.load_state_dict(state)
    back.open(2, TASK, 50, "loop", 2)
    assert back.state_dict() == b.state_dict()
    assert ids(back) == [0]
    assert [drop.id for drop in back.take_dropped()] == [1]
    back.add(trajectory(2, 0))
    assert [drop.reason for drop in back.take_dropped()] == ["too_few_valid"]


def add(b: Buffer, group: int, *rewards: float) -> None:
    for index, reward in enumerate(rewards):
        b.add(trajectory(group, index, reward))


def test_groups_outside_the_wanted_outcomes_are_dropped_with_the_reason() -> None:
    b = buffer(groups=4, filter=FilterConfig(zero_variance=False, min_outcome=0.3, max_outcome=0.8))
    for group, rewards in enumerate([(0.0, 0.5), (1.0, 1.0), (1.0, 0.0), (0.5, 0.5)]):
        add(b, group, *rewards)
    assert [(drop.id, drop.reason) for drop in b.take_dropped()] == [(0, "outcome_low"), (1, "outcome_high")]
    assert ids(b) == [2]
    assert ids(b) == [3]


def test_a_filter_gives_up_after_its_attempts_so_that_a_step_comes() -> None:
    b = buffer(groups=8, groups_per_step=2, filter=FilterConfig(attempts=2))
    for group in range(6):
        add(b, group, 1.0, 1.0)
    assert [drop.id for drop in b.take_dropped()] == [0, 1, 2, 3]
    assert b.counts["filter_exhausted"] == 2
    back = buffer(groups=0, groups_per_step=2, filter=FilterConfig(attempts=2))
    back.load_state_dict(json.loads(json.dumps(b.state_dict())))
    assert ids(back) == [4, 5]
    add(back, 6, 0.0, 0.0)
    assert [drop.id for drop in back.take_dropped()] == [6]


def test_early_short_samples_are_held_back_until_those_that_began_with_them_have_ended() -> None:
    b = buffer(groups=5, groups_per_step=2, staleness=4, hold_back_steps=1)
    for group in (2, 3, 1):
        add(b, group, 1.0, 0.0)
    assert b.take(0) is None
    add(b, 0, 1.0, 0.0)
    assert ids(b) == [0, 1]
    assert ids(b, version=1) == [2, 3]


def test_held_back_batches_do_not_wait_for_a_group_that_was_dropped() -> None:
    b = buffer(groups=3, groups_per_step=2, staleness=4, hold_back_steps=1, filter=FilterConfig())
    add(b, 2, 1.0, 0.0)
    add(b, 0, 1.0, 1.0)
    assert b.take(0) is None
    add(b, 1, 1.0, 0.0)
    assert ids(b) == [1, 2]


def test_a_group_whose_drop_is_still_to_be_told_is_not_waited_for_after_a_resume() -> None:
    b = buffer(groups=3, groups_per_step=2, staleness=4, hold_back_steps=1, filter=FilterConfig())
    add(b, 0, 1.0, 1.0)
    back = buffer(groups=0, groups_per_step=2, staleness=4, hold_back_steps=1, filter=FilterConfig())
    back.load_state_dict(json.loads(json.dumps(b.state_dict())))
    for group in range(3):  # all that the dispatcher has open, which has not heard of the drop
        back.open(group, TASK, 50, "loop", 2)
    assert [drop.id for drop in back.take_dropped()] == [0]
    add(back, 1, 1.0, 0.0)
    add(back, 2, 1.0, 0.0)
    assert ids(back) == [1, 2]


def test_a_state_of_the_format_before_is_read() -> None:
    b = buffer()
    add(b, 0, 1.0, 0.0)
    state = {**b.state_dict(), "format": 1}
    del state["filtered"]
    back = buffer(groups=0)
    back.load_state_dict(state)
    assert ids(back) == [0]
