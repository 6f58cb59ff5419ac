"""What hostile code finds shut: in the sandbox, at the node, and in what a sandbox hands out."""

from __future__ import annotations

import asyncio
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.admission import NodeLimits, admit
from sandbox.archives import read_archive
from sandbox.backends import cgroups
from sandbox.backends.base import CHANNEL
from sandbox.backends.users import Users
from sandbox.client import Fleet, RemoteBox
from sandbox.connection import Connection
from sandbox.errors import (
    ExitError,
    FileError,
    InfrastructureError,
    PolicyError,
    UnsafeTreeError,
    printable,
)
from sandbox.node import SOCKET
from sandbox.trees import TreeLimits
from sandbox.types import ExecResult, Limits, SandboxSpec


async def says(box: RemoteBox, source: str) -> bytes:
    result = await box.exec(["/usr/bin/python3", "-c", source], timeout_s=30)
    return result.stdout + result.stderr


async def test_each_sandbox_has_users_of_its_own(fleet: Fleet, box: RemoteBox) -> None:
    other = await fleet.create()
    uids = {int((await each.exec("id -u")).stdout) for each in (box, other)}
    assert len(uids) == 2 and min(uids) >= 1 << 20
    call = int((await other.python("import os; print(os.getuid())")).stdout)
    assert call not in uids


def test_users_of_nodes_and_sandboxes_do_not_overlap() -> None:
    one, two = Users(1000), Users(1001)
    taken = [users.take() for users in (one, two) for _ in range(600)]
    assert len(set(taken)) == 1200
    assert min(b - a for a, b in zip(sorted(taken), sorted(taken)[1:], strict=False)) >= 257
    one.give_back(taken[3])
    assert one.take() == taken[3]


async def test_sockets_of_rare_families_are_refused(box: RemoteBox) -> None:
    source = """
import socket
for family, kind, protocol in ((40, 1, 0), (17, 3, 3), (38, 5, 0), (16, 3, 15), (16, 3, 9), (30, 1, 0)):
    try: socket.socket(family, kind, protocol); print(family, protocol)
    except OSError: pass
socket.socketpair(); socket.socket(16, 3, 0); socket.socket(2, 1); socket.socket(10, 2)
"""
    assert await says(box, source) == b""


async def test_a_terminal_cannot_be_typed_into(box: RemoteBox) -> None:
    source = "import ctypes; print(ctypes.CDLL(None).ioctl(0, ctypes.c_ulong(0x5412 | 1 << 32), b'x'))"
    process = await box.start(["/usr/bin/python3", "-c", source], terminal=(24, 80))
    assert (await process.wait(20)).stdout == b"-1\r\n"


async def test_cores_reach_neither_disk_nor_a_handler(box: RemoteBox) -> None:
    source = """
import resource
print(resource.getrlimit(resource.RLIMIT_CORE))
for how in ((0, 0), (1, 1)):
    try: resource.setrlimit(resource.RLIMIT_CORE, how); print('changed')
    except (OSError, ValueError): print('refused')
"""
    assert await says(box, source) == b"(1, 1)\nrefused\nrefused\n"


async def test_switches_of_the_kernel_cannot_be_opened(box: RemoteBox) -> None:
    source = """
import os
for root, _, names in os.walk('/proc/sys'):
    for name in names:
        try: os.close(os.open(root + '/' + name, os.O_WRONLY | os.O_NONBLOCK)); print(root, name)
        except OSError: pass
"""
    assert await says(box, source) == b""


async def test_the_first_process_shows_no_variable_of_the_node(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEMPERING_SECRET", "canary-91")
    async with await Fleet.connect(state_dir=tmp_path, owner="o", backend=backend) as fleet:
        box = await fleet.create()
        mark = "4017.25"
        await box.start(["sleep", mark])
        for _ in range(100):
            if found := _showing(mark):
                break
            await asyncio.sleep(0.05)
        chain = [*_chain(found[0], fleet.node_pid)]
        assert len(chain) > 3
        assert not [path for path in chain if "canary-91" in _read(path / "environ")]


def _showing(mark: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*") if mark in _read(path / "cmdline")]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _chain(process: Path, until: int) -> list[Path]:
    found: list[Path] = []
    while process.name not in ("0", "1", str(until)):
        found.append(process)
        if "containerd-shim" in _read(process / "cmdline"):
            break
        process = process.parent / _read(process / "stat").rsplit(")", 1)[1].split()[1]
    return found


async def test_folders_of_any_depth_can_be_removed(box: RemoteBox) -> None:
    await says(box, "import os\nfor n in range(1200): os.mkdir('d' * 9); os.chdir('d' * 9); open('f', 'w')")
    await box.exec("mkdir -p ddddddddd/closed/in; touch ddddddddd/closed/in/f; chmod 0 ddddddddd/closed/in")
    await box.remove("/workspace/" + "d" * 9)
    assert await box.list_files() == []


async def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(box: RemoteBox) -> None:
    await box.exec("mkfifo p")
    async with asyncio.timeout(30):
        with pytest.raises(FileError, match=r"ENXIO|No such device"):
            await box.write_file("/workspace/p", b"x")


async def test_files_from_before_1970_come_out(box: RemoteBox, tmp_path: Path) -> None:
    await says(box, "import os; open('f', 'w').close(); os.utime('f', ns=(-(1 << 60), -(1 << 60)))")
    await box.download("/workspace", tmp_path / "out")
    assert (tmp_path / "out" / "f").exists()


async def test_a_snapshot_does_not_fill_holes(box: RemoteBox) -> None:
    await says(box, "import os\nfor n in range(9): os.truncate(os.open(str(n), 66), 8 << 20)")
    with pytest.raises(FileError, match="more than"):
        await box.snapshot()


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 0}, {"memory_bytes": -1}, {"pids": -1}, {"pids": 0}, {"cpus": 0.0}, {"cpus": -1.0},
        {"cpus": float("nan")}, {"cpus": float("inf")}, {"tmpfs_bytes": 0}, {"tmpfs_inodes": -1},
        {"open_files": -1}, {"disk_bytes": -1}, {"pids": "9"}, {"pids": True},
    ],
)  # fmt: skip
def test_limits_of_nothing_are_no_limits(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=next(iter(changes))):
        admit(NodeLimits(), SandboxSpec(limits=replace(Limits(), **changes)), [], [], tmp_path)
    admit(NodeLimits(reserve_bytes=0, reserve_disk_bytes=0), SandboxSpec(), [], [], tmp_path)


