"""Sandboxes with a root of layers: what they see, what they may write, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.connection import Connection
from sandbox.errors import LayerError, PolicyError, SandboxError
from sandbox.layers import build
from sandbox.layers.containers import LABEL, REPOSITORY
from sandbox.layers.mounts import mounts_below
from sandbox.layers.records import Config, Kind, Layer
from sandbox.layers.store import IMAGE, LayerStore
from sandbox.node import SOCKET
from sandbox.types import Limits, SandboxSpec

LIMITS = Limits(memory_bytes=128 << 20, tmpfs_bytes=8 << 20, tmpfs_inodes=500)


def publish(store: LayerStore, tree: Path, kind: Kind, name: str, config: Config | None = None) -> Layer:
    with build.from_folder(store, tree, kind, "/") as draft:
        return store.publish(draft.tree, kind, config or draft.config, name=name)


def workspace(folder: Path) -> Path:
    for name, text in {"a.txt": "a", "sub/b.txt": "b", "kept/c.txt": "c"}.items():
        path = folder / "workspace" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "workspace/a.txt").chmod(0o444)
    return folder


@pytest.fixture(scope="session")
def store(layered_state: Path, tmp_path_factory: pytest.TempPathFactory) -> LayerStore:
    store, folder = LayerStore(layered_state / "layers"), tmp_path_factory.mktemp("sources")
    publish(store, workspace(folder / "w"), Kind.WORKSPACE, "w:1", Config({"TASK": "seven"}))
    (folder / "t/opt/tool").mkdir(parents=True)
    (folder / "t/opt/tool/run.py").write_text("import helper\n")
    (folder / "t/opt/tool/helper.py").write_text("print('helped')\n")
    publish(store, folder / "t", Kind.TOOLKIT, "t:1", Config({"TOOL": "/opt/tool"}))
    return store


@pytest.fixture
async def fleet(
    backend: str, layered_state: Path, store: LayerStore, request: pytest.FixtureRequest
) -> AsyncIterator[Fleet]:
    async with await Fleet.connect(
        "local", backend=backend, state_dir=layered_state, owner=request.node.name
    ) as fleet:
        yield fleet


@pytest.fixture
async def light(
    layered_state: Path, store: LayerStore, request: pytest.FixtureRequest
) -> AsyncIterator[Fleet]:
    async with await Fleet.connect(
        "local", backend="bubblewrap", state_dir=layered_state, owner=request.node.name
    ) as fleet:
        yield fleet


async def said(box: RemoteBox, command: str) -> str:
    result = await box.exec(command)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def test_a_workspace_is_there_to_be_changed(fleet: Fleet) -> None:
    spec = SandboxSpec(workspace="w:1", limits=LIMITS)
    one, two = await asyncio.gather(fleet.create(spec), fleet.create(spec))
    assert await said(one, "pwd; cat a.txt sub/b.txt; echo $TASK") == "/workspace\nabseven\n"
    assert await said(one, "echo new > sub/new; rm a.txt; rm -r kept; mv sub/b.txt a.txt; find . | sort") == (
        ".\n./a.txt\n./sub\n./sub/new\n"
    )
    assert await said(one, "mkdir kept; find kept; cat a.txt") == "kept\nb"
    assert await said(two, "find . -type f | sort; cat a.txt") == "./a.txt\n./kept/c.txt\n./sub/b.txt\na"


async def test_a_fork_has_what_was_changed_and_not_what_was_removed(fleet: Fleet) -> None:
    box = await fleet.create(SandboxSpec(workspace="w:1", limits=LIMITS))
    change = (
        "rm a.txt; rm -r sub; mkdir sub; echo n > sub/n; rm -r kept; echo f > kept; ln -s kept to; "
        "echo t > /tmp/t; echo s > /dev/shm/s"
    )
    look = "find . | sort; cat kept sub/n /tmp/t /dev/shm/s; readlink to"
    await said(box, change)
    wanted = await said(box, look)
    children = await box.fork(2)
    assert [await said(child, look) for child in children] == [wanted] * 2
    snapshot = await box.snapshot()
    again = await fleet.create(SandboxSpec(workspace="w:1", limits=LIMITS), snapshot=snapshot)
    assert await said(again, look) == wanted


async def test_room_and_files_end_at_the_limit_for_one_alone(fleet: Fleet) -> None:
    spec = SandboxSpec(workspace="w:1", limits=LIMITS)
    one, two = await asyncio.gather(fleet.create(spec), fleet.create(spec))
    full = await one.exec("dd if=/dev/zero of=big bs=1M count=5; dd if=/dev/zero of=more bs=1M count=5")
    assert full.disk_full and b"No space left" in full.stderr
    assert int(await said(one, "cat big more | wc -c; rm big more")) <= LIMITS.tmpfs_bytes
    many = await one.exec("i=0; while true > f$i; do i=$((i+1)); [ $i -lt 2000 ] || break; done; echo $i")
    assert b"No space left" in many.stderr
    assert 0 < int(many.stdout) <= LIMITS.tmpfs_inodes + 20
    assert await said(two, "echo fine > x; cat x") == "fine\n"


async def test_files_are_limited_without_layers_too(light: Fleet) -> None:
    assert light.capabilities.inode_limit
    box = await light.create(SandboxSpec(limits=LIMITS))
    for folder in ("/tmp", "/workspace", "/dev/shm"):
        many = await box.exec(
            "i=0; while true > f$i; do i=$((i+1)); [ $i -lt 2000 ] || break; done; echo $i", cwd=folder
        )
        assert b"No space left" in many.stderr, folder
        assert 0 < int(many.stdout) <= LIMITS.tmpfs_inodes + 20


async def test_tools_write_beside_their_files_over_a_whole_root(light: Fleet, store: LayerStore) -> None:
    spec = SandboxSpec(workspace="w:1", toolkit="t:1", limits=LIMITS)
    one, two = await asyncio.gather(light.create(spec), light.create(spec))
    assert await said(one, "cd $TOOL; python3 run.py; ls") == "helped\n__pycache__\nhelper.py\nrun.py\n"
    assert (await said(one, "ls $TOOL/__pycache__")).startswith("helper.cpython-")
    await said(one, "rm /usr/bin/seq; echo mine > /usr/bin/new; chmod 755 /etc")
    assert await said(two, "ls $TOOL; test -e /usr/bin/seq; test ! -e /usr/bin/new") == "helper.py\nrun.py\n"
    base = store.get("tempering-python:built-in")
    store.verify(base)


async def test_what_is_put_in_place_of_shell_and_python_does_not_reach_the_agent(light: Fleet) -> None:
    box = await light.create(SandboxSpec(workspace="w:1", limits=LIMITS))
    before = await box.python("print(6 * 7)")
    evil = (
        "cp /usr/bin/true /tmp/t; for f in sh bash python3 env cat; do cp /tmp/t /usr/bin/$f.x; "
        "mv /usr/bin/$f.x /usr/bin/$f; done; true"
    )
    await box.exec(["bash", "-c", evil])
    for path in ("/run", "/run/tempering", "/run/tempering/agent", "/etc/ld.so.preload", "/proc", "/"):
        held = await box.python(f"import os; os.rename({path!r}, '/tmp/gone')")
        assert held.exit_code == 1, path
    wrote = await box.python("open('/run/tempering/agent/x.py', 'w')")
    assert wrote.exit_code == 1
    assert (await box.exec("echo never")).stdout == b""  # its own shell is what it made it
    assert (await box.python("print(6 * 7)")).stdout == before.stdout == b"42\n"
    await box.write_file("/workspace/x", b"y")
    assert await box.read_file("/workspace/x") == b"y"


async def test_a_hostile_preload_in_a_layer_does_not_reach_the_agent(
    light: Fleet, store: LayerStore, tmp_path: Path
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.preload").write_text("/workspace/evil.so\n")
    (tmp_path / "lib64").mkdir()
    publish(store, tmp_path, Kind.WORKSPACE, "evil:1")
    box = await light.create(SandboxSpec(workspace="evil:1", limits=LIMITS))
    result = await box.exec("cat /etc/ld.so.preload; echo ok")
    assert (result.stdout, result.stderr) == (b"ok\n", b"")


@pytest.mark.parametrize("layered", [False, True])
async def test_a_disk_file_is_a_limit_of_its_own(light: Fleet, layered: bool, layered_state: Path) -> None:
    limits = replace(LIMITS, disk_bytes=24 << 20)
    box = await light.create(SandboxSpec(workspace="w:1" if layered else "", limits=limits))
    full = await box.exec("dd if=/dev/zero of=/tmp/big bs=1M count=60")
    assert full.disk_full and b"No space left" in full.stderr
    assert int(await said(box, "stat -c %s /tmp/big; rm /tmp/big")) > 12 << 20
    many = await box.exec("i=0; while true > f$i; do i=$((i+1)); [ $i -lt 2000 ] || break; done; echo $i")
    assert b"No space left" in many.stderr
    assert not list((layered_state / "mounts").glob("disk-*"))
    (child,) = await box.fork(1)
    assert await said(child, "ls | wc -l") == await said(box, "ls | wc -l")


async def test_what_is_asked_for_and_not_there(light: Fleet, store: LayerStore) -> None:
    for spec, error in (
        (SandboxSpec(image="debian:12"), "there is no base layer 'debian:12'"),
        (SandboxSpec(workspace="no:1"), "there is no workspace layer 'no:1'.*; there are"),
        (SandboxSpec(workspace=store.get("t:1").digest), "is a toolkit layer, and a workspace layer"),
        (SandboxSpec(workspace="../x"), "there is no workspace layer"),
    ):
        with pytest.raises(LayerError, match=error):
            await light.create(spec)


@pytest.mark.docker
async def test_docker_has_no_disk_file(layered_state: Path) -> None:
    async with await Fleet.connect(backend="docker", state_dir=layered_state, owner="disk") as fleet:
        with pytest.raises(PolicyError, match="no disks"):
            await fleet.create(SandboxSpec(limits=Limits(disk_bytes=1 << 24)))


@pytest.mark.docker
async def test_a_base_layer_is_the_root_of_a_container(
    layered_state: Path, store: LayerStore, tmp_path: Path
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/mark").write_text("marked")
    mark = publish(store, tmp_path, Kind.TOOLKIT, "mark:1")
    spec = SandboxSpec(image="tempering-python:built-in", workspace="w:1", toolkit="mark:1", limits=LIMITS)
    async with await Fleet.connect(backend="docker", state_dir=layered_state, owner="root") as fleet:
        box = await fleet.create(spec)
        assert await said(box, "cat /etc/mark a.txt; echo x > b; cat b; echo $TASK") == "markedax\nseven\n"
        assert (await box.python("print(1)")).stdout == b"1\n"
        assert (await box.exec("echo x > /etc/mark")).exit_code != 0
    client = docker.from_env()
    images = [one for one in client.images.list(name=REPOSITORY) if mark.digest in one.labels.get(LABEL, "")]
    assert images
    for image in images:
        client.images.remove(image.id, force=True)
    client.close()


async def test_a_damaged_layer_starts_nothing(light: Fleet, store: LayerStore, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace/only").write_text("x")
    layer = publish(store, tmp_path, Kind.WORKSPACE, "damaged:1")
    path = store.place(layer.digest) / (IMAGE if layer.image else "tree/workspace/only")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(LayerError, match=f"workspace layer {layer.digest} is damaged"):
        await light.create(SandboxSpec(workspace="damaged:1"))


async def test_a_layer_in_use_is_not_collected_and_a_name_that_moves_does_not_move_sandboxes(
    light: Fleet, store: LayerStore, tmp_path: Path
) -> None:
    for text in ("old", "new"):
        (tmp_path / text / "workspace").mkdir(parents=True)
        (tmp_path / text / "workspace/v").write_text(text)
    old = publish(store, tmp_path / "old", Kind.WORKSPACE, "moves:1")
    box = await light.create(SandboxSpec(workspace="moves:1", limits=LIMITS))
    publish(store, tmp_path / "new", Kind.WORKSPACE, "moves:1")
    assert old.digest not in store.collect()
    (child,) = await box.fork(1)
    assert await said(box, "cat v") == await said(child, "cat v") == "old"
    other = await light.create(SandboxSpec(workspace="moves:1", limits=LIMITS))
    assert await said(other, "cat v") == "new"
    await asyncio.gather(box.close(), child.close())
    assert old.digest in store.collect()


def _loops(folder: Path) -> list[str]:
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [name for name in (path.read_text() for path in files if path.exists()) if str(folder) in name]


@pytest.mark.slow
async def test_a_killed_node_leaves_no_mount_device_or_file(
    backend: str, tmp_path: Path, store: LayerStore
) -> None:
    (tmp_path / "layers").symlink_to(store.folder)
    disk = 24 << 20 if backend == "bubblewrap" else 0
    spec = SandboxSpec(workspace="w:1", limits=replace(LIMITS, disk_bytes=disk))
    fleet = await Fleet.connect(backend=backend, state_dir=tmp_path, owner="killed")
    await fleet.create(spec)
    mounts = tmp_path / "mounts"
    assert mounts_below(mounts)
    os.kill(fleet.node_pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await fleet.boxes()
    await fleet.close(release=False)
    async with await Fleet.connect(backend=backend, state_dir=tmp_path, owner="next") as fleet:
        box = await fleet.create(spec)
        assert await said(box, "cat a.txt") == "a"
    async with asyncio.timeout(60):
        while mounts.exists() or mounts_below(mounts) or _loops(tmp_path):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert not await _answers(tmp_path)


async def _answers(folder: Path) -> bool:
    try:
        connection = await Connection.open(folder / SOCKET)
    except OSError:
        return False
    await connection.close()
    return True
