import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.rollout.config import FilterConfig, RolloutConfig, RolloutConfigError
from rl.rollout.dispatch import (
    Dispatcher,
    DispatchError,
    Ending,
    GroupPlan,
    SampleId,
    staleness_capacity,
)


def dispatcher(size: int = 4, environment: str = "calc", **settings_: object) -> Dispatcher:
    config = RolloutConfig(**{"max_in_flight": 12, "groups_per_step": 100, "staleness": 0, **settings_})  # type: ignore[arg-type]
    return Dispatcher(config, lambda _: GroupPlan(size, environment))


def groups(samples: list[SampleId]) -> list[int]:
    return sorted({sample.group for sample in samples})


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"version": 0, "staleness": 2, "batch": 4, "accepted": 0, "running": 0}, 12),
        ({"version": 5, "staleness": 2, "batch": 4, "accepted": 0, "running": 0}, 32),
        ({"version": 5, "staleness": 2, "batch": 4, "accepted": 0, "running": 3, "max_in_flight": 5}, 2),
        (
            {"version": 0, "staleness": 10, "batch": 32, "accepted": 0, "running": 0, "max_in_flight": 100},
            100,
        ),
        ({"version": 0, "staleness": 0, "batch": 4, "accepted": 3, "running": 3}, -2),
    ],
)
def test_capacity_follows_the_staleness_rule(known: dict[str, int], expected: int) -> None:
    assert staleness_capacity(**known) == expected


def test_rejected_groups_free_capacity() -> None:
    d = dispatcher(groups_per_step=2, min_valid=1, size=1)
    assert groups(d.start()) == [0, 1]
    d.finish(SampleId(0, 0))
    assert d.start() == []
    d.drop(0, "zero_variance")
    assert d.start() == [SampleId(2, 0)]


def test_fourth_finished_sample_starts_a_prompt_although_no_group_is_complete() -> None:
    d = dispatcher(size=4)
    assert groups(d.start()) == [0, 1, 2]
    assert d.counter == 0
    for sample in (SampleId(0, 0), SampleId(1, 0), SampleId(2, 0)):
        d.finish(sample)
        assert d.start() == []
    d.finish(SampleId(2, 3))
    assert d.start() == [SampleId(3, i) for i in range(4)]
    assert d.counter == 0
    assert d.in_flight == 12


def test_counter_waits_for_the_size_of_the_next_prompt() -> None:
    config = RolloutConfig(max_in_flight=6, groups_per_step=100)
    d = Dispatcher(config, lambda group: GroupPlan(2 if group == 0 else 4, "calc"))
    assert len(d.start()) == 6
    d.finish(SampleId(0, 0))
    d.finish(SampleId(0, 1))
    assert d.start() == []
    d.finish(SampleId(1, 0))
    d.finish(SampleId(1, 1))
    assert groups(d.start()) == [2]


def test_staleness_zero_is_synchronous() -> None:
    d = dispatcher(size=2, max_in_flight=100, groups_per_step=3)
    first = d.start()
    assert groups(first) == [0, 1, 2]
    for sample in first:
        d.finish(sample)
        assert d.start() == []
    d.trained([0, 1, 2])
    assert d.start() == []
    d.advance(1)
    assert groups(d.start()) == [3, 4, 5]


def test_failed_sample_is_retried_within_its_budget_and_then_counted() -> None:
    d = dispatcher(size=2, max_in_flight=2, retries=1)
    d.start()
    assert d.finish(SampleId(0, 0), "sandbox:Died") is Ending.RETRY
    assert d.start() == [SampleId(0, 0, 1)]
    assert d.finish(SampleId(0, 0, 1), "sandbox:Died") is Ending.FINAL
    assert d.finish(SampleId(0, 1)) is Ending.FINAL
    d.drop(0, "too_few_valid")
    account = d.account()
    assert (account.failed, account.filtered) == ({"sandbox:Died": 1}, {"too_few_valid": 1})
    assert account.balanced


def test_a_sample_is_counted_once_however_often_it_is_reported() -> None:
    d = dispatcher(size=2, max_in_flight=2)
    d.start()
    assert d.finish(SampleId(0, 0)) is Ending.FINAL
    assert d.finish(SampleId(0, 0)) is Ending.DUPLICATE
    assert d.finish(SampleId(9, 0)) is Ending.DUPLICATE
    assert (d.counter, d.duplicates) == (1, 2)


def test_a_group_with_running_members_can_not_be_closed() -> None:
    d = dispatcher(size=2, max_in_flight=2)
    d.start()
    with pytest.raises(DispatchError, match="still has running members"):
        d.trained([0])
    with pytest.raises(DispatchError, match="group 7 is not open"):
        d.drop(7, "stale")


