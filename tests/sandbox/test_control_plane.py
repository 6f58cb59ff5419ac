"""Clients, nodes and their deaths: nothing stays that nobody owns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from sandbox.client import Fleet
from sandbox.errors import (
    BackendMissingError,
    InfrastructureError,
    LostError,
    PolicyError,
    RefusedError,
    SandboxError,
)
from sandbox.types import Limits, SandboxSpec

Alive = Callable[[Iterable[psutil.Process]], list[psutil.Process]]
ROOT = str(Path(__file__).parents[2])
SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))


@pytest.fixture
def own(tmp_path: Path, alive: Alive) -> Iterator[Path]:
    """A state folder of this test alone; its node is ended, and must leave no process."""
    yield tmp_path
    for process in nodes(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = processes(process.pid)
            process.terminate()
            wait(lambda tree=tree: not alive(tree))


def nodes(state_dir: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "sandbox.node" in process.cmdline() and str(state_dir) in process.cmdline():
                found.append(process)
    return found


def processes(node_pid: int) -> list[psutil.Process]:
    node = psutil.Process(node_pid)
    return [node, *node.children(recursive=True)]


def wait(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def cgroups_of(node_pid: int) -> list[Path]:
    return [path for path in Path("/sys/fs/cgroup").glob(f"*/tempering/{node_pid}-*") if path.is_dir()]


def client(state_dir: Path, body: str, lease_s: float = 60.0) -> subprocess.Popen[str]:
    """A client in a process of its own; it prints what `body` prints, and then sleeps."""
    source = f"""
import asyncio
from pathlib import Path
from sandbox.client import Fleet
from sandbox.types import Limits, SandboxSpec

async def main():
    fleet = await Fleet.connect(
        "local", backend="bubblewrap", state_dir=Path({str(state_dir)!r}), owner="dead", lease_s={lease_s})
    spec = SandboxSpec(limits=Limits(memory_bytes=64 << 20))
{textwrap.indent(textwrap.dedent(body), "    ")}
    await asyncio.sleep(600)

