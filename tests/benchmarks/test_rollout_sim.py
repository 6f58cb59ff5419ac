import json
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rollout_sim import million
from benchmarks.rollout_sim.__main__ import main
from benchmarks.rollout_sim.costs import Costs, InputError, load_costs
from benchmarks.rollout_sim.engine import Fleet, Sample
from benchmarks.rollout_sim.report import judge
from benchmarks.rollout_sim.schedulers import RULES
from benchmarks.rollout_sim.simulate import Simulation
from benchmarks.rollout_sim.stats import histogram, ks_distance
from benchmarks.rollout_sim.trace import AgentTrace, FileTrace, LongTailTrace, load_trace

SMALL = Costs(replicas=2, slots=8, groups_per_step=4, group_size=4, in_flight=24, staleness=8, trainer_s=20.0)


def simulate(rule, costs=SMALL, *, trace=None, steps=12, warm_up=4):
    simulation = Simulation(
        costs, trace or LongTailTrace(0), RULES[rule](costs), steps=steps, warm_up=warm_up
    )
    return simulation, simulation.run()


def write(path, value):
    path.write_text(json.dumps(value))
    return path


def test_a_run_repeats_exactly():
    assert simulate("ours")[1] == simulate("ours")[1]


def test_a_lone_request_takes_prefill_decode_and_tool_time(tmp_path):
    sample = {"input": [1000, 500], "output": [100, 50], "tool_s": [7.0]}
    trace = FileTrace(load_trace(write(tmp_path / "t.json", {"format": 1, "samples": [sample]})), 0)
    costs = Costs(
        replicas=1,
        slots=1,
        groups_per_step=1,
        group_size=1,
        in_flight=1,
        decode_base_s=0.02,
        decode_per_request_s=0.01,
        prefill_tokens_per_s=1000,
        trainer_s=10.0,
        sandbox_failure=0.0,
        sandbox_create_s=0.4,
        update_pause_s=0.0,
    )
    _, result = simulate("barrier", costs, trace=trace, steps=1, warm_up=0)
    assert result.total_s == pytest.approx(0.4 + 1.0 + 100 * 0.03 + 7.0 + 0.5 + 50 * 0.03 + 10.0)
    assert (result.samples, result.tokens, result.cached_tokens) == (1, 150, 1100)


def test_an_update_splits_a_turn_at_a_whole_token_and_loses_none():
    fleet, work = Fleet(Costs(replicas=1, update_pause_s=0.0)), LongTailTrace(0).work(0, 0)
    sample = Sample("key", 0, 0, work)
    fleet.request(sample, 0.0)
    fleet.update(1, fleet.replicas[0].next_end / 2)
    replica = fleet.next_end()
    assert fleet.ended(replica, replica.next_end) == [sample]
    assert list(sample.versions) == [0, 1]
    assert sum(sample.tokens) == work.outputs[0]


def test_an_evicted_cache_is_computed_again(tmp_path):
    turns = {"input": [1000] * 4, "output": [100] * 4, "tool_s": [5.0] * 3}
    trace = FileTrace(load_trace(write(tmp_path / "t.json", {"format": 1, "samples": [turns]})), 0)
    hits = [
        simulate(
            "barrier", Costs(kv_tokens=kv, replicas=1, slots=2, in_flight=8), trace=trace, steps=1, warm_up=0
        )[1]
        for kv in (10_000_000, 6_000)
    ]
    assert hits[0].computed_tokens == 4_000 * 256
    assert hits[1].computed_tokens > hits[0].computed_tokens
    assert hits[1].tokens == hits[0].tokens


@pytest.mark.parametrize("in_flight", [24, 8])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_keeps_the_staleness_bound_and_the_limit_on_live_samples(rule, in_flight):
    costs = replace(SMALL, in_flight=in_flight, staleness=2)
    simulation, result = simulate(rule, costs)
    assert max(result.lags) <= {"barrier": 0, "one step off": 1}.get(rule, 2)
    assert simulation.result.peak_live <= in_flight
    assert result.samples == 8 * 16


def test_ours_books_every_sample_once():
    simulation, _ = simulate("ours")
    account = simulation.rule.dispatcher.account()
    assert account.balanced
    assert account.trained == 12 * 16
    assert account.carried == sum(g.missing + len(g.lengths) for g in simulation.groups.values())