async def test_another_owner_cannot_delete_a_journal(fleet: Fleet, box: RemoteBox, state_dir: Path) -> None:
    async with await Fleet.connect(state_dir=state_dir, owner="thief", backend=fleet.backend) as thief:
        await RemoteBox(thief._connection, box.id).close()  # pyright: ignore[reportPrivateUsage]
    assert (await box.exec("echo fine")).stdout == b"fine\n"
    assert (state_dir / "journals" / box.id).exists()


@pytest.mark.parametrize("request_", [{"op": []}, {"op": "run", "box": [], "command": []}, {"op": "hello"}])
async def test_a_request_out_of_shape_is_answered(
    request_: dict[str, Any], fleet: Fleet, state_dir: Path
) -> None:
    connection = await Connection.open(state_dir / SOCKET)
    try:
        with pytest.raises(InfrastructureError, match="the node failed"):
            await asyncio.wait_for(connection.request(request_), 30)
    finally:
        await connection.close()


def test_what_errors_say_can_be_shown() -> None:
    assert str(FileError("a\x1b[2J\r\n\u202eb")) == "a\\x1b[2J\\r\\n\\u202eb"
    assert len(str(FileError("x" * 100_000))) < 700
    assert printable("plain ümläut") == "plain ümläut"
    with pytest.raises(ExitError) as caught:
        ExecResult(3, b"", b"\x1b]0;owned\x07" + b"y" * 100_000).check()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 800


def _tar(**headers: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("a")
        info.pax_headers = headers
        archive.addfile(info)
    return out.getvalue()


def _with_giant_dictionary() -> bytes:
    data = bytearray(lzma.compress(_tar(), filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]))
    data[data.index(b"\x21\x01", 12) + 2] = 40
    end = 12 + (data[12] + 1) * 4
    data[end - 4 : end] = struct.pack("<I", zlib.crc32(bytes(data[12 : end - 4])))
    return bytes(data)


def _zip(method: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("a", bytes(1000))
    return out.getvalue()


@pytest.mark.parametrize(
    "archive",
    [
        _tar(mtime="inf"), _tar(mtime="nan"), _tar(size="-1"), _tar(mtime="9e30"), _with_giant_dictionary(),
        _zip(zipfile.ZIP_LZMA), _zip(zipfile.ZIP_BZIP2), lzma.compress(_tar())[:-40],
    ],
    ids=["endless time", "no time", "no size", "late time", "dictionary", "lzma", "bzip2", "half"],
)  # fmt: skip
def test_archives_that_lie_are_refused(archive: bytes) -> None:
    with pytest.raises(UnsafeTreeError):
        list(read_archive(archive, TreeLimits()))


def test_archives_of_several_xz_streams_are_read() -> None:
    plain = _tar()
    packed = lzma.compress(plain[:700]) + bytes(8) + lzma.compress(plain[700:])
    assert [entry.path for entry, _ in read_archive(packed, TreeLimits())] == ["a"]


def test_buffers_of_sockets_count_as_memory(tmp_path: Path) -> None:
    cgroups.Cgroup.create("probe", Limits(), tmp_path)  # makes no group where there are no controllers
    settings = cgroups._settings(Limits(memory_bytes=77 << 20), False)  # pyright: ignore[reportPrivateUsage]
    assert settings["memory"][cgroups.SOCKETS] == 77 << 20


@pytest.mark.docker
async def test_the_channel_of_a_container_takes_no_second_caller(state_dir: Path) -> None:
    async with await Fleet.connect(backend="docker", state_dir=state_dir, owner="second caller") as fleet:
        box = await fleet.create(SandboxSpec())
        source = f"import socket; socket.socket(socket.AF_UNIX).connect({CHANNEL!r})"
        assert b"ConnectionRefusedError" in await says(box, source)
        assert not [*(state_dir / "channels").iterdir()]
        assert (await box.exec("echo still")).stdout == b"still\n"


@pytest.mark.docker
async def test_a_container_has_a_loopback_by_name_and_nothing_of_the_machine(state_dir: Path) -> None:
    look = (
        "import socket; server = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1];"
        "socket.create_connection(('localhost', port));"
        "print([name for _, name in socket.if_nameindex()], open('/etc/resolv.conf').read())"
    )
    async with await Fleet.connect(backend="docker", state_dir=state_dir, owner="loopback") as fleet:
        assert await says(await fleet.create(SandboxSpec()), look) == b"['lo'] \n"
