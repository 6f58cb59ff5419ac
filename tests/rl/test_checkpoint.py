import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl.checkpoint import CheckpointError, CheckpointStore, verify

STATE = {"step": 3, "nested": {"w": torch.arange(6.0).view(2, 3), 7: [1.5, None, "x"]}, "empty": {}}


def write_policy(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_state_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = CheckpointStore(tmp_path).save(3, STATE, write_policy)
    state = CheckpointStore(tmp_path).latest().load_state()
    assert state["step"] == 3
    assert state["nested"][7] == [1.5, None, "x"]
    assert state["empty"] == {}
    assert torch.equal(state["nested"]["w"], STATE["nested"]["w"])
    assert (saved.path / "policy" / "config.json").is_file()


@pytest.mark.parametrize("damage", ["remove", "truncate", "flip", "manifest"])
def test_a_damaged_newest_checkpoint_falls_back_and_says_so(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, STATE, write_policy)
    newest = store.save(2, STATE, write_policy).path
    target = newest / ("manifest.json" if damage == "manifest" else "state.safetensors")
    if damage in ("remove", "manifest"):
        target.unlink()
    elif damage == "truncate":
        target.write_bytes(target.read_bytes()[:-3])
    else:
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(bytes(data))
    found = store.latest()
    assert found.step == 1
    assert "step-2" in found.skipped[0]


def test_a_half_written_folder_is_not_a_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def fail(folder: Path) -> None:
        raise OSError("disk full")

    store.save(1, STATE)
    with pytest.raises(CheckpointError, match=r"disk full.*make room.*newest one is that of step 1"):
        store.save(2, STATE, fail)
    assert store.latest().step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_disk_without_room_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(1, STATE)
    code = (
        "import resource, sys; from pathlib import Path; import torch\n"
        "from rl.checkpoint import CheckpointStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "CheckpointStore(Path(sys.argv[1]), keep=1).save(1, {'w': torch.zeros(1 << 16)})"
    )
    failed = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 1
    assert "CheckpointError: the checkpoint of step 1 cannot be written" in failed.stderr
    assert "make room" in failed.stderr
    assert CheckpointStore(tmp_path).latest().load_state()["step"] == 3


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        CheckpointError, match=r"step 1 cannot be written to .*checkpoints.*there is none yet"
    ):
        CheckpointStore(tmp_path / "checkpoints").save(1, STATE)


def test_a_killed_writer_leaves_nothing_that_the_next_one_keeps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(4, STATE)
    (tmp_path / ".step-8.partial").mkdir()
    (tmp_path / ".step-4.old").mkdir()
    store.save(4, {"again": True})
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]
    assert store.latest().load_state() == {"again": True}


def test_all_damaged_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, STATE).path
    (path / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json is missing.*run\.clean=true"):
        CheckpointStore(tmp_path).latest()


def test_only_the_newest_and_the_kept_steps_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2, keep_every=4)
    for step in range(1, 8):
        store.save(step, {"step": step})
    assert store.steps() == [4, 6, 7]


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, STATE).path
    manifest = json.loads((path / "manifest.json").read_text()) | {"format": 99}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert "format 99" in verify(path)


def test_what_is_neither_json_nor_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not set"):
        CheckpointStore(tmp_path).save(1, {"a": {1, 2}})