def test_sample_level_dispatch_keeps_engines_busy_that_a_barrier_leaves_idle():
    barrier, group, ours = (simulate(rule)[1] for rule in ("barrier", "areal", "ours"))
    assert ours.tokens_per_s > 2 * barrier.tokens_per_s
    assert ours.tokens_per_s > group.tokens_per_s
    assert ours.idle < 0.05 < group.idle < barrier.idle


def test_no_rule_exceeds_engines_that_decode_all_the_time():
    rates = {rule: simulate(rule, warm_up=0)[1].tokens_per_s for rule in RULES}
    assert max(rates.values()) < SMALL.ideal_tokens_per_s
    assert rates["ours"] > 0.7 * SMALL.ideal_tokens_per_s


def test_an_event_costs_the_same_however_many_replicas_and_samples_there_are():
    rates = []
    for scale in (1, 16):
        costs = Costs(
            replicas=4 * scale, slots=8, groups_per_step=2 * scale, in_flight=64 * scale, staleness=16
        )
        simulation = Simulation(costs, LongTailTrace(0), RULES["ours"](costs), steps=99, warm_up=0)
        simulation.start()
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            for _ in range(2_000):
                simulation.step()
        finally:
            sys.setprofile(None)
        rates.append(calls)
    assert rates[1] < 1.5 * rates[0]


def test_restarting_prefers_short_samples_and_resuming_does_not():
    source = histogram(LongTailTrace(0).source_lengths())
    resume, restart = (
        ks_distance(np.array(simulate(rule, steps=80, warm_up=40)[1].lengths), source)
        for rule in ("ours", "ours, restart")
    )
    assert restart > 0.2
    assert resume < 0.1


def test_memory_does_not_grow_with_finished_samples():
    simulation = Simulation(SMALL, LongTailTrace(0), RULES["ours"](SMALL), steps=10_000, warm_up=1)
    peaks = []
    tracemalloc.start()
    try:
        for until in (130, 170, 260):
            tracemalloc.reset_peak()
            while simulation.version < until:
                simulation.step() if simulation.live else simulation._turn_over()
            peaks.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
    assert simulation.result.samples == 259 * 16
    assert max(peaks[1:]) < 1.15 * peaks[0]


def test_the_agent_trace_has_the_stated_shape():
    works = [AgentTrace(0).work(i, 0) for i in range(64)]
    assert all(50 <= len(work.outputs) <= 200 for work in works)
    ratio = sum(sum(w.inputs) for w in works) / sum(sum(w.outputs) for w in works)
    assert ratio == pytest.approx(30, rel=0.1)


def test_missed_targets_are_named():
    results = {rule: simulate("barrier")[1] for rule in RULES}
    missed = judge(results, histogram(LongTailTrace(0).source_lengths()), 0).missed
    assert any("speedup 1.00 against the barrier, target 4.0" in text for text in missed)
    assert any("target 1.1" in text for text in missed)
    assert any("engine idle" in text for text in missed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "one JSON object"),
        ({"slot": 3}, "unknown key 'slot'"),
        ({"slots": 2.5}, "slots=2.5: set it to a whole number"),
        ({"in_flight": 4}, "at least group_size=8"),
        ({"kv_on_update": "drop"}, "'keep' or 'recompute'"),
    ],
)
def test_unusable_costs_are_refused(tmp_path, value, message):
    with pytest.raises(InputError, match=message):
        load_costs(write(tmp_path / "costs.json", value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"samples": []}, "format"),
        ({"format": 1, "samples": []}, "at least one sample"),
        ({"format": 1, "samples": [{"input": [1]}]}, "sample 0 must be an object"),
        ({"format": 1, "samples": [{"input": [1], "output": [0], "tool_s": []}]}, "output holds 0"),
        ({"format": 1, "samples": [{"input": [1], "output": [5], "tool_s": [1.0]}]}, "n, n and n - 1"),
    ],
)
def test_unusable_traces_are_refused(tmp_path, value, message):
    with pytest.raises(InputError, match=message):
        load_trace(write(tmp_path / "trace.json", value))


def test_the_command_takes_files_draws_and_ends_with_the_figures(tmp_path, capsys):
    samples = [{"input": [100], "output": [50 + 5000 * (i % 16 == 0)], "tool_s": []} for i in range(64)]
    trace = write(tmp_path / "trace.json", {"format": 1, "samples": samples})
    costs = write(
        tmp_path / "costs.json", {"slots": 4, "groups_per_step": 2, "in_flight": 32, "trainer_s": 5}
    )
    picture = tmp_path / "picture.png"
    files = ["--trace", str(trace), "--costs", str(costs), "--picture", str(picture)]
    status = main([*files, "--seeds", "1", "--steps", "6", "--processes", "1"])
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("speedup ")
    assert status == (1 if "MISSED" in out else 0)
    assert picture.stat().st_size > 1000


