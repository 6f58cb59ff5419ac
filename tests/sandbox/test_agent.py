"""The resident agent as a plain process over pipes, without a sandbox around it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox.agent.keeper import belongings
from sandbox.backends import seccomp
from sandbox.backends.base import agent_command
from sandbox.channel import encode
from sandbox.errors import InfrastructureError
from sandbox.toolkit import build
from sandbox.types import Limits

ROOT = Path(__file__).parents[2]
LINUX32 = 8
"""A personality in which the machine has another name."""

UID = 61000  # not that of sandboxes: users are the machine's here


class Agent:
    """A running agent and a channel to it."""

    def __init__(self, uid: int | None, folder: Path, env: Mapping[str, str] | None = None, machine: int = 0):
        config = {"uid": uid, "rlimits": {"NOFILE": 64}, "seccomp": seccomp.program()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sandbox.agent.agent", json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env,
            preexec_fn=lambda: ctypes.CDLL(None).personality(machine),
        )  # fmt: skip
        self.uid, self.folder, self.number = uid, str(folder), 0

    def send(self, op: str, body: bytes = b"", **fields: Any) -> int:
        self.number += 1
        header = {
            "id": self.number,
            "op": op,
            "cwd": self.folder,
            "timeout_s": 20.0,
            "limit": 1000,
            "env": {},
        }
        assert self.process.stdin is not None
        self.process.stdin.write(encode({**header, **fields}, body))
        self.process.stdin.flush()
        return self.number

    def receive(self) -> tuple[dict[str, Any], bytes]:
        assert self.process.stdout is not None
        head, size = struct.unpack("!II", self.process.stdout.read(8))
        return json.loads(self.process.stdout.read(head)), self.process.stdout.read(size)

    def run(self, op: str, body: bytes = b"", **fields: Any) -> tuple[dict[str, Any], bytes]:
        number = self.send(op, body, **fields)
        header, output = self.receive()
        assert (header["id"], header["seq"]) == (number, header["seq"])
        return header, output

    def python(self, source: str, **fields: Any) -> tuple[dict[str, Any], bytes]:
        return self.run("python", source.encode(), source_bytes=len(source.encode()), **fields)


@pytest.fixture(params=[None, UID], ids=["one user", "own users"])
def agent(request: pytest.FixtureRequest) -> Iterator[Agent]:
    if request.param is not None and os.geteuid() != 0:
        pytest.skip("only root can give commands a user of their own")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)  # commands may have another user
        agent = Agent(request.param, Path(folder))
        with agent.process:
            yield agent
            agent.process.terminate()


def test_it_is_small_and_imports_little(agent: Agent) -> None:
    assert agent.run("ping")[0] == {"id": 1, "seq": 1}
    header, output = agent.python("import sys; print('asyncio' in sys.modules, 'subprocess' in sys.modules)")
    assert (header["exit_code"], output) == (0, b"False False\n")


def test_replies_count_up(agent: Agent) -> None:
    assert [agent.run("exec", argv=["true"])[0]["seq"] for _ in range(5)] == [1, 2, 3, 4, 5]


def test_streams(agent: Agent) -> None:
    header, output = agent.run("exec", b"in" * 100_000, argv=["sh", "-c", "wc -c; echo err >&2; exit 4"])
    cut = header["stdout_bytes"]
    assert (header["exit_code"], output[:cut].strip(), output[cut:]) == (4, b"200000", b"err\n")


def test_python_failures(agent: Agent) -> None:
    for source, code, word in (
        ("1/0", 1, b"ZeroDivision"),
        ("exit(3)", 3, b""),
        ("raise SystemExit('x')", 1, b"x"),
    ):
        header, output = agent.python(source)
        assert header["exit_code"] == code and word in output
    if agent.uid is None:  # others may not be let in to where this interpreter has its library
        source = "import threading; threading.Thread(target=print, args=(1,)).start()"
        assert agent.python(source)[1] == b"1\n"


def test_timeout_ends_the_tree(agent: Agent) -> None:
    line = "trap '' TERM; (setsid sh -c 'sleep 7771 & sleep 7771' &); sleep 7771"
    for header in (
        agent.run("exec", argv=["sh", "-c", line], timeout_s=0.4)[0],
        agent.python(f"import os; os.system({line!r})", timeout_s=0.4)[0],
    ):
        assert header["timed_out"] and not header["cancelled"]
        assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "7771"]]


def test_kill(agent: Agent) -> None:
    first = agent.send("exec", argv=["sleep", "7772"])
    kill = agent.send("kill", target=first)
    replies = {header["id"]: header for header, _ in (agent.receive(), agent.receive())}
    assert replies[kill].keys() == {"id", "seq"} and replies[first]["cancelled"]
    assert agent.run("kill", target=999)[0]["id"] == 3


def test_background_goes_on_until_the_channel_closes(agent: Agent) -> None:
    header, _ = agent.run("exec", argv=["sh", "-c", "sleep 7773 & echo $! >&2; exit 6"])
    assert header["exit_code"] == 6
    found = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "7773"]]
    assert len(found) == 1
    assert agent.process.stdin is not None
    agent.process.stdin.close()
    assert agent.process.wait(10) == 0
    found[0].wait(10)


def test_output_is_capped(agent: Agent) -> None:
    header, output = agent.run(
        "exec", argv=["sh", "-c", "echo head; head -c 3000000 /dev/zero; echo tail"], limit=100
    )
    assert header["truncated"] and len(output) < 200
    assert output.startswith(b"head\n") and output.endswith(b"tail\n")


def test_files(agent: Agent) -> None:
    path = f"{agent.folder}/a/b"
    assert agent.run("write", b"x" * 200_000, path=path, mode=0o4640)[0]["exit_code"] == 0
    assert os.stat(path).st_mode & 0o7777 == 0o640
    header, output = agent.run("read", path=path, max_bytes=200_000, limit=1 << 20)
    assert (header["exit_code"], output) == (0, b"x" * 200_000)
    for wrong, why in (
        (agent.folder, b"regular"),
        (f"{agent.folder}/none", b"No such file"),
        (path, b"limit of 9"),
    ):
        header, output = agent.run("read", path=wrong, max_bytes=9)
        assert header["exit_code"] == 127 and why in output


def test_what_cannot_be_done(agent: Agent) -> None:
    assert b"unknown operation" in agent.run("dance")[1]
    assert b"No such file" in agent.run("exec", argv=["no-such-program"])[1]
    assert b"No such file" in agent.run("exec", argv=["true"], cwd="/none")[1]


def test_a_program_starts_as_it_expects_to(agent: Agent) -> None:
    lines = "^(Uid|Groups|Umask|SigBlk|Cap(Inh|Prm|Eff|Amb)|NoNewPrivs|Seccomp):"
    shown = (
        f"grep -E '{lines}' /proc/self/status; ls /proc/self/fd; cat /proc/self/oom_score_adj; ulimit -n; pwd"
    )
    output = agent.run("exec", argv=["sh", "-c", shown], env={"LC_ALL": "C"})[1].decode().split("\n")
    said = {name: words.split() for name, _, words in (line.partition(":\t") for line in output[:10])}
    uid = str(agent.uid if agent.uid is not None else os.getuid())
    assert said["Uid"] == [uid] * 4 and said["Umask"] == ["0022"]
    assert said["SigBlk"] == ["0" * 16]
    assert said["NoNewPrivs"] == ["1"] and said["Seccomp"] == ["2"]
    if agent.uid is not None:
        assert said["Groups"] == [] and all(
            int(said[f"Cap{kind}"][0], 16) == 0 for kind in ("Inh", "Prm", "Eff")
        )
    assert output[10:] == ["0", "1", "2", "3", "1000", "64", agent.folder, ""]  # 3 is the listing's own


def test_what_does_not_start_says_why(agent: Agent) -> None:
    (Path(agent.folder) / "data").write_text("no program")
    locked = Path(agent.folder) / "locked"
    locked.mkdir(mode=0o700)
    for argv, cwd, why in (
        (["none"], "/", b"FileNotFoundError: [Errno 2] No such file or directory: 'none'\n"),
        (["data/none"], agent.folder, b"NotADirectoryError: [Errno 20] Not a directory: 'data/none'\n"),
        ([agent.folder + "/data"], "/", b"PermissionError: [Errno 13] Permission denied: '%s/data'\n"),
        (["true"], "/none", b"FileNotFoundError: [Errno 2] No such file or directory: '/none'\n"),
    ):
        header, output = agent.run("exec", argv=argv, cwd=cwd)
        assert (header["exit_code"], output) == (127, why.replace(b"%s", agent.folder.encode()))
    if agent.uid is not None:  # it is the user of the command who may not enter
        assert b"Permission denied" in agent.run("exec", argv=["true"], cwd=str(locked))[1]
    many = agent.run("exec", argv=["none" * 2000], env={"PATH": ":".join("abcdefghijklmnopqrstu" * 20)})
    assert many[0]["exit_code"] == 127 and b"File name too long" in many[1]
    for code in (126, 127, 255):
        header, output = agent.run("exec", argv=["sh", "-c", f"exit {code}"])
        assert (header["exit_code"], output) == (code, b"")


@pytest.mark.parametrize("word", ["é😀", "\udcff", "x" * 100_000], ids=["text", "no text", "long"])
def test_words_of_any_kind_reach_a_program(agent: Agent, word: str) -> None:
    header, output = agent.run("exec", argv=["printf", "%s", word], limit=1 << 20)
    assert (header["exit_code"], output) == (0, word.encode(errors="surrogateescape"))


def test_a_keeper_is_spared_when_memory_ends_and_its_command_is_not(agent: Agent) -> None:
    assert agent.run("exec", argv=["true"])[0]["exit_code"] == 0  # it has begun
    before = Path(f"/proc/{agent.process.pid}/oom_score_adj").read_text()
    assert (before == "1000\n") == (agent.uid is None)  # with one user all have one place in the order
    for _ in range(3):
        assert agent.run("exec", argv=["sh", "-c", "cat /proc/$PPID/oom_score_adj"])[1].decode() == before
        assert agent.run("exec", argv=["cat", "/proc/self/oom_score_adj"])[1] == b"1000\n"


def test_where_the_machine_code_is_not_known_programs_are_forks(tmp_path: Path) -> None:
    agent = Agent(None, tmp_path, machine=LINUX32)
    with agent.process:
        assert agent.run("exec", argv=["uname", "-m"])[1] == b"i686\n"
        assert b"No such file" in agent.run("exec", argv=["none"])[1]
        header, output = agent.run("exec", b"in", argv=["sh", "-c", "cat; exit 3"])
        assert (header["exit_code"], output) == (3, b"in")
        agent.process.terminate()


def test_users_and_files_of_python(agent: Agent) -> None:
    source = "import os; print(os.getuid()); os.makedirs('/tmp/x7774/y'); open('/tmp/x7774/y/z', 'w')"
    header, output = agent.python(source)
    own = int(output) > UID
    assert header["exit_code"] == 0 and not header["dirty"]
    assert Path("/tmp/x7774").exists() is not own
    if not own:
        os.system("rm -r /tmp/x7774")


def test_many_at_once(agent: Agent) -> None:
    sources = {
        agent.send("python", b"print(%d)" % n, source_bytes=len(b"print(%d)" % n)): n for n in range(20)
    }
    replies = [agent.receive() for _ in sources]
    assert {header["id"]: int(output) for header, output in replies} == sources


def test_calls_at_the_same_time_keep_their_files(agent: Agent) -> None:
    """No keeper removes what its call has written already, or stops at what another removed."""
    names = {}
    for n in range(120):
        path = f"/tmp/x7775-{n % 30}-{os.getpid()}"
        source = f"""
