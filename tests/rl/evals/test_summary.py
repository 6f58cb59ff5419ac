from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rl.evals.compare import CompareError, compare
from rl.evals.grid import enough, falls
from rl.evals.plan import Identity
from rl.evals.prices import PriceError, Prices, load_prices
from rl.evals.report import Report, write_report
from rl.evals.rows import Cell
from rl.evals.summary import summarize_cell

CELL = Cell("sort", 50, "chat")
PRICES = Prices(input_tokens=1000.0, output_tokens=2000.0, sandbox_second=0.1, device_second=0.01)


def identity(n: int, **changed: object) -> Identity:
    fields = asdict(Identity("run@7", 7, "abc", 50, "chat", n, "tasks", "draws"))
    return Identity(**{**fields, **changed})


def test_every_row_is_counted_and_a_missing_one_is_no_zero(row, settings) -> None:
    rows = [row(0, 0, 1.0), row(0, 1, None), row(1, 0, 0.0), row(1, 1, 1.0)]
    found = summarize_cell(CELL, identity(3), rows, 4.0, settings(k=2), PRICES)
    assert (found.n, found.n_done, found.n_valid, found.missing) == (6, 4, 3, {"sandbox": 1})
    assert found.avg.mean == 0.75
    assert {k: (item.mean, item.n) for k, item in found.pass_at.items()} == {1: (0.75, 2), 2: (1.0, 1)}
    assert found.scores == (1.0, 0.5, None)


def test_what_a_solved_task_costs_counts_what_the_unsolved_ones_used(row, settings) -> None:
    rows = [row(0, 0, 1.0), row(1, 0, 0.0), row(2, 0, None), row(3, 0, 1.0)]
    found = summarize_cell(CELL, identity(4), rows, 4.0, settings(), PRICES)
    assert found.per_solved is not None
    assert asdict(found.per_solved) == {
        "input_tokens": 20,
        "output_tokens": 10,
        "sandbox_s": 1.0,
        "device_s": 2.0,
    }
    assert found.cost == pytest.approx(40 * 1e-3 + 20 * 2e-3 + 2.0 * 0.1 + 4.0 * 0.01)
    assert found.cost_per_solved == pytest.approx(found.cost / 2)


def test_nothing_solved_has_no_price(row, settings) -> None:
    found = summarize_cell(CELL, identity(1), [row(0, 0, 0.0)], 4.0, settings(), PRICES)
    assert found.per_solved is None
    assert found.cost_per_solved is None
    assert found.to_json()["cost_per_solved"] is None


def test_deadlines_are_read_off_the_wall_clock(row, settings) -> None:
    rows = [
        row(0, 0, 0.96, seconds=1.0),
        row(0, 1, 0.0, seconds=1.0),
        row(1, 0, 1.0, seconds=5.0),
        row(1, 1, 0.5),
    ]
    found = summarize_cell(CELL, identity(2), rows, 0.0, settings(k=2, deadlines_s=[2, 10]), None)
    early, late = found.deadlines
    assert (early.mean.mean, early.almost.mean) == pytest.approx((0.365, 0.5))
    assert (late.mean.mean, late.almost.mean) == pytest.approx((0.615, 1.0))


def test_a_fall_from_one_effort_to_a_higher_one_is_named_with_its_pairs(result) -> None:
    low, mid, high = (
        result([1.0] * 30 + [0.0] * 30, 1),
        result([1.0] * 60, 50, tokens=8),
        result([1.0] * 40 + [0.0] * 20, 100, tokens=20),
    )
    found = falls([high, low, mid])
    assert [(f.low, f.high, f.significant) for f in found] == [(50, 100, True)]
    assert found[0].difference.mean == pytest.approx(-1 / 3)
    assert "effort 100 scores less than 50 by 0.333" in str(found[0])


def test_a_fall_of_one_task_is_within_noise(result) -> None:
    found = falls([result([1.0] * 10, 1), result([1.0] * 9 + [0.0], 50)])
    assert [f.significant for f in found] == [False]