def test_circuit_breaker_rests_an_environment_that_only_fails_then_probes_it() -> None:
    d = dispatcher(size=2, max_in_flight=4, retries=9, breaker_failures=3, breaker_rest_s=10.0)
    started = d.start()
    for sample in started:
        d.finish(sample, "sandbox:Down", now=1.0)
    assert d.open_environments() == ["calc"]
    assert d.start(now=5.0) == []
    probe = d.start(now=11.0)
    assert len(probe) == 1
    d.finish(probe[0], "sandbox:Down", now=12.0)
    assert d.start(now=20.0) == []
    (probe,) = d.start(now=22.0)
    d.finish(probe, now=23.0)
    assert d.open_environments() == []
    assert len(d.start(now=23.0)) == 3


def test_a_resting_environment_does_not_hold_up_the_others() -> None:
    config = RolloutConfig(max_in_flight=4, groups_per_step=8, retries=0, breaker_failures=1)
    d = Dispatcher(config, lambda group: GroupPlan(2, "bad" if group % 2 else "good"))
    d.start()
    d.finish(SampleId(1, 0), "sandbox:Down")
    d.finish(SampleId(1, 1), "sandbox:Down")
    assert groups(d.start(now=1.0)) == [2]
    d.finish(SampleId(0, 0))
    d.finish(SampleId(0, 1))
    assert groups(d.start(now=1.0)) == [4]
    for sample in (SampleId(2, 0), SampleId(2, 1)):
        d.finish(sample)
    assert groups(d.start(now=100.0)) == [3]


def test_a_group_that_never_fits_is_refused_with_the_change_to_make() -> None:
    with pytest.raises(RolloutConfigError, match=r"rollout\.max_in_flight to at least 16"):
        dispatcher(size=16).start()
    with pytest.raises(RolloutConfigError, match=r"rollout\.staleness=-1: set it to 0 or more"):
        RolloutConfig(staleness=-1)


def test_resume_hands_out_what_ran_and_repeats_the_order() -> None:
    d = dispatcher(size=2, max_in_flight=4)
    d.start()
    d.finish(SampleId(0, 1))
    state = json.loads(json.dumps(d.state_dict()))
    resumed = dispatcher(size=2, max_in_flight=4)
    resumed.load_state_dict(state)
    assert resumed.start() == [SampleId(0, 0), SampleId(1, 0), SampleId(1, 1)]
    resumed.finish(SampleId(1, 0))
    assert groups(resumed.start()) == [2]


def test_reconcile_continues_what_the_log_knows_beyond_the_checkpoint() -> None:
    d = dispatcher(size=2, max_in_flight=4, min_valid=1)
    d.start()
    d.finish(SampleId(0, 0))
    d.finish(SampleId(0, 1))
    d.trained([0])
    state = d.state_dict()
    resumed = dispatcher(size=2, max_in_flight=6)
    resumed.load_state_dict(state)
    logged = [SampleId(0, 0), SampleId(1, 0), SampleId(1, 1, 0), SampleId(1, 1, 1), SampleId(3, 0)]
    assert resumed.reconcile(logged) == [SampleId(0, 0), SampleId(1, 1, 0)]
    assert resumed.start() == [SampleId(2, 0), SampleId(2, 1), SampleId(3, 1)]
    assert resumed.finish(SampleId(1, 1, 1)) is Ending.FINAL
    assert resumed.account().balanced
    assert resumed.cursor == 4