asyncio.run(main())
"""
    return subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


async def connect(state_dir: Path, owner: str = "me", **options: float) -> Fleet:
    return await Fleet.connect("local", backend="bubblewrap", state_dir=state_dir, owner=owner, **options)


async def test_a_killed_client_leaves_nothing_once_its_lease_ends(own: Path, alive: Alive) -> None:
    body = """
    boxes = [await fleet.create(spec) for _ in range(2)]
    commands = [asyncio.create_task(box.exec("setsid sleep 999 & sleep 999")) for box in boxes]
    await boxes[0].exec("true")
    print(fleet.node_pid, flush=True)
    """
    process = client(own, body, lease_s=1.0)
    assert process.stdout is not None
    node = int(await asyncio.to_thread(process.stdout.readline))
    tree = processes(node)
    assert len(tree) > 5
    kill(process)
    await asyncio.to_thread(wait, lambda: len(alive(tree)) <= 1)
    await asyncio.to_thread(wait, lambda: not alive(tree))  # a node that nobody needs ends itself
    assert not cgroups_of(node) and not (own / "node.sock").exists()


async def test_a_node_that_takes_a_connection_while_it_ends_is_not_the_one_that_serves(own: Path) -> None:
    taken = 0

    async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        taken += 1
        if taken == 2:
            dying.close()
            (own / "node.sock").unlink()
        writer.close()

    dying = await asyncio.start_unix_server(end, own / "node.sock")
    async with await connect(own) as fleet:
        assert (await (await fleet.create(SMALL)).exec("echo served")).stdout == b"served\n"
    assert taken == 2


async def test_the_next_client_of_an_owner_finds_its_sandboxes(own: Path) -> None:
    body = """
    box = await fleet.create(spec)
    await box.write_file("/workspace/x", b"kept")
    print(box.id, flush=True)
    """
    process = client(own, body)
    assert process.stdout is not None
    name = (await asyncio.to_thread(process.stdout.readline)).strip()
    kill(process)
    async with await connect(own, "other") as other:
        assert await other.boxes() == []
        with pytest.raises(LostError):
            await type(await other.create(SMALL))(other._connection, name).exec("true")
    async with await connect(own, "dead") as fleet:
        (box,) = await fleet.boxes()
        assert box.id == name
        assert await box.read_file("/workspace/x") == b"kept"


async def test_reclaim_ends_what_no_resumable_run_owns(own: Path) -> None:
    process = client(own, "await fleet.pool(spec, 2); print(fleet.node_pid, flush=True)")
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    async with await connect(own, "alive") as fleet:
        box = await fleet.create(SMALL)
        kill(process)
        await asyncio.sleep(0.3)
        assert (await Fleet.reclaim(own, {"dead"})).total == 0
        assert (await Fleet.reclaim(own)).sandboxes == {"dead": 2}
        assert (await Fleet.reclaim(own)).total == 0
        assert (await box.exec("true")).exit_code == 0


async def test_reclaim_without_a_node(tmp_path: Path) -> None:
    assert (await Fleet.reclaim(tmp_path / "none")).total == 0


async def test_a_killed_node_takes_everything_along(own: Path, alive: Alive) -> None:
    async with await connect(own) as fleet:
        boxes = [await fleet.create(SMALL) for _ in range(2)]
        running = asyncio.create_task(boxes[0].exec("setsid sleep 999 & sleep 999"))
        await boxes[0].exec("true")
        node, tree = fleet.node_pid, processes(fleet.node_pid)
        os.kill(node, signal.SIGKILL)
        with pytest.raises(LostError, match="node is gone"):
            await running
        with pytest.raises(LostError, match="node is gone"):
            await boxes[1].exec("true")
        await asyncio.to_thread(wait, lambda: not alive(tree))
    async with await connect(own) as fleet:
        assert fleet.node_pid != node
        assert await fleet.boxes() == []
        assert (await (await fleet.create(SMALL)).exec("true")).exit_code == 0
        assert not cgroups_of(node)


async def test_an_interrupt_of_the_client_does_not_reach_the_node(own: Path) -> None:
    process = client(own, "box = await fleet.create(spec); print(fleet.node_pid, flush=True)")
    assert process.stdout is not None
    node = psutil.Process(int(await asyncio.to_thread(process.stdout.readline)))
    assert node.ppid() not in (process.pid, os.getpid())
    assert os.getsid(node.pid) != os.getsid(process.pid)
    kill(process)
    assert node.is_running()


async def test_clients_that_start_at_once_share_one_node(own: Path) -> None:
    fleets = await asyncio.gather(*(connect(own, f"owner-{n}") for n in range(6)))
    assert len({fleet.node_pid for fleet in fleets}) == 1 and len(nodes(own)) == 1
    assert (own / "node.sock").stat().st_mode & 0o777 == 0o600
    await asyncio.gather(*(fleet.close() for fleet in fleets))


async def test_a_client_that_comes_while_the_node_ends_gets_another(own: Path) -> None:
    async with await connect(own) as first:
        os.kill(first.node_pid, signal.SIGTERM)
        async with await connect(own) as second:
            assert (await (await second.create(SMALL)).exec("true")).exit_code == 0


async def test_a_node_that_is_full_refuses_at_once(own: Path) -> None:
    command = [sys.executable, "-m", "sandbox.node", str(own), "--detach", "--max-sandboxes", "2"]
    env = {**os.environ, "PYTHONPATH": ROOT}
    started = await asyncio.to_thread(
        subprocess.run, command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
    )
    assert started.stdout == b"ready"
    async with await connect(own) as fleet:
        made = await asyncio.gather(*(fleet.create(SMALL) for _ in range(8)), return_exceptions=True)
        refusals = [error for error in made if isinstance(error, RefusedError)]
        assert len(refusals) == 6 and {error.reason for error in refusals} == {"sandboxes"}
        assert len(await fleet.boxes()) == 2
        await (await fleet.boxes())[0].close()
        await fleet.create(SMALL)


async def test_what_never_fits_is_refused_for_good(own: Path) -> None:
    async with await connect(own) as fleet:
        with pytest.raises(PolicyError, match="MiB"):
            await fleet.create(SandboxSpec(limits=Limits(memory_bytes=1 << 50)))
        with pytest.raises(PolicyError, match="no base layer"):
            await fleet.create(SandboxSpec(image="debian"))
        with pytest.raises(PolicyError, match="at least one"):
            await fleet.pool(SMALL, 0)


async def test_a_sandbox_that_nobody_uses_ends(own: Path) -> None:
    async with await connect(own) as fleet:
        box = await fleet.create(SandboxSpec(limits=SMALL.limits, ttl_s=1.0))
        for _ in range(4):
            await asyncio.sleep(0.4)
            await box.exec("true")
        await asyncio.sleep(2.5)
        with pytest.raises(LostError):
            await box.exec("true")


async def test_a_stopped_agent_is_found_out(own: Path, monkeypatch: pytest.MonkeyPatch, alive: Alive) -> None:
    async with await connect(own) as fleet:
        box = await fleet.create(SMALL)
        tree = processes(fleet.node_pid)
        agents = [p for p in tree if "agent.agent" in " ".join(p.cmdline()) and p.name() != "bwrap"]
        for process in agents:
            process.suspend()
        start = time.monotonic()
        with pytest.raises(LostError, match="did not answer"):
            await box.exec("true", timeout_s=0.5)
        assert time.monotonic() - start < 12
        await asyncio.to_thread(wait, lambda: not alive(agents))


async def test_a_cancelled_creation_leaves_nothing(own: Path) -> None:
    async with await connect(own) as fleet:
        for delay in (0.0, 0.01, 0.05, 0.1):
            task = asyncio.create_task(fleet.create(SMALL))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
        deadline = time.monotonic() + 30  # the start that was prepared for the next goes after seconds
        while await fleet.boxes() or len(processes(fleet.node_pid)) > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def test_no_backend_names_both_ways_to_get_one(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{own}/none.sock")
    with pytest.raises(BackendMissingError) as caught:
        await Fleet.connect("local", backend="auto", state_dir=own, owner="me")
    assert "apt-get install bubblewrap" in str(caught.value) and "Docker engine" in str(caught.value)
    for name in ("docker", "bubblewrap"):
        with pytest.raises(BackendMissingError, match=name):
            await Fleet.connect("local", backend=name, state_dir=own, owner="me")
    with pytest.raises(BackendMissingError, match="there are docker, bubblewrap"):
        await Fleet.connect("local", backend="chroot", state_dir=own, owner="me")


async def test_auto_without_docker_takes_bubblewrap(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{own}/none.sock")
    async with await Fleet.connect("local", state_dir=own, owner="me") as fleet:
        assert fleet.backend == "bubblewrap"


@pytest.mark.docker
async def test_auto_prefers_docker(own: Path) -> None:
    async with await Fleet.connect("local", state_dir=own, owner="me") as fleet:
        assert fleet.backend == "docker" and fleet.capabilities.images


async def test_only_fleets_that_there_can_be_and_named_owners(own: Path) -> None:
    with pytest.raises(PolicyError, match="local"):
        await Fleet.connect("there", state_dir=own, owner="me", token="t" * 20)
    with pytest.raises(PolicyError, match="state_dir"):
        await Fleet.connect("local", owner="me")
    with pytest.raises(PolicyError, match="owner"):
        await Fleet.connect("local", state_dir=own, owner="")


async def test_a_node_that_does_not_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "node.sock").mkdir()
    with pytest.raises(InfrastructureError, match="does not start"):
        await connect(tmp_path)


async def test_a_client_that_does_not_speak_the_protocol_is_cut_off(own: Path) -> None:
    async with await connect(own) as fleet:
        reader, writer = await asyncio.open_unix_connection(own / "node.sock")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        for request in ({"op": "nonsense"}, {"op": "hello"}, {"op": "run", "box": "x"}, {"op": "create"}):
            with pytest.raises(SandboxError):
                await fleet._connection.request(request)
        assert (await (await fleet.create(SMALL)).exec("true")).exit_code == 0


@pytest.mark.docker
async def test_containers_end_with_their_node(own: Path) -> None:
    import docker

    async with await Fleet.connect("local", backend="docker", state_dir=own, owner="me") as fleet:
        box = await fleet.create(SMALL)
        running = asyncio.create_task(box.exec("sleep 999"))
        await box.exec("true")
        client = docker.from_env()
        ours = {"label": f"tempering.state_dir={own}"}
        try:
            (container,) = client.containers.list(filters=ours)
            settings = client.api.inspect_container(container.id)["HostConfig"]
            assert settings["NetworkMode"] == "none" and settings["ReadonlyRootfs"]
            assert settings["CapDrop"] == ["ALL"]
            os.kill(fleet.node_pid, signal.SIGKILL)
            with pytest.raises(LostError):
                await running
            wait(lambda: not client.containers.list(all=True, filters=ours, ignore_removed=True))
        finally:
            client.close()


@pytest.mark.docker
async def test_the_next_node_removes_containers_that_stayed(own: Path) -> None:
    import docker

    from sandbox.images import ensure_image

    client = docker.from_env()
    try:
        left, other = (
            client.containers.create(ensure_image(client), ["sleep", "1"], labels={"tempering.state_dir": of})
            for of in (str(own), "/else")
        )
        async with await connect(own):
            names = {c.id for c in client.containers.list(all=True, ignore_removed=True)}
            assert left.id not in names and other.id in names
        other.remove(force=True)
    finally:
        client.close()