def test_the_smallest_effort_that_is_nearly_the_best(result) -> None:
    cells = [
        result([1.0] * s + [0.0] * (100 - s), b, tokens=b)
        for b, s in ((1, 60), (25, 96), (50, 95), (100, 100))
    ]
    (found,) = enough(cells)
    assert (found.effort, found.best, found.tokens, found.best_tokens) == (25, 100, 25, 100)


def test_a_task_without_a_score_is_in_no_pair(result) -> None:
    (found,) = falls([result([1.0, 1.0, None], 1), result([0.0, None, 1.0], 50)])
    assert (found.difference.n, found.difference.mean) == (1, -1.0)


def write(folder: Path, *results) -> Path:
    folder.mkdir()
    write_report(Report(tuple(results), (), (), ""), folder)
    return folder


def test_two_results_are_compared_task_by_task(tmp_path: Path, result) -> None:
    a = write(tmp_path / "a", result([0.0] * 20 + [1.0] * 20))
    b = write(tmp_path / "b", result([0.0] * 10 + [1.0] * 30))
    lines = compare(a, b, force=False)
    assert "0.500 to 0.750, +0.250" in lines[-1]
    assert "40 tasks (better)" in lines[-1]
    assert "(worse)" in compare(b, a, force=False)[-1]


@pytest.mark.parametrize("field", ["n", "environment", "sampling"])
def test_results_of_other_samples_are_compared_only_by_force(tmp_path: Path, result, field: str) -> None:
    a, b = (write(tmp_path / name, result([1.0] * 4)) for name in "ab")
    data = json.loads((b / "result.json").read_text())
    data["cells"][0]["identity"][field] = 3 if field == "n" else "other"
    (b / "result.json").write_text(json.dumps(data))
    with pytest.raises(CompareError, match=rf"sort effort 50 chat differs in {field}: .*\n.*--force"):
        compare(a, b, force=False)
    assert any(line.startswith("forced: ") for line in compare(a, b, force=True))


def test_other_efforts_and_parts_of_a_result_need_force(tmp_path: Path, result) -> None:
    a, b = write(tmp_path / "a", result([1.0] * 4, 1)), write(tmp_path / "b", result([1.0] * 4, 50))
    with pytest.raises(CompareError, match="only in the first"):
        compare(a, b, force=False)
    assert "4 tasks" in compare(a, b, force=True)[-1]
    c = write(tmp_path / "c", result([1.0] * 4, 1, k=2))
    with pytest.raises(CompareError, match="not complete"):
        compare(a, c, force=False)


def test_what_is_no_result_is_said_to_be_none(tmp_path: Path, result) -> None:
    a = write(tmp_path / "a", result([1.0]))
    with pytest.raises(CompareError, match="is no result of `temper eval`"):
        compare(a, tmp_path, force=True)


@pytest.mark.parametrize("field", ["n", "n_done", "avg", "scores", "identity", "cell"])
def test_a_result_that_lacks_something_is_none(tmp_path: Path, result, field: str) -> None:
    a, b = (write(tmp_path / name, result([1.0])) for name in "ab")
    data = json.loads((b / "result.json").read_text())
    del data["cells"][0][field]
    (b / "result.json").write_text(json.dumps(data))
    with pytest.raises(CompareError, match=rf"b/result\.json is no result.*{field}"):
        compare(a, b, force=True)
    (b / "result.json").write_text(json.dumps({**data, "cells": []}))
    with pytest.raises(CompareError, match="no cell"):
        compare(a, b, force=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("output_token: 1", "output_token"),
        ("output_tokens: -1", "greater than or equal to 0"),
        ("output_tokens: .nan", "output_tokens"),
        ("currency: EUR", "no price above 0"),
        ("- 1", "holds no keys"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_price_file_is_checked(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(PriceError, match=message):
        load_prices(path)
    with pytest.raises(PriceError, match="cannot be read"):
        load_prices(tmp_path / "none.yaml")


def test_a_price_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("currency: EUR\ndevice_second: 0.002\n")
    assert load_prices(path) == Prices(currency="EUR", device_second=0.002)
