"""A front and two node agents, each a process of its own, used through the SDK."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from sandbox.channel import encode, read_frame
from sandbox.client import Fleet
from sandbox.errors import LostError, PolicyError, RefusedError
from sandbox.policy import Network, Rule
from sandbox.tokens import NODE_TOKEN, TOKEN, fresh_token
from sandbox.types import Limits, SandboxSpec
from sandbox.versions import API
from sandbox.web import Caller, WebConnection
from sandbox.wire import TYPE, VERSION

ROOT = Path(__file__).parents[2]
SMALL = SandboxSpec(limits=Limits(memory_bytes=64 << 20))


@dataclass
class Cluster:
    """Two nodes and a front on loopback, and who may use it."""

    folder: Path
    tokens: dict[str, str] = field(default_factory=dict)
    node_token: str = ""
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str, token: str = "operator") -> list[str]:
        return [sys.executable, "-m", "rl.launch.cli", "sandbox", *words]

    def environment(self, token: str = "operator") -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if not name.startswith("TEMPER_SANDBOX")}
        return {**keep, "PYTHONPATH": str(ROOT), TOKEN: self.tokens[token], NODE_TOKEN: self.node_token}

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("a") as log:
            process = self.processes[name] = subprocess.Popen(
                self.command(*words, "--audit", str(self.folder / f"{name}.audit")),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment(),
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " serves at " in line, (self.folder / f"{name}.log").read_text()
        self.urls[name] = line.split()[-1]

    def start_node(self, name: str) -> None:
        port = self.urls[name].rpartition(":")[2] if name in self.urls else "0"
        self.start(
            name, "node", "--name", name, "--state", str(self.folder / name), "--port", port,
            "--label", f"zone={name}", "--label", f"unit={name}",
        )  # fmt: skip

    def start_front(self, name: str) -> None:
        self.start(
            name, "serve", "--nodes", str(self.folder / "nodes"), "--access", str(self.folder / "access"),
            "--port", "0",
        )  # fmt: skip

    def stop(self, name: str, number: int = signal.SIGTERM) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()

    def audit(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / f"{name}.audit").read_text().splitlines()]

    def connect(self, owner: str, token: str = "alice", front: str = "front"):
        return Fleet.connect(
            self.urls[front], owner=owner, backend="bubblewrap", lease_s=30.0, token=self.tokens[token]
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("fleet"))
    entries: list[dict[str, str]] = []
    for name, project, role in (
        ("alice", "lab/a", "user"),
        ("bob", "lab/b", "user"),
        ("carol", "small/a", "user"),
        ("dave", "small/b", "user"),
        ("operator", "ops", "operator"),
    ):
        cluster.tokens[name], sha256 = fresh_token()
        entries.append({"name": name, "sha256": sha256, "project": project, "role": role})
    cluster.tokens["stranger"], _ = fresh_token()
    cluster.node_token, _ = fresh_token()
    quotas = {"small": {"sandboxes": 6}, "small/b": {"sandboxes": 2}}
    (cluster.folder / "access").write_text(json.dumps({"version": 1, "projects": quotas, "tokens": entries}))
    (cluster.folder / "access").chmod(0o600)
    try:
        cluster.start_node("one")
        cluster.start_node("two")
        lines = [f"{name} {cluster.urls[name]}  # a node" for name in ("one", "two")]
        (cluster.folder / "nodes").write_text("\n".join(lines))
        cluster.start_front("front")
        yield cluster
    finally:
        for name in list(cluster.processes):
            cluster.stop(name)
        for name in ("one", "two"):
            record = cluster.folder / name / "node.json"
            if record.exists():
                os.kill(json.loads(record.read_text())["pid"], signal.SIGTERM)


@pytest.fixture
async def fleet(cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with await cluster.connect(request.node.name) as fleet:
        yield fleet


async def test_the_same_calls_as_on_this_machine(fleet: Fleet, tmp_path: Path) -> None:
    async with await fleet.create(SMALL, key="mine") as box:
        assert box.id.partition(".")[0] in ("one", "two")
        result = await box.exec("cat; echo err >&2; exit 3", stdin=b"in")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"in", b"err\n")
        assert (await box.python("print(6 * 7)")).stdout == b"42\n"
        await box.write_file("/workspace/a/b", bytes(range(256)) * 1000)
        assert await box.read_file("/workspace/a/b") == bytes(range(256)) * 1000
        async with box.stream("echo 1; sleep 0.3; echo 2") as stream:
            pieces = [piece.data async for piece in stream]
        assert pieces == [b"1\n", b"2\n"]
        assert (await fleet.create(SMALL, key="mine")).id == box.id
        assert [other.id for other in await fleet.boxes()] == [box.id]
        (child,) = await box.fork()
        assert child.id.partition(".")[0] == box.id.partition(".")[0]
        assert len(await child.read_file("/workspace/a/b")) == 256000
        await child.close()
    assert await fleet.boxes() == []


async def test_phases_and_denials_are_had_through_a_front(fleet: Fleet, cluster: Cluster) -> None:
    look = "import urllib.request as u; u.urlopen('http://nowhere.lab/', timeout=30)"
    network = Network({"setup": (Rule(registry="debian"),), "solve": ()}, "setup")
    async with await fleet.create(replace(SMALL, network=network)) as box:
        await box.phase("solve")
        with pytest.raises(PolicyError, match="did you mean 'solve'"):
            await box.phase("sovle")
        assert b"403" in (await box.exec(["python3", "-c", look])).stderr
        (denial,) = await box.denials()
        assert (denial.phase, denial.reason, denial.host) == ("solve", "host", "nowhere.lab")
        url = f"{cluster.urls[box.id.partition('.')[0]]}/metrics"
    headers = {"Authorization": f"Bearer {cluster.node_token}"}
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            async with session.get(url, headers=headers) as response:
                if 'temper_sandbox_node{what="denied_host"} 1' in (await response.text()).splitlines():
                    return
            await asyncio.sleep(0.1)


async def test_a_label_names_the_node_and_one_that_nobody_has_is_an_error(fleet: Fleet) -> None:
    for zone in ("one", "two"):
        box = await fleet.create(SandboxSpec(limits=SMALL.limits, labels={"node.zone": zone}))
        assert box.id.startswith(f"{zone}.")
        await box.close()
    with pytest.raises(PolicyError, match="no node of this fleet is of the kind"):
        await fleet.create(SandboxSpec(labels={"node.zone": "three"}))
    with pytest.raises(PolicyError, match="no node of this fleet is of the kind"):
        await fleet.create(SandboxSpec(limits=Limits(memory_bytes=1 << 60)))


async def test_a_cancelled_caller_kills_its_command(fleet: Fleet) -> None:
    async with await fleet.create(SMALL) as box:
        task = asyncio.create_task(box.exec("touch begun; sleep 77"))
        assert (await box.exec("while ! test -e begun; do sleep 0.05; done")).exit_code == 0
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gone = "while grep -qsl '^sleep.77' /proc/*/cmdline; do sleep 0.05; done"
        assert (await box.exec(gone, timeout_s=20)).exit_code == 0


async def test_one_token_sees_nothing_of_another(cluster: Cluster, fleet: Fleet) -> None:
    box = await fleet.create(SMALL)
    async with await cluster.connect(fleet.owner, "bob") as other:
        assert await other.boxes() == []
        with pytest.raises(LostError):
            await other.attach(box.id)
    assert (await box.exec("true")).exit_code == 0, "the other's release has ended it"
    with pytest.raises(PolicyError, match="token"):
        await cluster.connect("x", "stranger")
    await box.close()


async def test_nested_quotas(cluster: Cluster) -> None:
    async with await cluster.connect("q", "dave") as other, await cluster.connect("q", "carol") as fleet:
        made = await asyncio.gather(*(other.create(SMALL) for _ in range(4)), return_exceptions=True)
        refused = [error for error in made if isinstance(error, RefusedError)]
        assert len(refused) == 2
        assert {error.reason for error in refused} == {"quota"}
        assert "project small/b" in str(refused[0])
        for _ in range(4):
            await fleet.create(SMALL)
        with pytest.raises(RefusedError, match="project small would"):
            await fleet.create(SMALL)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\u202eb", "\ud800"])
async def test_an_owner_cannot_speak_to_an_operator_s_terminal(cluster: Cluster, name: str) -> None:
    with pytest.raises(PolicyError, match="printable"):
        await cluster.connect(name)


async def test_a_draining_node_gets_nothing_and_keeps_what_it_has(cluster: Cluster, fleet: Fleet) -> None:
    there = await fleet.create(SandboxSpec(limits=SMALL.limits, labels={"node.zone": "one"}))
    drain = cluster.command("drain", "one", "--url", cluster.urls["front"])
    await asyncio.to_thread(subprocess.run, drain, env=cluster.environment(), check=True, capture_output=True)
    try:
        boxes = [await fleet.create(SMALL) for _ in range(3)]
        assert {box.id.partition(".")[0] for box in boxes} == {"two"}
        assert (await there.exec("true")).exit_code == 0
        with pytest.raises(RefusedError) as caught:
            await fleet.create(SandboxSpec(labels={"node.zone": "one"}))
        assert caught.value.reason in ("draining", "sandboxes")
    finally:
        on = [*drain, "--off"]
        quiet = {"env": cluster.environment(), "check": True, "capture_output": True}
        await asyncio.to_thread(subprocess.run, on, **quiet)


async def test_agent_and_front_can_be_killed_and_nothing_is_lost(cluster: Cluster) -> None:
    fleet = await cluster.connect("killed")
    spec = SandboxSpec(limits=SMALL.limits, labels={"node.zone": "one"})
    box = await fleet.create(spec, key="k")
    assert (await box.exec("echo kept > f; echo once")).stdout == b"once\n"
    cluster.stop("one", signal.SIGKILL)
    others = [await fleet.create(SMALL) for _ in range(2)]
    assert {other.id.partition(".")[0] for other in others} == {"two"}
    cluster.stop("front", signal.SIGKILL)
    with pytest.raises(LostError):
        await box.exec("true")
    await fleet.close(release=False)
    cluster.start_node("one")
    cluster.start_front("front")
    async with await cluster.connect("killed") as again:
        assert (await again.create(spec, key="k")).id == box.id
        same = await again.attach(box.id)
        assert (await same.exec("echo kept > f; echo once")).stdout == b"once\n"
        assert (await same.exec("cat f")).stdout == b"kept\n"
        assert (same.generation, same.replayed) == (1, 0)


async def test_a_second_front_finds_what_the_first_made(cluster: Cluster, fleet: Fleet) -> None:
    cluster.start_front("other")
    try:
        box = await fleet.create(SMALL, key="shared")
        other = await cluster.connect(fleet.owner, front="other")
        assert (await other.create(SMALL, key="shared")).id == box.id
        assert (await (await other.attach(box.id)).exec("true")).exit_code == 0
        await other.close(release=False)
    finally:
        cluster.stop("other")


async def test_every_path_wants_a_token_and_a_version_that_is_served(cluster: Cluster) -> None:
    ping = encode({"op": "ping"})
    bearer = {"Authorization": f"Bearer {cluster.tokens['alice']}", "Content-Type": TYPE}
    async with aiohttp.ClientSession() as session:
        for name in ("front", "one"):
            for path, method in (("call", "POST"), ("metrics", "GET"), ("health", "GET"), ("none", "GET")):
                async with session.request(method, f"{cluster.urls[name]}/{path}") as response:
                    assert response.status == 401, (name, path)
        for version, status in ((API, 200), (API - 1, 200), (API - 2, 400), (API + 1, 400), ("", 400)):
            headers = {**bearer, VERSION: str(version)}
            call = session.post(f"{cluster.urls['front']}/call", data=ping, headers=headers)
            async with call as response:
                assert response.status == status
                assert response.headers[VERSION] == str(API)
        for body in (b"", ping[:-1], encode({}), encode({"op": "load"}), encode({"op": "run", "box": 3})):
            headers = {**bearer, VERSION: str(API)}
            async with session.post(f"{cluster.urls['front']}/call", data=body, headers=headers) as response:
                assert response.status in (400, 403, 410)
                assert "error" in (await read_frame(response.content))[0]


async def test_a_client_of_version_2_is_served(cluster: Cluster) -> None:
    """The recorded calls of a version 2 client: create, run, files, processes, close."""
    calls = json.loads((ROOT / "tests/data/sandbox_api/version_2.json").read_text())
    headers = {"Authorization": f"Bearer {cluster.tokens['alice']}", "Content-Type": TYPE, VERSION: "2"}
    box = ""
    async with aiohttp.ClientSession() as session:
        for call in calls:
            header = {**call["header"], **({"box": box} if "box" in call["header"] else {})}
            data = encode(header, call["body"].encode())
            async with session.post(f"{cluster.urls['front']}/call", data=data, headers=headers) as response:
                reply, body = await read_frame(response.content)
            assert response.status == 200, reply
            box = reply.get("box", box)
            assert {name: reply.get(name) for name in call["reply"]} == call["reply"]
            assert {*reply.get("capabilities", ())}.isdisjoint({"stateful", "layers"})  # not known to it
            assert body.decode() == call["output"]


async def test_what_operators_see(cluster: Cluster, fleet: Fleet) -> None:
    box = await fleet.create(SMALL)
    await box.exec("echo secret")
    front = ["--url", cluster.urls["front"]]

    async def run(*words: str, token: str = "operator") -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run, cluster.command(*words, *front), env=cluster.environment(token),
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    listed, stats, denied = await asyncio.gather(run("ls"), run("stats"), run("stats", token="bob"))
    assert f"lab/a:{fleet.owner}" in listed.stdout
    assert [line.split()[0] for line in stats.stdout.splitlines()] == ["NODE", "one", "two"]
    assert (denied.returncode, denied.stdout) == (1, "")
    assert "does not operate" in denied.stderr
    async with aiohttp.ClientSession() as session:
        for name, token in (("front", cluster.tokens["operator"]), ("one", cluster.node_token)):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get(f"{cluster.urls[name]}/metrics", headers=headers) as response:
                text = await response.text()
            assert response.status == 200
            assert 'op="run",outcome="ok"' in text or name == "one"
    lines = cluster.audit("front")
    mine = [line for line in lines if line.get("owner") == fleet.owner and line.get("op") == "create"]
    assert (mine[0]["principal"], mine[0]["project"], mine[0]["box"]) == ("alice", "lab/a", box.id)
    assert "secret" not in json.dumps(lines)
    assert any(line["event"] == "denied" for line in lines)


async def until_warm(fleet: Fleet, cluster: Cluster, count: int) -> None:
    """Waits until the front has heard that so many sandboxes wait on one node."""
    operator = WebConnection(Caller(cluster.urls["front"], cluster.tokens["operator"]), "operator", 0.0)
    try:
        async with asyncio.timeout(60):
            while True:
                nodes = (await operator.request({"op": "stats"}))[0]["nodes"]
                if max(node["warm"] for node in nodes.values()) == count:
                    return
                await asyncio.sleep(0.1)
    finally:
        await operator.close()


async def test_a_group_is_claimed_on_the_node_that_has_it_ready(cluster: Cluster, fleet: Fleet) -> None:
    spec = SandboxSpec(limits=Limits(memory_bytes=64 << 20, cpus=0.7))
    await fleet.warm(spec, 3)
    await until_warm(fleet, cluster, 3)
    with pytest.raises(RefusedError, match=r"no node has 4 warm .* one has 3") as refused:
        await fleet.claim(spec, 4, fallback="refuse")
    assert refused.value.reason == "pool"
    group = await fleet.claim(spec, 2, fallback="refuse")
    assert len({box.id.partition(".")[0] for box in group}) == 1
    assert [(await box.exec("echo $PWD")).stdout for box in group] == [b"/workspace\n"] * 2
    assert {box.id for box in await fleet.boxes()} == {box.id for box in group}
    home = group[0].id.partition(".")[0]
    assert (await fleet.create(spec)).id.startswith(f"{home}.")  # which has one more ready
    fresh = await fleet.claim(SMALL, 3)
    assert len({box.id.partition(".")[0] for box in fresh}) == 1
    await fleet.warm(spec, 0)
    await until_warm(fleet, cluster, 0)


async def test_a_claim_is_made_once_through_any_front(cluster: Cluster, fleet: Fleet) -> None:
    first = await fleet.claim(SMALL, 2, key="group")
    again = await fleet.claim(SMALL, 2, key="group")
    assert [box.id for box in first] == [box.id for box in again]


async def test_fronts_together_do_not_pass_a_quota_on_a_node(cluster: Cluster) -> None:
    spec = SandboxSpec(limits=SMALL.limits, labels={"node.zone": "one"})
    cluster.start_front("rival")
    try:
        async with (
            await cluster.connect("many", "carol") as here,
            await cluster.connect("many", "carol", "rival") as there,
        ):
            # Neither front has heard of what the other is making when it is asked.
            making = [fleet.create(spec) for _ in range(4) for fleet in (here, there)]
            made = await asyncio.gather(*making, return_exceptions=True)
            refused = [error for error in made if isinstance(error, BaseException)]
            assert len(refused) == 2, refused
            assert all(isinstance(error, RefusedError) and error.reason == "quota" for error in refused)
    finally:
        cluster.stop("rival")


async def test_how_it_is_and_what_it_uses(cluster: Cluster, fleet: Fleet) -> None:
    box = await fleet.create(SMALL)
    busy = asyncio.create_task(box.exec("i=0; while :; do i=$((i+1)); done", timeout_s=60))

    words = cluster.command("top", "--once", "--sort", "owner", "--url", cluster.urls["front"])
    top = await asyncio.to_thread(
        subprocess.run, words, env=cluster.environment(), capture_output=True, text=True, check=False
    )
    (row,) = (line.split() for line in top.stdout.splitlines() if line.startswith(box.id))
    assert row[:4] == [box.id, f"lab/a:{fleet.owner}", "running", "bubblewrap"]
    assert row[-1] == "1" and "M/64M" in row[8]
    bob = WebConnection(Caller(cluster.urls["front"], cluster.tokens["bob"]), "x", 0.0)
    assert (await bob.request({"op": "top"}))[0]["rows"] == []
    await bob.close()
    for name, said in (("front", {"nodes": 2, "up": 2}), ("one", {"draining": False})):
        caller = Caller(cluster.urls[name], cluster.node_token)
        assert json.loads(await caller.get("/health")) == {"api": API, "ok": True, **said}
        await caller.close()
    busy.cancel()
    with pytest.raises(asyncio.CancelledError):
        await busy


def test_a_front_without_tokens_or_open_to_all_does_not_start(cluster: Cluster) -> None:
    words = cluster.command("serve", "--nodes", str(cluster.folder / "nodes"), "--port", "0")
    environment = cluster.environment()
    del environment[TOKEN]
    for extra, why in (([], "there is no token"), (["--host", "0.0.0.0"], "--public")):
        environment |= {TOKEN: "x" * 20} if extra else {}
        done = subprocess.run(
            [*words, *extra], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert why in done.stderr
        assert "Traceback" not in done.stderr
