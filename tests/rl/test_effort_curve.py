"""The cost-quality curve: its points, its files, and what is refused."""

from pathlib import Path

import pytest

from envs.types import (
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    ToolCall,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from rewards.length import LengthPenaltyConfig
from rl import effort_curve
from rl.effort_curve import CurveError, CurvePoint

PENALTY = LengthPenaltyConfig(k0=2.0, max_penalty=0.9, length_scale=48, efforts=(1, 50, 100), warmup_steps=50)


def trajectory(effort: int, index: int, score: Score | Missing, calls: int) -> Trajectory:
    asked = [ToolCall("ask", {"question": "?"}, f"call_{i}", i) for i in range(calls)]
    turns = tuple(turn(Message(Role.ASSISTANT, tool_calls=(call,))) for call in asked)
    key = TrajectoryKey("t", effort, "tools", index, 0)
    branch = (*turns, turn(Message(Role.ASSISTANT, "1")))
    return Trajectory(
        key=key, branches=(branch,), status=Status.FINISHED, stop=StopReason.ANSWER, score=score
    )


def turn(message: Message) -> Turn:
    return Turn(
        prompt_ids=(1, 2),
        completion_ids=(5, 6, 7),
        logprobs=(0.0, 0.0, 0.0),
        policy_versions=(0, 0, 0),
        finish=FinishReason.STOP,
        message=message,
    )


def members() -> list[Trajectory]:
    return [
        trajectory(100, 0, Score(1.0), 3),
        trajectory(1, 0, Score(1.0), 0),
        trajectory(1, 1, Score(0.0), 1),
        trajectory(1, 2, Missing("timeout"), 9),
        trajectory(100, 1, Score(0.9, {"outcome": 1.0, "length": -0.1}), 5),
    ]


def test_a_point_counts_every_sample_and_averages_those_with_a_score() -> None:
    low, high = effort_curve.curve(members(), PENALTY)
    assert (low.effort, low.n, low.n_valid) == (1, 3, 2)
    assert (low.score, low.tokens, low.calls) == (0.5, 4.5, 0.5)
    assert low.stderr == pytest.approx(0.5)
    assert low.reward == pytest.approx(0.5 - (2 * 3 / 48 + 2 * 6 / 48) / 2)
    assert (high.effort, high.score, high.tokens, high.calls) == (100, 1.0, 15.0, 4.0)
    assert effort_curve.curve(members())[0].reward == 0.5


def test_the_curve_is_a_table_metrics_and_files(tmp_path: Path) -> None:
    points = effort_curve.curve(members(), PENALTY)
    head, first, second = effort_curve.table(points).splitlines()
    assert head.split()[:2] == ["effort", "score"]
    assert first.split()[0] == "1" and first.endswith("2/3") and second.split()[0] == "100"
    found = effort_curve.metrics(points, "eval/probe/greedy")
    assert found["eval/probe/greedy/effort.100/tool_calls"] == 4.0
    assert found["eval/probe/greedy/effort.1/n"] == 3.0
    effort_curve.write(points, tmp_path)
    assert effort_curve.read(tmp_path) == points
    assert (tmp_path / effort_curve.PICTURE).read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in tmp_path.iterdir()) == [effort_curve.DATA, effort_curve.PICTURE]


def test_a_missing_or_damaged_curve_says_how_to_measure_one(tmp_path: Path) -> None:
    with pytest.raises(CurveError, match=r"eval\.efforts"):
        effort_curve.read(tmp_path)
    for text in ("{", '[{"effort": 1}]', "[1]"):
        (tmp_path / effort_curve.DATA).write_text(text)
        with pytest.raises(CurveError, match="is no curve"):
            effort_curve.read(tmp_path)


def test_a_curve_without_a_score_is_not_a_number() -> None:
    (point,) = effort_curve.curve([trajectory(7, 0, Missing("gone"), 0)])
    assert isinstance(point, CurvePoint) and point.n == 1 and point.n_valid == 0
    assert point.score != point.score
