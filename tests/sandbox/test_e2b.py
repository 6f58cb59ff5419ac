"""Clients of the E2B SDK (the official one, blocking and async) against a front of this machine."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    PtySize,
    RateLimitException,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

from sandbox.tokens import fresh_token

ROOT = Path(__file__).parents[2]
TEMPLATES = {
    "base": {"backend": "bubblewrap", "spec": {"limits": {"memory_bytes": 128 << 20}}},
    "docker": {"backend": "docker", "spec": {"limits": {"memory_bytes": 128 << 20}}},
    "home": {"backend": "bubblewrap", "cwd": "/tmp", "env": {"COLOUR": "red", "SHAPE": "round"}},
    "small": {"backend": "bubblewrap", "spec": {"limits": {"tmpfs_bytes": 1 << 20}}},
}


@dataclass
class Service:
    """A front with E2B beside it, in a process of its own."""

    folder: Path
    tokens: dict[str, str] = field(default_factory=dict)
    projects: dict[str, str] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, *, access: bool = True) -> None:
        """Starts it, at the port where it was before."""
        for name, project in (("alice", "lab/a"), ("bob", "lab/b"), ("carol", "small")):
            self.tokens.setdefault(name, fresh_token()[0])
            self.projects[name] = project
        entries = [
            {
                "name": name,
                "sha256": hashlib.sha256(token.encode()).hexdigest(),
                "project": self.projects[name],
            }
            for name, token in self.tokens.items()
        ]
        file, templates = self.folder / "access", self.folder / "templates"
        file.touch(0o600)
        quotas = {"small": {"sandboxes": 1}}
        file.write_text(json.dumps({"version": 1, "projects": quotas, "tokens": entries}))
        templates.write_text(json.dumps({"version": 1, "templates": TEMPLATES}))
        port = self.urls.get("e2b", ":0").rpartition(":")[2]
        command = [sys.executable, "-m", "rl.launch.cli", "sandbox", "serve", "--local", "--port", "0"]
        command += ["--state", str(self.folder), "--e2b", f"127.0.0.1:{port}"]
        command += ["--access", str(file)] if access else []
        command += ["--audit", str(self.folder / "audit"), "--e2b-templates", str(templates)]
        keep = {name: value for name, value in os.environ.items() if not name.startswith("TEMPER_SANDBOX")}
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**keep, "PYTHONPATH": str(ROOT)}
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            name, serves, url = line.strip().partition(" serves at ")
            self.urls |= {name: url} if serves else {}
            if name == "e2b":
                return
        raise AssertionError((self.folder / "log").read_text())

    def stop(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(30) == 0, (self.folder / "log").read_text()
        self.process.stdout.close()

    def end_node(self) -> None:
        record = self.folder / "node.json"
        if record.exists():
            os.kill(json.loads(record.read_text())["pid"], signal.SIGTERM)

    def options(self, who: str = "alice") -> dict[str, Any]:
        url = self.urls["e2b"]
        return {"api_key": self.tokens[who], "api_url": url, "sandbox_url": url, "retries": 0}

    def wait_until_gone(self, sandbox: Sandbox) -> None:
        deadline = time.monotonic() + 60
        while sandbox.is_running():
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("e2b"))
    try:
        service.start()
        yield service
    finally:
        service.stop()
        service.end_node()


@pytest.fixture(scope="module", params=["base", pytest.param("docker", marks=pytest.mark.docker)])
def box(service: Service, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(request.param, timeout=600, **service.options())
    yield sandbox
    sandbox.kill()


def test_commands_and_their_streams(box: Sandbox) -> None:
    heard: list[tuple[str, str]] = []
    result = box.commands.run(
        "echo out $A; sleep 0.1; echo err >&2; sleep 0.1; pwd", envs={"A": "b"}, cwd="/tmp",
        on_stdout=lambda text: heard.append(("out", text)),
        on_stderr=lambda text: heard.append(("err", text)),
    )  # fmt: skip
    assert (result.stdout, result.stderr, result.exit_code) == ("out b\n/tmp\n", "err\n", 0)
    assert heard[0] == ("out", "out b\n") and ("err", "err\n") in heard[1:-1]
    with pytest.raises(CommandExitException) as failed:
        box.commands.run("echo so >&2; exit 7")
    assert (failed.value.exit_code, failed.value.stderr) == (7, "so\n")
    with pytest.raises(CommandExitException) as killed:
        box.commands.run("kill -9 $$")
    assert killed.value.exit_code == 137
    assert box.commands.run("cat").stdout == ""  # no input unless asked for


def test_no_output_is_lost_however_much_there_is(box: Sandbox) -> None:
    result = box.commands.run("seq 1 400000; seq 1 400000 >&2")
    wanted = "".join(f"{number}\n" for number in range(1, 400_001))
    assert result.stdout == wanted
    assert result.stderr == wanted
    mixed = box.commands.run("for i in $(seq 2000); do echo $i; echo $i >&2; done")
    assert mixed.stdout == mixed.stderr == "".join(f"{number}\n" for number in range(1, 2001))


def test_background_commands_with_input(box: Sandbox) -> None:
    handle = box.commands.run("cat; echo done", background=True, stdin=True)
    assert handle.pid in [process.pid for process in box.commands.list()]
    box.commands.send_stdin(handle.pid, "one\n")
    handle.send_stdin("two\n")
    box.commands.stream_input(handle.pid, ["three\n", b"four\n"])
    box.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\nthree\nfour\ndone\n"
    assert handle.pid not in [process.pid for process in box.commands.list()]
    assert handle.kill() is False
    with pytest.raises(SandboxException, match="no process"):
        box.commands.send_stdin(handle.pid, "late")


def test_a_command_goes_on_without_its_client_and_is_found_again(box: Sandbox) -> None:
    handle = box.commands.run(
        "echo begun; read line; echo got $line", background=True, stdin=True, timeout=300
    )
    handle.disconnect()
    (process,) = [process for process in box.commands.list() if process.pid == handle.pid]
    assert (process.cmd, process.args[-1]) == ("/bin/bash", "echo begun; read line; echo got $line")
    again = box.commands.connect(handle.pid)
    box.commands.send_stdin(handle.pid, "it\n")
    assert again.wait().stdout.endswith("got it\n")
    sleeper = box.commands.run("sleep 600", background=True, timeout=0)
    assert box.commands.kill(sleeper.pid) is True
    with pytest.raises(CommandExitException):
        sleeper.wait()
    with pytest.raises(SandboxException, match="no process 9999"):
        box.commands.connect(9999)


def test_a_command_is_ended_when_its_time_is_up(box: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        box.commands.run("echo $$ > /tmp/late; sleep 600; echo", timeout=0.5)
    deadline = time.monotonic() + 60
    while any("/tmp/late" in process.args[-1] for process in box.commands.list()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_users(box: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="never as root"):
        box.commands.run("id", user="root")
    with pytest.raises(InvalidArgumentException, match="files belong to"):
        box.files.read("/etc/passwd", user="1234")
    assert box.commands.run("true", user="user").exit_code == 0
    if os.geteuid() == 0:
        assert box.commands.run("id -u", user="1234").stdout == "1234\n"


def test_terminals(box: Sandbox) -> None:
    seen = bytearray()
    handle = box.pty.create(PtySize(rows=30, cols=100), cwd="/tmp", envs={"PS1": "$ "}, timeout=120)
    box.pty.send_stdin(handle.pid, b"stty size\n")
    box.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    box.pty.send_stdin(handle.pid, b"sleep 0.2; stty size; tty; exit 3\n")
    with pytest.raises(CommandExitException) as ended:
        handle.wait(on_pty=seen.extend)
    assert ended.value.exit_code == 3
    assert b"40 120" in seen and b"/dev/pts/" in seen
    other = box.pty.create(PtySize(rows=30, cols=100), timeout=120)
    assert box.pty.kill(other.pid) is True


def test_files(box: Sandbox) -> None:
    written = box.files.write("a/b.txt", "hello")
    assert (written.name, written.path) == ("b.txt", "/workspace/a/b.txt")
    assert box.files.read("/workspace/a/b.txt") == "hello"
    assert box.files.read("a/b.txt", format="bytes") == b"hello"
    assert box.files.exists("a/b.txt") and not box.files.exists("a/c.txt")
    assert box.files.make_dir("d/e") is True
    assert box.files.make_dir("d/e") is False
    moved = box.files.rename("a/b.txt", "d/e/f.txt")
    assert (moved.path, moved.size, moved.permissions) == ("/workspace/d/e/f.txt", 5, "rw-r--r--")
    box.commands.run("ln -s e/f.txt d/link; ln -s /nowhere d/lost")
    entries = {entry.path.removeprefix("/workspace/"): entry for entry in box.files.list("d", depth=2)}
    assert set(entries) == {"d/e", "d/e/f.txt", "d/link", "d/lost"}
    assert entries["d/link"].symlink_target == "/workspace/d/e/f.txt"
    assert [entries[name].type.value for name in ("d/e", "d/link", "d/lost")] == ["dir", "symlink", "symlink"]
    assert box.files.get_info("d/e").type.value == "dir"
    box.files.remove("d")
    assert not box.files.exists("d")
    for missing in (
        lambda: box.files.read("nothing"), lambda: box.files.list("nothing"),
        lambda: box.files.get_info("nothing"), lambda: box.files.rename("nothing", "x"),
        lambda: box.files.remove("nothing"),
    ):  # fmt: skip
        with pytest.raises(FileNotFoundException):
            missing()
    for wrong in (lambda: box.files.read("/tmp"), lambda: box.files.list("/proc/version")):
        with pytest.raises(InvalidArgumentException):
            wrong()
    with pytest.raises(SandboxException):
        box.files.write("/proc/version", "x")


def test_names_that_are_no_text(box: Sandbox) -> None:
    box.commands.run("mkdir odd; cd odd; touch \"$(printf 'a\\377b')\" 'a b' ü; touch -d '9999-01-01' 'a b'")
    assert sorted(entry.name for entry in box.files.list("odd")) == ["a b", "a\ufffdb", "ü"]
    box.files.remove("odd")


def test_large_files_and_many(box: Sandbox) -> None:
    data = os.urandom((4 << 20) + 17)
    box.files.write("big", data)
    assert box.files.read("big", format="bytes") == data
    box.files.write("big", io.BytesIO(data[::-1]))
    assert b"".join(box.files.read("big", format="stream")) == data[::-1]
    box.files.write("big", "x" * 5_000_000, gzip=True)
    assert box.files.get_info("big").size == 5_000_000
    box.files.write("empty", b"")
    assert box.files.read("empty") == ""
    several = [{"path": f"many/{number}", "data": f"{number}"} for number in range(20)]
    assert [entry.name for entry in box.files.write_files(several)] == [str(number) for number in range(20)]
    assert len(box.files.list("many")) == 20
    box.files.remove("big")


def test_what_is_not_offered_says_so(service: Service, box: Sandbox) -> None:
    with pytest.raises(SandboxException, match="cannot be watched"):
        box.files.watch_dir("/workspace")
    with pytest.raises(SandboxException, match="not offered"):
        box.get_metrics()
    with pytest.raises(SandboxException, match="not offered"):
        box.fork()
    with pytest.raises(SandboxException, match="files, not memory"):
        box.create_snapshot()
    assert box.get_host(3000).endswith(".invalid")
    for options in (
        {"allow_internet_access": True}, {"network": {"deny_out": ["0.0.0.0/0"]}},
        {"lifecycle": {"on_timeout": "pause"}}, {"metadata": {"e2b.env": "{}"}}, {"timeout": 10**9},
        {"metadata": {"node.unit": "elsewhere"}},
    ):  # fmt: skip
        with pytest.raises(SandboxException, match="400"):
            Sandbox.create(**options, **service.options())
    with pytest.raises(SandboxException, match="no template 'windows', only base, docker"):
        Sandbox.create("windows", **service.options())


def test_a_template_says_where_commands_are(service: Service) -> None:
    with Sandbox.create("home", envs={"SHAPE": "square"}, timeout=60, **service.options()) as box:
        assert box.commands.run("echo $COLOUR $SHAPE; pwd").stdout == "red square\n/tmp\n"
        assert box.files.write("here", "x").path == "/tmp/here"
    with (
        Sandbox.create("small", timeout=60, **service.options()) as box,
        pytest.raises(NotEnoughSpaceException),
    ):
        box.files.write("large", b"x" * (3 << 20))


def test_sandboxes_are_listed_and_found(service: Service) -> None:
    options = service.options("bob")
    made = [Sandbox.create(timeout=120, metadata={"run": "a b&c", "n": str(n)}, **options) for n in range(3)]
    try:
        pages = Sandbox.list(limit=2, order="asc", **options)
        found = [*pages.next_items(), *pages.next_items()]
        assert not pages.has_next
        assert [entry.sandbox_id for entry in found] == [sandbox.sandbox_id for sandbox in made]
        query = SandboxQuery(
            metadata={"run": "a b&c", "n": "1"}, state=[SandboxState.RUNNING], template="base"
        )
        (one,) = Sandbox.list(query=query, **options).next_items()
        assert (one.sandbox_id, one.metadata) == (made[1].sandbox_id, {"run": "a b&c", "n": "1"})
        info = Sandbox.connect(one.sandbox_id, timeout=600, **options).get_info()
        assert 500 < (info.end_at - info.started_at).total_seconds() <= 700
        made[1].connect(timeout=1)  # never shortens it
        assert made[1].get_info().end_at == pytest.approx(info.end_at, abs=_seconds(5))
        assert (info.template_id, info.state, info.memory_mb) == ("base", SandboxState.RUNNING, 128)
        assert Sandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED]), **options).next_items() == []
    finally:
        assert [sandbox.kill() for sandbox in made] == [True] * 3
    assert made[0].kill() is False
    with pytest.raises(SandboxNotFoundException):
        made[0].connect()
    with pytest.raises(TimeoutException, match="was not found"):
        made[0].commands.run("true")


def _seconds(count: int) -> Any:
    from datetime import timedelta

    return timedelta(seconds=count)


def test_a_sandbox_ends_when_its_time_is_up(service: Service) -> None:
    box = Sandbox.create(timeout=600, **service.options())
    handle = box.commands.run("sleep 600", background=True, timeout=0)
    box.set_timeout(1)
    with pytest.raises((TimeoutException, SandboxException)):
        handle.wait()  # used, and yet it ends
    service.wait_until_gone(box)
    with pytest.raises(SandboxNotFoundException):
        box.get_info()


def test_a_paused_sandbox_keeps_its_time_and_processes(service: Service) -> None:
    box = Sandbox.create(timeout=600, **service.options())
    handle = box.commands.run("read x; echo got $x", background=True, stdin=True, timeout=300)
    handle.disconnect()
    try:
        assert box.pause() is True
    except SandboxException as error:
        assert "capability pause" in str(error)  # no freezer here
        box.kill()
        return
    assert box.pause() is False
    assert not box.is_running()
    assert box.get_info().state is SandboxState.PAUSED
    with pytest.raises(TimeoutException, match="paused"):
        box.commands.run("true")
    box.connect(timeout=600)
    assert box.is_running()
    box.commands.send_stdin(handle.pid, "it\n")
    assert box.commands.connect(handle.pid).wait().stdout == "got it\n"
    box.kill()


def test_snapshots_of_files(service: Service) -> None:
    with Sandbox.create(timeout=120, **service.options()) as box:
        box.files.write("kept", "here")
        snapshot = box.create_snapshot(mode="filesystem")
    with Sandbox.create(snapshot.snapshot_id, timeout=120, **service.options()) as copy:
        assert copy.files.read("kept") == "here"
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **service.options()) is True
    assert Sandbox.delete_snapshot(snapshot.snapshot_id, **service.options()) is False


def test_projects_do_not_see_each_other(service: Service) -> None:
    box = Sandbox.create(timeout=120, **service.options("alice"))
    try:
        other = service.options("bob")
        assert box.sandbox_id not in [entry.sandbox_id for entry in Sandbox.list(**other).next_items()]
        for call in (Sandbox.connect, Sandbox.get_info, Sandbox.pause):
            with pytest.raises(SandboxNotFoundException):
                call(box.sandbox_id, **other)
        assert Sandbox.kill(box.sandbox_id, **other) is False
        assert box.is_running()
        with pytest.raises(AuthenticationException):
            Sandbox.create(**{**other, "api_key": "e2b_" + "0" * 40})
    finally:
        box.kill()


def test_refusals_and_idempotency_keys(service: Service) -> None:
    options = service.options("carol")
    box = Sandbox.create(timeout=120, idempotency_key="one", **options)
    same = Sandbox.create(timeout=120, idempotency_key="one", **service.options("bob"))
    try:
        assert same.sandbox_id != box.sandbox_id  # a key is its project's own
        again = Sandbox.create(timeout=120, idempotency_key="one", **service.options("bob"))
        assert again.sandbox_id == same.sandbox_id
        with pytest.raises(SandboxException, match="409"):
            Sandbox.create(timeout=121, idempotency_key="one", **service.options("bob"))
        with pytest.raises(RateLimitException, match="quota of project small"):
            Sandbox.create(timeout=120, **{**options, "retries": 3})
    finally:
        box.kill()
        same.kill()


async def test_the_async_client(service: Service) -> None:
    box = await AsyncSandbox.create(timeout=120, **service.options())
    try:
        heard: list[str] = []
        results = await asyncio.gather(
            *(box.commands.run(f"echo {n}", on_stdout=heard.append) for n in range(8))
        )
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]
        assert sorted(heard) == sorted(result.stdout for result in results)
        await box.files.write("x", "async")
        assert await box.files.read("x") == "async"
        handle = await box.commands.run("cat", background=True, stdin=True)
        await handle.send_stdin("abc")
        await handle.close_stdin()
        assert (await handle.wait()).stdout == "abc"
        terminal = await box.pty.create(PtySize(rows=30, cols=100), on_data=lambda data: None, timeout=60)
        assert await terminal.kill() is True
        assert await box.is_running()
        assert (await box.get_info()).sandbox_id == box.sandbox_id
    finally:
        assert await box.kill() is True


def test_a_front_that_starts_over_finds_all_as_it_was(service: Service) -> None:
    box = Sandbox.create(timeout=300, metadata={"a": "b"}, **service.options())
    handle = box.commands.run("read x; echo got $x", background=True, stdin=True, timeout=300)
    handle.disconnect()
    service.stop()
    service.start()
    assert box.get_info().metadata == {"a": "b"}
    box.commands.send_stdin(handle.pid, "it\n")
    assert box.commands.connect(handle.pid).wait().stdout == "got it\n"
    assert box.kill() is True


@pytest.mark.slow
def test_the_example_of_another_trainer(tmp_path: Path) -> None:
    """One command, without an access file: the token of clients is made and kept."""
    service = Service(tmp_path)
    try:
        service.start(access=False)
        token = (tmp_path / "client.token").read_text()
        assert (tmp_path / "client.token").stat().st_mode & 0o777 == 0o600
        url = service.urls["e2b"]
        settings = {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": token, "STEPS": "5"}
        run = subprocess.run(
            [sys.executable, str(ROOT / "examples/e2b_trainer.py")],
            env={**os.environ, **settings}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        last = run.stdout.splitlines()[-1]
        assert last.endswith("after 5 steps"), run.stdout
        assert float(last.split()[1]) > 0.4, run.stdout
    finally:
        service.stop()
        service.end_node()