def _play(d: Dispatcher, rng: random.Random, steps: int, bound: int, batch: int) -> list[int]:
    """Random finishes, failures, drops, training and restarts; returns the order in which groups started."""
    running: list[SampleId] = []
    members: dict[int, set[int]] = {}
    complete: list[int] = []
    order: list[int] = []
    for _ in range(steps):
        for sample in d.start():
            running.append(sample)
            if sample.group not in members:
                members[sample.group] = set()
                order.append(sample.group)
        assert d.counter >= 0
        assert d.counter + d.in_flight == d._config.max_in_flight
        assert d.trained_groups + len(members) <= (d.version + bound + 1) * batch
        assert d.account().balanced
        if running:
            sample = running.pop(rng.randrange(len(running)))
            ending = d.finish(sample, "engine:Lost" if rng.random() < 0.2 else "")
            if ending is Ending.FINAL:
                members[sample.group].add(sample.index)
                if len(members[sample.group]) == d._plan(sample.group).size:
                    complete.append(sample.group)
        if complete and rng.random() < 0.2:
            group = complete.pop(0)
            del members[group]
            d.drop(group, "zero_variance")
        if len(complete) >= batch:
            for group in complete[:batch]:
                del members[group]
            d.trained(complete[:batch])
            del complete[:batch]
            d.advance(d.version + 1)
    return order


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 4), st.integers(1, 5), st.integers(5, 20))
def test_bound_accounts_and_counter_hold_under_any_history(
    seed: int, bound: int, batch: int, size: int, in_flight: int
) -> None:
    config = RolloutConfig(
        max_in_flight=in_flight, staleness=bound, groups_per_step=batch, min_valid=1, retries=1
    )
    plan = lambda group: GroupPlan(1 + (group * 7 + size) % 5, "calc")  # noqa: E731
    order = _play(Dispatcher(config, plan), random.Random(seed), 200, bound, batch)
    assert order == sorted(order) == list(range(len(order)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_no_sample_is_lost_or_doubled_over_restarts(seed: int, cut: int) -> None:
    rng = random.Random(seed)
    make = lambda: dispatcher(size=3, max_in_flight=9, groups_per_step=3, staleness=1)  # noqa: E731
    d = make()
    started: dict[SampleId, str] = {}
    for _ in range(4):
        for _ in range(cut):
            for sample in d.start():
                started.setdefault(sample, "running")
            running = [s for s, state in started.items() if state == "running"]
            if running:
                chosen = rng.choice(running)
                started[chosen] = "ended"
                assert d.finish(chosen) is Ending.FINAL
        state = json.loads(json.dumps(d.state_dict()))
        d = make()
        d.load_state_dict(state)
        logged = [s for s, state in started.items() if state == "running" and rng.random() < 0.5]
        assert d.reconcile(logged) == []
        again = d.start()
        running = {s for s, state in started.items() if state == "running"}
        assert running - set(logged) <= set(again)
        assert not set(again) & set(logged)
        for sample in again:
            started.setdefault(sample, "running")
        assert d.account().balanced
        assert d.in_flight == sum(state == "running" for state in started.values())


def mixed(caps: dict[str, int], **settings_: object) -> Dispatcher:
    config = RolloutConfig(**{"max_in_flight": 12, "groups_per_step": 4, "staleness": 9, **settings_})  # type: ignore[arg-type]
    return Dispatcher(config, lambda group: GroupPlan(2, "slow" if group % 2 else "fast"), caps)


def test_a_cap_bounds_one_environment_and_the_others_go_on_in_its_place() -> None:
    d = mixed({"slow": 2})
    assert groups(d.start()) == [0, 1, 2, 4, 6, 8]
    assert (d.running_in("slow"), d.running_in("fast")) == (2, 10)
    d.finish(SampleId(1, 0))
    d.finish(SampleId(1, 1))
    assert groups(d.start()) == [3]


def test_a_full_environment_holds_up_the_others_before_the_shares_are_lost() -> None:
    d = mixed({"slow": 2}, max_in_flight=100, groups_per_step=2)
    assert groups(d.start()) == [0, 1, 2, 4]
    d.finish(SampleId(0, 0))
    d.finish(SampleId(0, 1))
    assert d.start() == []
    d.finish(SampleId(1, 0))
    d.finish(SampleId(1, 1))
    assert groups(d.start()) == [3, 6]


def test_a_cap_that_no_group_fits_under_is_refused() -> None:
    with pytest.raises(
        RolloutConfigError, match=r"env\.mixture\.slow\.max_in_flight=1; set it to at least 2"
    ):
        mixed({"slow": 1}).start()


def test_a_resumed_run_keeps_the_caps() -> None:
    d = mixed({"slow": 2})
    d.start()
    resumed = mixed({"slow": 2})
    resumed.load_state_dict(json.loads(json.dumps(d.state_dict())))
    resumed.reconcile([SampleId(3, 0), SampleId(5, 1)])
    resumed.start()
    assert resumed.running_in("slow") == 2


def test_a_breaker_says_when_it_opens_is_probed_and_closes() -> None:
    d = dispatcher(size=2, max_in_flight=4, retries=9, breaker_failures=3, breaker_rest_s=10.0)
    for sample in d.start():
        d.finish(sample, "sandbox.Died", now=1.0)
    (opened,) = d.take_news()
    assert "calc failed 3 times in a row, last with sandbox.Died" in opened
    (probe,) = d.start(now=12.0)
    assert ["one sample probes it" in text for text in d.take_news()] == [True]
    d.finish(probe, now=13.0)
    assert ["works again" in text for text in d.take_news()] == [True]
    assert d.take_news() == []


def test_an_environment_that_rested_is_probed_by_one_sample_of_a_new_group() -> None:
    d = dispatcher(size=3, max_in_flight=3, retries=0, breaker_failures=3, breaker_rest_s=10.0)
    for sample in d.start():
        d.finish(sample, "sandbox.Died")
    d.drop(0, "too_few_valid")
    (probe,) = d.start(now=10.0)
    assert probe == SampleId(1, 0)
    d.finish(probe, now=11.0)
    assert d.start(now=11.0) == [SampleId(1, 1), SampleId(1, 2)]


def test_over_sampling_begins_more_groups_than_the_bound_and_never_accumulates() -> None:
    d = dispatcher(size=1, groups_per_step=4, min_valid=1, filter=FilterConfig(oversample=1.5))
    assert groups(d.start()) == list(range(6))
    for group in range(6):
        d.finish(SampleId(group, 0))
    d.drop(0, "zero_variance")
    assert groups(d.start()) == [6]
    d.trained([1, 2, 3, 4])
    d.advance(1)
    assert groups(d.start()) == [7, 8, 9, 10]
