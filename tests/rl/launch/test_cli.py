from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rl.launch.cli import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["trian"], "did you mean `train`?"),
        (["run", "lst"], "did you mean `list`?"),
        (["env", "chek", "calc"], "did you mean `check`?"),
        (["doctor", "--quick"], "--quick is not understood"),
    ],
)
def test_a_wrong_command_names_the_right_one(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_full_disk_is_told_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        code = main(["env", "init", "my-task", "--folder", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert "File too large; make room" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train"], "experiment=NAME; there are: calc"),
        (["train", "experiment=calc", "+algo.group_sze=8"], "did you mean algorithm.group_size?"),
        (["train", "experiment=opd_calc", "run.root=nowhere"], "teacher calc: there is no run 'calc'"),
        (["train", "experiment=calk"], "did you mean experiment=calc?"),
        (["train", "experiment=calc", "--dry-run", "env.name=calk"], "Did you mean 'calc'?"),
        (["train", "experiment=calc", "--dry-run", "env.eval_split=evil"], "evil"),
        (["train", "experiment=calc", "env.eval_split=evil"], "evil"),
        (["train", "experiment=calc", "scaffold.name=tolls"], "Did you mean 'tools'?"),
        (["train", "experiment=calc", "model.preset=nanno"], "choose one of nano"),
        (["train", "experiment=calc", "model.path=/nowhere"], "no such folder"),
        (
            [
                "train",
                "experiment=calc",
                "engine.max_tokens=3",
                "engine.max_completion_tokens=1",
                "rollout.max_total_tokens=3",
            ],
            "leaves none to sample",
        ),
        (["train", "experiment=calc", "run.root=/dev/null"], "choose another run.root"),
        (["train", "experiment=calc", "name=no-such-run", "resume=true", "--dry-run"], "to resume"),
        (["run", "show", "nothing", "--root", "/nowhere"], "there is no run 'nothing'"),
        (["env", "check", "calk"], "Did you mean 'calc'?"),
        (["env", "init", "My Task"], "no name of an environment"),
        (["env", "play", "calc", "--split", "tset"], "no split 'tset'"),
    ],
)
def test_what_makes_no_sense_ends_with_2_and_one_reason(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(words) == 2
    output = capsys.readouterr()
    assert hint in output.err
    assert "Traceback" not in output.err


def test_help_is_shown_without_a_command(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "temper train experiment=calc" in capsys.readouterr().out


def test_dry_run_shows_arithmetic_processes_and_a_task(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "experiment=calc", "--dry-run", "algorithm.group_size=4", "trainer.steps=10"]) == 0
    text = capsys.readouterr().out
    assert "10 steps x 16 groups x 4 samples = 640 samples (64 a step)" in text
    assert "a private Ray cluster" in text
    assert "first task of calc, train: calc/" in text
    assert "group_size: 4" in text


def test_settings_may_stand_on_both_sides_of_an_option(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "experiment=calc", "--print-config", "trainer.steps=3"]) == 0
    assert "steps: 3" in capsys.readouterr().out


def test_a_new_environment_is_written_checked_and_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["env", "init", "team/my-task", "--folder", str(tmp_path)]) == 0
    path = tmp_path / "my_task.py"
    assert main(["env", "check", str(path), "--tasks", "5"]) == 0
    assert "checks on 10 tasks" in capsys.readouterr().out
    assert main(["env", "init", "my-task", "--folder", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err


def test_an_episode_played_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    main(["env", "init", "add", "--folder", str(tmp_path)])
    monkeypatch.setattr("builtins.input", lambda _: "wrong")
    assert main(["env", "play", str(tmp_path / "add.py")]) == 0
    assert "reward 0" in capsys.readouterr().out


def test_the_environments_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["env", "list"]) == 0
    assert "calc" in capsys.readouterr().out.split()


def test_another_package_of_our_name_is_named_before_anything_runs(tmp_path: Path):
    (tmp_path / "model.py").write_text("raise SystemExit('the wrong one ran')")
    command = (
        "import sys; sys.path.insert(1, sys.argv[1]); from rl.launch.cli import main; main(['run', 'list'])"
    )
    script = f"{command}"
    done = subprocess.run(
        [sys.executable, "-c", script, str(ROOT)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert f"finds {tmp_path / 'model.py'}" in done.stderr
    assert "the wrong one ran" not in done.stderr
