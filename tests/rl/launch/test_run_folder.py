from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from rl.launch import run
from rl.launch.compose import load_config
from rl.launch.config import RunConfig
from rl.launch.resume import ResumeError, check_changes, with_stored_overrides
from rl.launch.run import RunFolderError, RunState, describe, open_run, read_driver

DRIVER = """
import sys
from rl.launch.compose import load_config
from rl.launch.run import open_run
folder = open_run(load_config(sys.argv[1:]))
print("open", flush=True)
sys.stdin.read()
"""


def config(root: Path, *more: str) -> RunConfig:
    return load_config(["experiment=calc", f"run.root={root}", "run.name=mine", *more])


def test_a_folder_holds_what_was_typed_and_what_it_led_to(tmp_path: Path):
    settings = config(tmp_path)
    folder = open_run(settings)
    folder.write_config(["experiment=calc"], settings)
    folder.close(RunState.FINISHED)
    assert yaml.safe_load((folder.path / "overrides.yaml").read_text()) == ["experiment=calc"]
    resolved = RunConfig.model_validate(yaml.safe_load((folder.path / "resolved.yaml").read_text()))
    inexact = settings.model.model_copy(update={"exact": False})
    assert resolved == settings.model_copy(update={"model": inexact})
    assert describe(folder.path) == "attempt 1 finished, no checkpoint yet"
    assert not list(folder.path.glob(".*.partial"))


def test_a_name_that_exists_names_both_ways_out_and_what_was_found(tmp_path: Path):
    folder = open_run(config(tmp_path))
    (folder.checkpoints / "step-40").mkdir(parents=True)
    folder.close(RunState.FAILED)
    with pytest.raises(RunFolderError) as caught:
        open_run(config(tmp_path))
    for words in ("'mine' exists", "failed", "step 40", "run.resume=true", "run.clean=true"):
        assert words in str(caught.value)


def test_resume_goes_on_and_clean_starts_anew(tmp_path: Path):
    first = open_run(config(tmp_path))
    (first.path / "kept").touch()
    first.close(RunState.INTERRUPTED)
    second = open_run(config(tmp_path, "resume=true"))
    assert (second.attempt, second.found) == (2, "attempt 1 interrupted, no checkpoint yet")
    assert (second.path / "kept").exists()
    second.close(RunState.INTERRUPTED)
    third = open_run(config(tmp_path, "clean=true"))
    assert (third.attempt, third.found, (third.path / "kept").exists()) == (1, "", False)


def test_nothing_to_resume_says_what_there_is(tmp_path: Path):
    open_run(config(tmp_path)).close(RunState.FINISHED)
    with pytest.raises(RunFolderError, match=r"no run 'other'.*runs there: mine"):
        open_run(load_config(["experiment=calc", f"run.root={tmp_path}", "run.name=other", "resume=true"]))


def test_a_folder_that_is_no_run_is_not_deleted(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(RunFolderError, match="is not a run of this program"):
        open_run(config(tmp_path, "clean=true"))
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_living_driver_is_refused_and_a_killed_one_is_recognised(tmp_path: Path):
    words = ["experiment=calc", f"run.root={tmp_path}", "run.name=mine"]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "open\n"
        for way in ("resume=true", "clean=true", "seed=1"):
            with pytest.raises(RunFolderError, match=f"driven by process {driver.pid}"):
                open_run(config(tmp_path, way))
        driver.kill()
    folder = open_run(config(tmp_path, "resume=true"))
    assert folder.found == "attempt 1 killed, no checkpoint yet"
    record = read_driver(folder.path)
    assert record is not None
    assert record.alive


def test_a_run_without_a_name_gets_one(tmp_path: Path):
    names = {open_run(load_config(["experiment=calc", f"run.root={tmp_path}"])).name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("calc-nano-") for name in names)


def test_resuming_takes_up_the_runs_own_settings_and_new_ones_win(tmp_path: Path):
    words = ["experiment=calc", "trainer.steps=5", "run.clean=true", f"run.root={tmp_path}", "run.name=mine"]
    settings = load_config(words)
    folder = open_run(settings)
    folder.write_config(words, settings)
    folder.close(RunState.INTERRUPTED)
    again = [f"run.root={tmp_path}", "run.name=mine", "resume=true"]
    assert load_config(with_stored_overrides(again)).trainer.steps == 5
    more = load_config(with_stored_overrides([*again, "trainer.steps=9"]))
    assert check_changes(more) == ["changed since the last attempt: trainer.steps: 5 before, 9 now"]
    wrong = load_config(with_stored_overrides([*again, "algorithm.group_size=4"]))
    with pytest.raises(ResumeError, match=r"algorithm\.group_size: 8 before, 4 now"):
        check_changes(wrong)


def test_of_two_that_start_at_the_same_moment_one_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked, both, taken = run._checked, threading.Barrier(2), list[object]()

    def slowly(*args):
        found = checked(*args)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # each would go on when both have looked
        return found

    monkeypatch.setattr(run, "_checked", slowly)

    def start() -> None:
        try:
            taken.append(open_run(config(tmp_path)).attempt)
        except RunFolderError as error:
            taken.append(str(error))

    starts = [threading.Thread(target=start) for _ in range(2)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    # The one that is refused may say so first.
    (refused,) = (str(outcome) for outcome in taken if outcome != 1)
    assert len(taken) == 2 and "is being driven by process" in refused
