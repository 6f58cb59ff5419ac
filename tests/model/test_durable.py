import os
from pathlib import Path

import pytest

from model.durable import new_folder, publish


def test_what_a_folder_holds_is_on_disk_before_it_has_its_name_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, done = os.fsync, []

    def noted(handle: int) -> None:
        done.append((Path(os.readlink(f"/proc/self/fd/{handle}")).name, (tmp_path / "out").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    partial = tmp_path / ".out.partial"
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "weights").write_bytes(b"1")
    (partial / "link").symlink_to("nowhere")
    publish(partial, tmp_path / "out")
    assert sorted(done[:3]) == [(".out.partial", False), ("inner", False), ("weights", False)]
    assert done[3:] == [(tmp_path.name, True)]
    assert (tmp_path / "out" / "inner" / "weights").read_bytes() == b"1"


def test_a_file_takes_the_place_of_an_older_one_and_a_folder_with_something_in_it_stays(
    tmp_path: Path,
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    publish(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    with pytest.raises(OSError):
        publish(tmp_path / "mine", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "above" / "out"
    left_by_a_kill = out.with_name(".out.partial")
    left_by_a_kill.mkdir(parents=True)
    (left_by_a_kill / "old").touch()
    with new_folder(out) as partial:
        (partial / "weights").write_bytes(b"1")
        assert not out.exists()
    assert [file.name for file in out.iterdir()] == ["weights"]
    with pytest.raises(KeyError), new_folder(tmp_path / "other") as partial:
        (partial / "half").touch()
        raise KeyError
    with pytest.raises(OSError), new_folder(out) as partial:
        (partial / "mine").touch()
    assert [file.name for file in out.iterdir()] == ["weights"]
    assert [file.name for file in tmp_path.rglob("*")] == ["above", "out", "weights"]
