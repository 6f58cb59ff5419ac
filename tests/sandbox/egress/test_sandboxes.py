"""Real sandboxes with and without a network: what code in them reaches, phase by phase."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sandbox.backends.registry import backends
from sandbox.client import Fleet, RemoteBox
from sandbox.egress import gate, jail
from sandbox.egress.operator import FILE
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.policy import Denial, Network, Rule
from sandbox.types import Limits, SandboxSpec

PLAIN = SandboxSpec(limits=Limits(memory_bytes=128 << 20, tmpfs_bytes=8 << 20, tmpfs_inodes=2000))

FETCH = """
import json, sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=30).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.headers.get('X-Tempering-Denied'))
    except OSError as error:
        print(type(error).__name__)
"""

PROBE = """
import errno, json, os, socket, sys
secret = json.loads(sys.argv[1])
reached = []

def attempt(name, family, address, kind=socket.SOCK_STREAM, protocol=0):
    try:
        with socket.socket(family, kind, protocol) as sock:
            sock.settimeout(2)
            sock.connect(address)
            if kind != socket.SOCK_STREAM:
                sock.send(b'x')
                sock.recv(1)
            reached.append(name)
    except OSError:
        pass

for host in secret['hosts']:
    for port in secret['ports']:
        attempt(f'tcp {host}:{port}', socket.AF_INET, (host, port))
    attempt(f'udp {host}', socket.AF_INET, (host, secret['udp']), socket.SOCK_DGRAM)
    attempt(f'icmp {host}', socket.AF_INET, (host, 0), socket.SOCK_DGRAM, 1)
for port in secret['ports']:
    attempt('tcp6', socket.AF_INET6, ('::1', port))
    attempt('tcp6', socket.AF_INET6, ('2606:4700::1111', 443))
attempt('abstract', socket.AF_UNIX, '\\0' + secret['abstract'])
for path in ('/run/tempering.sock', '/var/run/docker.sock', *secret['paths']):
    attempt(path, socket.AF_UNIX, path)
for name in ('files.lab', 'a-secret.tunnel.example.com'):
    try:
        reached.append(socket.getaddrinfo(name, 80) and 'name ' + name)
    except OSError:
        pass
