"""How the comparison of asynchronous with synchronous training reads its runs."""

from benchmarks.async_calc import Measured, measured, report


def rows(step_s: float, staleness: float, error: float = 0.0):
    yield {"family": "eval", "step": 0, "time": 90.0, "metrics": {"eval/calc/greedy/n": 1.0}}
    yield {"family": "eval", "step": 0, "time": 100.0, "metrics": {"eval/calc/sampled/n": 1.0}}
    for step in (1, 2):
        now = 100.0 + step * step_s
        metrics = {"sys/idle.trainer": 0.75, "sys/idle.rollout": 0.5, "sys/step_s": step_s}
        yield {"family": "sys", "step": step, "time": now, "metrics": metrics}
        yield {"family": "train", "step": step, "time": now, "metrics": {"train/staleness.max": staleness}}
        found = {"rollout/all/tool_use": 0.5, "rollout/all/error": error}
        yield {"family": "rollout", "step": step, "time": now, "metrics": found}
    yield {"family": "eval", "step": 2, "time": 500.0, "metrics": {}}


def run(*what: float) -> Measured:
    return measured(list(rows(*what)))


def test_time_counts_from_the_first_evaluation_to_the_last_step():
    found = run(4.0, 0.0)
    assert (found.seconds, found.steps, found["sys/train_s"], found["errors"]) == (8.0, 2, 1.0, 0.0)


def test_a_run_that_is_fast_enough_passes(capsys):
    assert report(run(4.0, 0.0), run(2.0, 3.0)) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "async 2.00 times as fast as sync"


def test_slow_failed_and_stale_runs_are_named(capsys):
    assert report(run(2.0, 1.0), run(2.0, 5.0, 0.1)) == 1
    said = capsys.readouterr().out
    for text in ("1.00 times as fast, target 1.3", "samples failed", "older than the bound", "saw an older"):
        assert f"{text}" in said
