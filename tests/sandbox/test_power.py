"""What a loss of power finds: nothing has a name before it is on disk, and what was torn stops nobody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.snapshots import Snapshot, Snapshots
from sandbox.toolkit import publish


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files and folders in the order in which they were brought to disk."""
    fsync: Callable[[int], None] = os.fsync
    names: list[str] = []

    def noted(fd: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    return names


def test_a_node_starts_over_records_of_snapshots_that_were_torn(tmp_path: Path, on_disk: list[str]) -> None:
    snapshots, folder = Snapshots(tmp_path), tmp_path / "snapshots"
    folder.mkdir()
    for name in ("whole", "empty", "zeros"):
        (folder / f"{name}.tree").write_bytes(b"tree")
    snapshots._record(Snapshot("whole", "me", "box", "docker", {}, 1, ""))
    assert on_disk == ["whole.tree", "whole.draft", "snapshots"]
    (folder / "empty.json").touch()
    (folder / "zeros.json").write_bytes(bytes(200))
    snapshots.sweep()
    assert sorted(path.name for path in folder.iterdir()) == ["whole.json", "whole.tree"]
    assert [snapshot.id for snapshot in snapshots.of("me")] == ["whole"]


def test_what_sandboxes_are_started_with_is_on_disk_before_it_has_its_name(
    tmp_path: Path, on_disk: list[str]
) -> None:
    draft = tmp_path / "draft"
    (draft / "lib").mkdir(parents=True)
    (draft / "agent.py").write_text("pass")
    (draft / "lib" / "more.py").write_text("pass")
    publish(draft, tmp_path / "agent")
    assert sorted(on_disk[:-1]) == ["agent.py", "lib", "more.py"] and on_disk[-1] == "draft"
    assert (tmp_path / "agent" / "lib" / "more.py").read_text() == "pass"


def test_a_folder_that_somebody_else_gives_its_name_at_the_last_moment_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, to = tmp_path / "draft", tmp_path / "agent"
    draft.mkdir()
    (draft / "agent.py").write_text("mine")
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        to.mkdir()
        (to / "agent.py").write_text("theirs")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    publish(draft, to)
    assert (to / "agent.py").read_text() == "theirs"
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(FileNotFoundError):
        publish(draft, tmp_path / "nowhere" / "agent")