proxy = [name for name in os.environ if 'PROXY' in name.upper()]
print(json.dumps({'reached': reached, 'proxy': proxy}))
"""


@pytest.fixture
def spec(state_dir: Path, web: Any) -> Iterator[SandboxSpec]:
    """A sandbox whose setup may read from the lab, and whose solve and verify may do nothing."""
    names = {"files.lab": "127.0.0.1", "other.lab": "127.0.0.1", "inside.lab": "10.0.0.1"}
    (state_dir / FILE).write_text(json.dumps({"private": [f"127.0.0.1:{web.port}"], "names": names}))
    rules = (Rule("files.lab", web.port, private=True), Rule("inside.lab", web.port))
    yield replace(PLAIN, network=Network({"setup": rules, "solve": (), "verify": ()}, "setup"))
    (state_dir / FILE).unlink()


@pytest.fixture
async def online(fleet: Fleet, spec: SandboxSpec) -> AsyncIterator[RemoteBox]:
    async with await fleet.create(spec) as box:
        yield box


async def fetch(box: RemoteBox, *urls: str) -> list[str]:
    result = await box.exec(["python3", "-c", FETCH, *urls], timeout_s=60)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode().splitlines()


async def counted(box: RemoteBox, *expected: str) -> list[Denial]:
    """Returns the denials of a box when all that are expected have been heard of."""
    async with asyncio.timeout(60):
        while True:
            found = await box.denials()
            if sorted(denial.reason for denial in found) == sorted(expected):
                return found
            await asyncio.sleep(0.05)


async def test_phases_decide_what_is_reached(online: RemoteBox, web: Any) -> None:
    files, away = f"http://files.lab:{web.port}/a", f"http://files.lab:{web.port}/away"
    other, inside = f"http://other.lab:{web.port}/", f"http://inside.lab:{web.port}/"
    answers = await fetch(online, files, away, other, inside, "http://169.254.169.254/latest/meta-data")
    assert answers == ["hello", "403 host", "403 host", "403 private", "403 address"]
    python = f"import urllib.request as u; print(u.urlopen('{files}', timeout=30).read())"
    assert (await online.python(python, timeout_s=60)).stdout == b"b'hello'\n"
    await online.phase("solve")
    assert await fetch(online, files) == ["403 host"]
    with pytest.raises(PolicyError, match="did you mean 'setup'"):
        await online.phase("setpu")
    await online.phase("setup")
    assert await fetch(online, files) == ["hello"]
    found = await counted(online, "host", "host", "private", "address")
    assert {(denial.phase, denial.host, denial.count) for denial in found if denial.reason == "host"} == {
        ("setup", "other.lab", 2), ("solve", "files.lab", 1),
    }  # fmt: skip


async def test_a_download_ends_with_its_phase(online: RemoteBox, web: Any) -> None:
    source = (
        "import sys, urllib.request as u\n"
        f"body = u.urlopen('http://files.lab:{web.port}/endless', timeout=60)\n"
        "while data := body.read(1024): print(len(data), flush=True)"
    )
    process = await online.start(["python3", "-c", source])
    assert (await process.logs(wait_s=60)).data
    await online.phase("solve")
    ended = await process.wait(60)
    assert not ended.timed_out and ended.exit_code == 0
    await counted(online, "phase")


async def test_nothing_else_is_reached(fleet: Fleet, online: RemoteBox, web: Any, state_dir: Path) -> None:
    async with await fleet.create(PLAIN) as offline:
        with (
            socket.create_server(("0.0.0.0", 0)) as host,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            datagrams.bind(("0.0.0.0", 0))
            abstract.bind(f"\0tempering-{os.getpid()}")
            abstract.listen()
            secret = {
                "hosts": ["127.0.0.1", "172.17.0.1", "10.0.0.1", "169.254.169.254", "8.8.8.8", own_address()],
                "ports": [host.getsockname()[1], web.port, 53, 80, 443],
                "udp": datagrams.getsockname()[1],
                "abstract": f"tempering-{os.getpid()}",
                "paths": [f"{state_dir}/node.sock", f"{state_dir}/doors/{online.id}"],
            }
            for box in (online, offline):
                result = await box.exec(["python3", "-c", PROBE, json.dumps(secret)], timeout_s=120)
                assert result.exit_code == 0, result.stderr
                found = json.loads(result.stdout)
                assert found["reached"] == []
                assert len(found["proxy"]) == (6 if box is online else 0)
            for listener in (host, datagrams, abstract):
                listener.setblocking(False)
            for sock in (host, abstract):
                with pytest.raises(BlockingIOError):
                    sock.accept()
            with pytest.raises(BlockingIOError):
                datagrams.recv(1)
        assert web.connections == 0
        with pytest.raises(PolicyError, match="has no network"):
            await offline.phase("setup")
        with pytest.raises(PolicyError, match="has no network"):
            await offline.denials()


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


async def test_a_fork_is_in_the_phase_of_its_parent(online: RemoteBox, web: Any) -> None:
    await online.phase("solve")
    (child,) = await online.fork(1)
    assert await fetch(child, f"http://files.lab:{web.port}/") == ["403 host"]
    await child.phase("setup")
    assert await fetch(child, f"http://files.lab:{web.port}/") == ["hello"]
    assert await fetch(online, f"http://files.lab:{web.port}/") == ["403 host"]


async def test_a_switch_is_a_command_of_the_sequence(fleet: Fleet, online: RemoteBox, web: Any) -> None:
    url = f"http://files.lab:{web.port}/"
    assert await fetch(online, url) == ["hello"]
    await online.phase("solve")
    again = await fleet.attach(online.id)
    assert await fetch(again, url) == ["hello"]  # recorded
    assert web.connections == 1
    await again.phase("solve")
    assert await fetch(again, url) == ["403 host"]


@pytest.mark.slow
async def test_a_dead_node_leaves_no_proxy_and_a_replay_finds_its_phase(
    spec: SandboxSpec, state_dir: Path, tmp_path: Path, web: Any
) -> None:
    (tmp_path / FILE).write_text((state_dir / FILE).read_text())
    connect: dict[str, Any] = {"state_dir": tmp_path, "owner": "phases", "backend": "bubblewrap"}
    fleet = await Fleet.connect(**connect)
    box = await fleet.create(spec)
    assert await fetch(box, f"http://files.lab:{web.port}/") == ["hello"]
    await box.phase("solve")
    proxies = proxies_of(fleet.node_pid)
    assert len(proxies) >= 1
    os.kill(fleet.node_pid, signal.SIGKILL)
    await fleet.close()
    async with asyncio.timeout(60):
        while any(map(alive, proxies)):  # noqa: ASYNC110 (they are no children of ours)
            await asyncio.sleep(0.05)
    async with await Fleet.connect(**connect) as fleet:
        box = await fleet.attach(box.id, replay=True)
        assert box.replayed == 2
        assert await fetch(box, f"http://files.lab:{web.port}/") == ["hello"]  # recorded
        await box.phase("solve")
        assert await fetch(box, f"http://files.lab:{web.port}/") == ["403 host"]
        assert [path.name for path in (tmp_path / "doors").iterdir()] == [f"{box.id}-g2"]
        await box.close()
        assert list((tmp_path / "doors").iterdir()) == []


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def proxies_of(node: int) -> set[int]:
    """Returns the processes of a node's proxies."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            if parent == node and b"proxy.main" in (path.parent / "cmdline").read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


async def test_what_the_operator_has_not_opened_is_refused_at_once(
    fleet: Fleet, spec: SandboxSpec, state_dir: Path, web: Any
) -> None:
    network = Network({"setup": (Rule("files.lab", 22, private=True),)}, "setup")
    with pytest.raises(PolicyError, match=r"has not opened files\.lab:22"):
        await fleet.create(replace(PLAIN, network=network))
    (state_dir / FILE).write_text("{")
    with pytest.raises(InfrastructureError, match=FILE):
        await fleet.create(spec)
    async with await fleet.create(PLAIN) as box:
        assert (await box.exec(["true"])).exit_code == 0


def test_a_machine_without_the_means_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert jail.lacking() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "bubblewrap, which is not installed" in jail.lacking()


async def test_a_backend_without_networks_says_so(fleet: Fleet, spec: SandboxSpec, state_dir: Path) -> None:
    assert fleet.capabilities.network
    without = next(
        name for name, backend in backends(state_dir).items() if not backend.capabilities().network
    )
    with pytest.raises(PolicyError, match=f"{without} sandboxes have none"):
        await gate.start(backends(state_dir)[without], state_dir, "box", "owner", spec)