def test_the_command_explains_a_missing_file(tmp_path, capsys):
    assert main(["--costs", str(tmp_path / "none.json")]) == 2
    assert "check the path" in capsys.readouterr().err


def test_turns_that_wait_for_the_same_step_share_the_fixed_cost_of_prefill(tmp_path):
    sample = {"input": [100], "output": [10], "tool_s": []}
    trace = FileTrace(load_trace(write(tmp_path / "t.json", {"format": 1, "samples": [sample]})), 0)
    costs = Costs(
        replicas=1,
        slots=2,
        groups_per_step=1,
        group_size=2,
        in_flight=2,
        decode_base_s=0.02,
        decode_per_request_s=0.0,
        prefill_base_s=0.5,
        prefill_tokens_per_s=1000,
        trainer_s=10.0,
        sandbox_failure=0.0,
        sandbox_create_s=0.4,
        update_pause_s=0.0,
    )
    _, result = simulate("barrier", costs, trace=trace, steps=1, warm_up=0)
    assert result.total_s == pytest.approx(0.4 + 0.5 + 2 * 0.1 + 10 * 0.02 + 10.0)


def test_a_turn_begins_with_a_whole_step():
    fleet = Fleet(Costs(replicas=1, prefill_tokens_per_s=1e9, update_pause_s=0.0, decode_per_request_s=0.0))
    trace = LongTailTrace(0)
    fleet.request(Sample("first", 0, 0, trace.work(0, 0)), 0.0)
    second = Sample("second", 1, 0, trace.work(1, 0))
    fleet.request(second, 2.5 * 0.02)
    assert second.begun == 3.0


@pytest.mark.parametrize(("late", "begun"), [(1, 6.0), (2, 3.0)])
def test_an_engine_gathers_turns_for_some_steps_unless_they_are_many(late, begun):
    costs = Costs(
        replicas=1,
        slots=16,
        decode_per_request_s=0.0,
        prefill_base_s=0.5,
        prefill_tokens_per_s=1e12,
        prefill_gather_steps=4,
    )
    fleet, trace = Fleet(costs), LongTailTrace(0)
    for number in range(7):
        fleet.request(Sample(f"early {number}", number, 0, trace.work(number, 0)), 0.0)
    samples = [Sample(f"late {n}", n, 0, trace.work(n, 0)) for n in range(7, 7 + late)]
    for sample in samples:
        fleet.request(sample, 0.5 + 2.5 * 0.02)
    assert fleet.running == 7 + late
    replica = fleet.next_end()
    assert replica.next_end == pytest.approx(0.5 + begun * 0.02)
    assert fleet.ended(replica, replica.next_end) == []
    assert [sample.begun for sample in samples] == [begun] * late
    assert replica.blocked_until == pytest.approx(2 * 0.5 + begun * 0.02)


def test_turns_that_come_at_once_to_an_idle_engine_are_computed_together():
    fleet, trace = (
        Fleet(Costs(replicas=1, slots=16, prefill_base_s=0.5, prefill_gather_steps=4)),
        LongTailTrace(0),
    )
    samples = [Sample(f"{n}", n, 0, trace.work(n, 0)) for n in range(9)]
    for sample in samples:
        fleet.request(sample, 0.0)
    assert {sample.begun for sample in samples} == {0.0}
    assert 0.5 < fleet.replicas[0].blocked_until < 0.75


def test_an_abort_takes_gathered_turns_too():
    fleet, trace = Fleet(Costs(replicas=1, slots=16, prefill_gather_steps=4)), LongTailTrace(0)
    samples = [Sample(f"{n}", n, 0, trace.work(n, 0)) for n in range(9)]
    for sample in samples:
        fleet.request(sample, 0.3 * (sample.number == 8))
    assert len(fleet.replicas[0].gathering) == 1
    assert set(fleet.abort(0.31)) == set(samples)
    assert fleet.running == 0
    assert fleet.next_end().next_end == float("inf")


def test_a_simulation_in_flight_holds_what_lives_and_no_more():
    before, after, ended = million.run(6_400)
    assert ended > 6_400 / 2
    assert after < 1.1 * before


def test_modes_that_stand_alone_take_no_files(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--validate", "--costs", str(tmp_path / "costs.json")])
    assert "stand alone" in capsys.readouterr().err
