"""Layers as content: digests of what is in them, damage that is named, collection by reference."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from sandbox.errors import LayerError
from sandbox.layers import build, erofs
from sandbox.layers.records import Config, Kind, Layer
from sandbox.layers.store import IMAGE, TREE, LayerStore
from sandbox.layers.tree import content

FILES = {"a.txt": "one", "sub/b.txt": "two", "sub/deep/c.sh": "#!/bin/sh\n", "z": ""}


def folder(at: Path, files: dict[str, str] = FILES) -> Path:
    for name, text in random.Random(len(str(at))).sample(sorted(files.items()), len(files)):
        path = at / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (random.random() * 1e9,) * 2)
    return at


def publish(store: LayerStore, source: Path, kind: Kind = Kind.WORKSPACE, name: str = "") -> Layer:
    with build.from_folder(store, source, kind) as draft:
        return store.publish(draft.tree, kind, draft.config, draft.over, name)


@pytest.fixture(params=[False, True] if erofs.available() else [False])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path / "store", images=request.param)


def test_the_same_content_has_the_same_digest_however_it_came(tmp_path: Path) -> None:
    first = publish(LayerStore(tmp_path / "1", images=False), folder(tmp_path / "x"))
    other = publish(LayerStore(tmp_path / "2"), folder(tmp_path / "another/place"))
    assert first.digest == other.digest
    assert (first.size, first.entries) == (sum(map(len, FILES.values())), 8)


@pytest.mark.parametrize("change", ["content", "mode", "name", "kind", "env"])
def test_what_counts_changes_the_digest(tmp_path: Path, change: str) -> None:
    store = LayerStore(tmp_path / "s", images=False)
    before = publish(store, folder(tmp_path / "x"))
    if change == "content":
        (tmp_path / "x/a.txt").write_text("eno")
    elif change == "mode":
        (tmp_path / "x/a.txt").chmod(0o755)
    elif change == "name":
        (tmp_path / "x/a.txt").rename(tmp_path / "x/b")
    with build.from_folder(store, tmp_path / "x", Kind.WORKSPACE) as draft:
        kind = Kind.TOOLKIT if change == "kind" else Kind.WORKSPACE
        after = store.publish(draft.tree, kind, Config({"A": "1"} if change == "env" else {}))
    assert after.digest != before.digest


def test_a_layer_comes_back_as_it_was(store: LayerStore, tmp_path: Path) -> None:
    source = folder(tmp_path / "x")
    (source / "link").symlink_to("/etc/passwd")
    (source / "tool").write_text("x")
    (source / "tool").chmod(0o6755)
    layer = publish(store, source, name="task/x:1")
    assert store.get("task/x:1") == layer == store.get(layer.digest)
    with store.opened(layer) as tree:
        assert (tree / "workspace/sub/b.txt").read_text() == "two"
        assert os.readlink(tree / "workspace/link") == "/etc/passwd"
        assert (tree / "workspace/tool").stat().st_mode & 0o7777 == 0o755
        assert (tree / "workspace/a.txt").stat().st_mtime_ns == (source / "a.txt").stat().st_mtime_ns
        assert [line[0] for line in content(tree)] == sorted(line[0] for line in content(tree))


def test_damage_is_found_and_named(store: LayerStore, tmp_path: Path) -> None:
    layer = publish(store, folder(tmp_path / "x"), name="x:1")
    place = store.place(layer.digest)
    if layer.image:
        data = bytearray((place / IMAGE).read_bytes())
        data[-1] ^= 1
        (place / IMAGE).write_bytes(data)
    else:
        (place / TREE / "workspace/a.txt").write_text("eno")
    with pytest.raises(LayerError, match=layer.digest), store.opened(layer):
        pass
    again = publish(store, folder(tmp_path / "y"), name="x:1")  # building it again mends it
    assert again.digest == layer.digest
    with store.opened(again) as tree:
        assert (tree / "workspace/a.txt").read_text() == "one"


def test_a_damaged_record_is_named_and_can_be_removed(store: LayerStore, tmp_path: Path) -> None:
    layer = publish(store, folder(tmp_path / "x"), name="x:1")
    (store.place(layer.digest) / "layer.json").write_text("{")
    with pytest.raises(LayerError, match=f"{layer.digest} is damaged"):
        store.get("x:1")
    assert store.remove("x:1") == ["x:1"]
    assert store.collect() == [layer.digest]


def test_collecting_keeps_what_has_a_name_or_a_user(store: LayerStore, tmp_path: Path) -> None:
    named = publish(store, folder(tmp_path / "x"), name="x:1")
    used = publish(store, folder(tmp_path / "y", {"y": "y"}))
    loose = publish(store, folder(tmp_path / "z", {"z": "z"}))
    held = store.hold(used)
    assert store.collect() == [loose.digest]
    os.close(held)
    assert store.collect() == [used.digest]
    store.remove("x:1")
    assert store.collect() == [named.digest]
    assert store.digests() == [] and not list((store.folder / "drafts").iterdir())
    with pytest.raises(LayerError, match="was removed"):
        store.hold(named)


def test_a_base_stays_while_a_named_workspace_lies_over_it(store: LayerStore, tmp_path: Path) -> None:
    base = publish(store, folder(tmp_path / "b"), Kind.BASE)
    with build.from_folder(store, folder(tmp_path / "w", {"w": ""}), Kind.WORKSPACE) as draft:
        store.publish(draft.tree, Kind.WORKSPACE, draft.config, over=base.digest, name="w:1")
    assert store.collect() == []
    store.remove("w:1", Kind.WORKSPACE)
    assert len(store.collect()) == 2


def test_a_name_moves_and_is_one_of_its_kind(store: LayerStore, tmp_path: Path) -> None:
    old = publish(store, folder(tmp_path / "x"), name="x:1")
    new = publish(store, folder(tmp_path / "y", {"y": ""}), name="x:1")
    base = publish(store, folder(tmp_path / "z", {"z": ""}), Kind.BASE, name="x:1")
    assert store.get("x:1", Kind.WORKSPACE) == new != old
    assert store.get("x:1", Kind.BASE) == base
    with pytest.raises(LayerError, match="several kinds"):
        store.get("x:1")
    with pytest.raises(LayerError, match="is a base layer"):
        store.get(base.digest, Kind.TOOLKIT)


@pytest.mark.parametrize("name", ["x", "X:1", "x:", ":1", "../x:1", "x:1/2", "a//b:1", "x:1\n"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(LayerError, match="is no name of a layer"):
        publish(LayerStore(tmp_path / "s"), folder(tmp_path / "x"), name=name)
    with pytest.raises(LayerError, match="there is no"):
        LayerStore(tmp_path / "s").get(name)


def test_what_no_layer_has_is_refused(store: LayerStore, tmp_path: Path) -> None:
    source = folder(tmp_path / "x")
    os.mkfifo(source / "pipe")
    with pytest.raises(LayerError, match="pipe"):
        publish(store, source)
    (source / "pipe").unlink()
    (source / "run").symlink_to("/etc")
    with pytest.raises(LayerError, match="/run is no folder"):
        publish(store, source, Kind.BASE)
    (source / "run").unlink()
    (source / "etc").mkdir()
    (source / "etc/ld.so.preload").symlink_to("/oldroot/root/x")
    with pytest.raises(LayerError, match=r"/etc/ld\.so\.preload is a link"):
        publish(store, source, Kind.BASE)
    with pytest.raises(LayerError, match="is no folder"):
        publish(store, tmp_path / "nothing")
    assert store.collect() == [] and store.digests() == []


def test_a_draft_of_a_killed_builder_is_swept(store: LayerStore, tmp_path: Path) -> None:
    publish(store, folder(tmp_path / "x"), name="x:1")
    left = store.folder / "drafts/left"
    left.mkdir()
    (store.folder / "drafts/left.lock").touch()
    with store.draft() as mine:
        assert mine.exists() and not left.exists()
        store.collect()
        assert mine.exists()
