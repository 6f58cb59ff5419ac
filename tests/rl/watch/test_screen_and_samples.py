from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from envs.types import Trajectory
from rl.rollout.buffer import Batch
from rl.watch import rollouts, viewer
from rl.watch.console import LiveScreen, PlainScreen, figure, open_screen, progress_text, sparkline
from rl.watch.jsonl import JsonlLog, row
from rl.watch.plot import draw, smooth


def spell(ids) -> str:
    return "".join(f"<{token}>" for token in ids)


def test_plain_lines_show_each_phase_its_end_and_numbers(capsys: pytest.CaptureFixture[str]):
    screen = PlainScreen("run x")
    for done in range(101):
        screen.figures({"sft/loss": 1.25})
        screen.phase("imitate", done, 100)
    screen.phase("evaluate", 0, 0)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["run x", "imitate 0/100", "imitate 100/100  loss 1.25", "evaluate"]


def test_the_live_screen_shows_the_same_numbers():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    screen = LiveScreen("run x", console)
    screen.figures({"rollout/all/reward.mean": 0.5, "train/entropy": 0.125})
    screen.phase("reinforce", 3, 10)
    screen.note("kept [line]")
    screen.close()
    shown = Console(file=io.StringIO(), record=True, width=100)
    shown.print(screen.render())
    text = shown.export_text()
    assert "reinforce 3/10" in text
    assert "reward 0.5" in text
    assert "entropy 0.125" in text
    assert "kept [line]" in out.getvalue()


def test_without_a_terminal_lines_are_plain():
    assert isinstance(open_screen("auto", "x"), PlainScreen)


def test_small_pieces_of_text():
    assert progress_text("a", 5, 10, 65.0) == "a 5/10, 1:05 left"
    assert progress_text("a", 10, 10, 0.0) == "a 10/10"
    assert sparkline([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
    assert [figure(x) for x in (0.0, 0.25, 12345.0, 1e-5, float("nan"))] == [
        "0",
        "0.25",
        "12345",
        "1.0e-05",
        "nan",
    ]
    assert smooth([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_samples_come_back_and_tokens_are_coloured_by_the_loss_mask(tmp_path: Path, batch: Batch):
    rollouts.RolloutLog(tmp_path).step(7, batch)
    samples = rollouts.read(tmp_path)
    assert [s.trajectory for s in samples] == [t for g in batch.groups for t in g.trajectories]
    text = viewer.tokens(samples[0], spell)
    spans = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert spans == {"<11><12>": viewer.GIVEN, "<13>": viewer.STALE, "<14>": viewer.TRAINED}


def test_samples_are_sorted_by_reward_those_without_one_first(tmp_path: Path, batch: Batch):
    rollouts.RolloutLog(tmp_path).step(7, batch)
    console = Console(file=io.StringIO(), record=True, width=200)
    viewer.show(console, rollouts.read(tmp_path, 7), spell, order="reward", limit=2)
    text = console.export_text()
    assert text.index("no score (reward: no verdict)") < text.index("reward 0")
    assert "reward 1" not in text
    assert "3 more; --limit 5 shows all" in text


def test_failed_samples_keep_their_error(tmp_path: Path, failed: Trajectory):
    rollouts.RolloutLog(tmp_path).failed(failed)
    (sample,) = rollouts.read(tmp_path, failed=True)
    assert "sandbox: LostError: the sandbox went away" in viewer.headline(sample).plain


def test_a_step_without_samples_says_what_there_is(tmp_path: Path, batch: Batch):
    with pytest.raises(rollouts.NoRolloutsError, match="no step has any yet"):
        rollouts.read(tmp_path)
    rollouts.RolloutLog(tmp_path).step(7, batch)
    with pytest.raises(rollouts.NoRolloutsError, match="steps 7 to 7"):
        rollouts.read(tmp_path, 8)


def test_the_curves_are_a_picture_whatever_numbers_there_are(tmp_path: Path):
    with JsonlLog(tmp_path / "metrics.jsonl") as log:
        for step in range(30):
            log.write(row("rollout", step, {"rollout/all/reward.mean": step / 30}))
        log.write(row("eval", 0, {"eval/calc/greedy/score.mean": 0.1}))
    path = draw(tmp_path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 10_000