import os, time
open({path!r}, 'w').write({str(n)!r})
time.sleep(0.2 * ({n} % 3))
print(open({path!r}).read())
os.unlink({path!r}) if {n} % 2 else None
"""
        names[agent.send("python", source.encode(), source_bytes=len(source))] = f"{n}\n".encode()
        if len(names) == 30:
            for _ in range(30):
                header, output = agent.receive()
                assert (output, header["dirty"]) == (names.pop(header["id"]), False)
            for left in Path("/tmp").glob(f"x7775-*-{os.getpid()}"):
                assert agent.uid is None, left
                left.unlink()


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Path]:
    """A folder in which files come and go, and one stays."""
    ended = threading.Event()
    (tmp_path / "stays").touch()

    def change() -> None:
        while not ended.is_set():
            for n in range(50):
                (tmp_path / str(n)).touch()
            for n in range(50):
                (tmp_path / str(n)).unlink()

    thread = threading.Thread(target=change)
    thread.start()
    yield tmp_path
    ended.set()
    thread.join()


def test_what_is_taken_away_meanwhile_is_left_out(changing: Path) -> None:
    for _ in range(300):
        assert str(changing / "stays") in belongings(str(changing), os.getuid())


@pytest.mark.parametrize("op", ["list", "pack"])
def test_files_that_come_and_go_are_no_error(op: str, changing: Path, tmp_path: Path) -> None:
    agent, folder = Agent(None, tmp_path), str(changing)
    given = {"path": folder, "roots": [folder], "base": folder, "max_entries": 99, "max_bytes": 1 << 20}
    with agent.process:
        for _ in range(60):
            header, output = agent.run(op, limit=1 << 20, **given)
            assert header["exit_code"] == 0, output
            assert b"stays" in output
        assert b"No such file" in agent.run(op, **{**given, "path": "/none", "roots": ["/none"]})[1]
        agent.process.terminate()


def test_a_frame_too_large_ends_it(agent: Agent) -> None:
    assert agent.process.stdin is not None
    agent.process.stdin.write(struct.pack("!II", 1 << 30, 0))
    agent.process.stdin.flush()
    assert agent.process.wait(10) == 0


def test_it_ends_with_its_zygote(agent: Agent) -> None:
    agent.run("ping")
    (zygote,) = psutil.Process(agent.process.pid).children()
    zygote.send_signal(signal.SIGKILL)
    assert agent.process.wait(10) == 0


def test_idle_memory(tmp_path: Path) -> None:
    """As a sandbox has it: compiled, run by the system's interpreter."""
    interpreter = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    (tmp_path / "run").mkdir()
    built = build(tmp_path, interpreter)
    built.rename(tmp_path / "run" / "agent")
    arguments = agent_command(str(tmp_path / "run"), Limits(), uid=None, alone=False)
    with subprocess.Popen(
        [interpreter, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(encode({"id": 1, "op": "ping"}))
        process.stdin.flush()
        process.stdout.read(8)
        assert psutil.Process(process.pid).memory_info().rss < 10 << 20
        process.terminate()


def test_it_is_built_once(tmp_path: Path) -> None:
    built = build(tmp_path, sys.executable)
    assert build(tmp_path, sys.executable) == built and list(tmp_path.iterdir()) == [built]
    assert {path.stem.split(".")[0] for path in built.glob("__pycache__/*.pyc")} == {
        path.stem for path in built.glob("*.py")
    }
    with pytest.raises(InfrastructureError, match="cannot compile"):
        build(tmp_path / "other", "/bin/false")
