"""An engine of the test's own: it dies in the middle, and has its groups where it was told to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sandbox.backends import cgroups
from sandbox.client import Fleet
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.types import Limits, SandboxSpec

pytestmark = [pytest.mark.docker, pytest.mark.slow]
SPEC = SandboxSpec(limits=Limits(memory_bytes=64 << 20), journal=False)
UP_S = 60.0


class Engine:
    """A `dockerd` beside the machine's, in a folder whose path is short enough for its sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"unix://{folder}/docker.sock"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        options = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        # In a network of its own: an engine without a bridge removes that of the machine's engine.
        argv = [
            "unshare",
            "--net",
            "dockerd",
            "-H",
            self.url,
            "--bridge=none",
            "--iptables=false",
            "--ip-masq=false",
        ]
        argv += [f"--cgroup-parent=/{self.folder.name}"]
        argv += [f"--{name}={self.folder}/{file}" for name, file in options.items()]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + UP_S
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.folder / "log"
            ).read_text()
            time.sleep(0.1)

    def answers(self) -> bool:
        """Whether it does."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(5)
            link.connect(str(self.folder / "docker.sock"))
            link.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
            return b" 200 " in link.recv(200)
        return False

    def kill(self) -> None:
        """Kills it, with no time for a word; containers run on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Ends it and all that is its own, by the folder that each of its processes names."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if any(str(self.folder) in word for word in process.cmdline()):
                    process.kill()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    folder = Path(tempfile.mkdtemp(prefix="tempering-engine-"))
    engine = Engine(folder)
    try:
        engine.start()
        monkeypatch.setenv("DOCKER_HOST", engine.url)
        yield engine
    finally:
        engine.end()
        for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
            if (at := mount.split()[1]).startswith(str(folder)):
                subprocess.run(["umount", "-l", at], check=False)
        shutil.rmtree(folder, ignore_errors=True)
        roots = (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/"))
        for group in (root / folder.name for root in roots):
            for inner in (*group.glob("*/"), group):
                with contextlib.suppress(OSError):
                    inner.rmdir()


async def test_an_engine_that_dies_in_the_middle(engine: Engine, tmp_path: Path) -> None:
    async with await Fleet.connect(backend="docker", state_dir=tmp_path, owner="me") as fleet:
        box = await fleet.create(SPEC)
        assert (
            await box.python("x = bytearray(200 << 20)")
        ).oom  # its groups are where it was told to have them
        with pytest.raises(PolicyError, match="no image 'no-such-image'"):
            await fleet.create(SandboxSpec(image="no-such-image"))
        with pytest.raises(PolicyError, match="is not the name of an image"):
            await fleet.create(SandboxSpec(image="../../etc"))
        running = asyncio.create_task(box.exec("read line; echo $line", stdin=b"through\n"))
        await asyncio.to_thread(engine.kill)
        assert (await running).stdout == b"through\n"
        assert (await box.exec("echo on")).stdout == b"on\n"  # the engine is not between node and agent
        with pytest.raises(InfrastructureError, match="Docker did not start the sandbox"):
            await fleet.create(SPEC)
        light = await fleet.create(SandboxSpec(backend="bubblewrap"))  # the node goes on
        assert (await light.exec("echo here")).stdout == b"here\n"


async def test_groups_of_any_place_are_found_by_a_process() -> None:
    found = cgroups.groups_of(os.getpid())
    assert found and all(place.is_dir() for place in found.values())
