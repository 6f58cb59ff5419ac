"""A proxy that was taken over: hostile code in its place, with its descriptors, reaches nothing else.

The code runs twice: as the proxy runs, and without its filter of system calls, so that the namespaces are
shown to hold by themselves what they can.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.backends.cgroups import Cgroup
from sandbox.egress import jail
from sandbox.egress.connector import Broken, Connector
from sandbox.egress.doors import door_of, listen
from sandbox.egress.ledger import Ledger
from sandbox.egress.operator import Bounds, Operator
from sandbox.policy import DenialReason, Network, Rule


def nobody() -> socket.socket:
    """The owner of a sandbox who does not listen."""
    raise ConnectionRefusedError


HOSTILE = """
import ctypes, errno, json, os, socket, struct, sys, threading
sys.path.insert(0, '/')
from proxy import main, jail
control = socket.socket(fileno=int(sys.argv[1]))
secret = json.loads(SECRET)
libc = ctypes.CDLL(None, use_errno=True)
held = []
for fd in range(256):
    try:
        os.fstat(fd)
        held.append(fd)
    except OSError:
        pass
main.warm_up()
if FILTERED:
    jail.confine(sys.argv[4], 256)
control.sendall(b'{"ready": true}')
done = []

def attempt(name, act):
    try:
        if act() not in (False, -1):
            done.append(name)
    except (OSError, ImportError, RuntimeError):
        pass

def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as sock:
        sock.settimeout(2)
        sock.connect(address)
        sock.send(b'taken over')

def ask(host, port, method='GET'):
    control.sendall(json.dumps({'ask': 1, 'method': method, 'host': host, 'port': port}).encode())
    data, fds, _, _ = socket.recv_fds(control, 2048, 1)
    return json.loads(data), fds

files = ('/etc/passwd', '/proc/1/environ', '/proc/self/mem', '/root', '/home', '/dev/null')
for path in (*files, *secret['paths']):
    attempt('read ' + path, lambda: os.open(path, os.O_RDONLY))
for path in ('/new', '/tmp/new', '/usr/new', '/proxy/new', '/proxy/main.py', '/etc/new'):
    attempt('write ' + path, lambda: os.open(path, os.O_WRONLY | os.O_CREAT))
attempt('tcp', lambda: connect(socket.AF_INET, ('127.0.0.1', secret['port'])))
attempt('tcp of the host', lambda: connect(socket.AF_INET, (secret['host'], secret['port'])))
attempt('tcp6', lambda: connect(socket.AF_INET6, ('::1', secret['port'])))
attempt('metadata', lambda: connect(socket.AF_INET, ('169.254.169.254', 80)))
attempt('udp', lambda: connect(socket.AF_INET, (secret['host'], 53), socket.SOCK_DGRAM))
attempt('abstract', lambda: connect(socket.AF_UNIX, '\\0' + secret['abstract']))
for path in secret['paths']:
    attempt('socket ' + path, lambda: connect(socket.AF_UNIX, path))
attempt('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
attempt('packet', lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
attempt('vsock', lambda: connect(socket.AF_VSOCK, (2, 1)))
for pid in secret['pids']:
    attempt('signal', lambda: os.kill(pid, 0))
    attempt('ptrace', lambda: libc.ptrace(16, pid, 0, 0))
    attempt('read memory', lambda: libc.process_vm_readv(pid, 0, 0, 0, 0, 0))
attempt('user namespace', lambda: libc.unshare(0x10000000))
attempt('network namespace', lambda: libc.unshare(0x40000000))
attempt('mount', lambda: libc.mount(b'none', b'/usr', b'tmpfs', 0, None))
attempt('remount', lambda: libc.mount(None, b'/', None, 32 | 4096, None))
attempt('chroot', lambda: libc.chroot(b'/usr'))
attempt('become root', lambda: os.setresuid(0, 0, 0))

# Whom to ask, and to lie about.
answers = [ask(host, port, method)[0] for host, port, method in secret['asks']]
granted, fds = ask('files.lab', secret['allowed'])
sock = socket.socket(fileno=fds[0])
sock.setblocking(True)
sock.sendall(b'GET / HTTP/1.1\\r\\nHost: files.lab\\r\\n\\r\\n')
reply = sock.recv(65536)
target = (secret['host'], secret['port'])
if FILTERED:
    # A socket of the host's network is in our hands: make it connect elsewhere, or listen.
    unspecified = struct.pack('H14x', 0)
    attempt('disconnect', lambda: libc.connect(sock.fileno(), unspecified, 16))
    attempt('connect again', lambda: sock.connect(target))
    attempt('listen', lambda: sock.listen(1))
    attempt('options', lambda: sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
    attempt('ask for interfaces', lambda: libc.ioctl(sock.fileno(), 0x8912, ctypes.create_string_buffer(64)))
    sock.shutdown(socket.SHUT_RDWR)
    for _ in range(3):
        attempt('fast open', lambda: sock.sendto(b'taken over', 0x20000000, target))
        attempt('send to', lambda: sock.sendto(b'taken over', target))
        attempt('send a message', lambda: sock.sendmsg([b'x'], [], 0x20000000, target))
    attempt('hand on a socket', lambda: socket.send_fds(control, [b'{}'], [sock.fileno()]))
    attempt('keys', lambda: libc.syscall(250, 0, -3, 0))
    attempt('signal to its launcher', lambda: os.kill(1, 0))
    attempt('fork', os.fork)
    attempt('program', lambda: os.execve('/usr/bin/python3', ['python3', '-V'], {}))
    attempt('any file', lambda: os.open('/usr/bin/python3', os.O_RDONLY))
    attempt('own memory file', lambda: os.memfd_create('x'))
    attempt('signal to itself', lambda: os.kill(os.getpid(), 0))
    thread = threading.Thread(target=lambda: attempt('in a thread', lambda: socket.socket()))
    thread.start()
    thread.join()
result = {'done': done, 'held': held, 'environment': sorted(os.environ), 'uid': os.getuid(),
          'answers': answers, 'reply': reply.decode()}
sys.stderr.write(json.dumps(result))
sys.stderr.flush()
control.recv(1)
"""


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A listener of the host, on all its addresses, which is to hear nothing."""
    with socket.create_server(("0.0.0.0", 0)) as trap:
        trap.setblocking(False)
        yield trap


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def inner(pid: int) -> int:
    """Returns the last of a chain of only children: the proxy behind its launchers."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("filtered", [True, False])
async def test_a_taken_over_proxy_reaches_nothing_else(
    filtered: bool, tmp_path: Path, web: Any, lab: Callable[..., None], trap: socket.socket
) -> None:
    abstract = f"tempering-{os.getpid()}-{filtered}"
    plain, hidden = (socket.socket(socket.AF_UNIX) for _ in range(2))
    plain.bind(f"{tmp_path}/s")
    hidden.bind("\0" + abstract)
    for sock in (plain, hidden):
        sock.listen()
        sock.setblocking(False)
    (tmp_path / "secret").write_text("secret")
    sibling = listen(door_of(tmp_path, "sibling"))
    door = listen(door_of(tmp_path, "box"))
    rules = (Rule("files.lab", web.port, private=True), Rule("meta.lab", 80), Rule("127.0.0.1", web.port))
    secret = {
        "paths": [f"{tmp_path}/secret", f"{tmp_path}/s", str(door_of(tmp_path, "sibling")), str(tmp_path)],
        "port": trap.getsockname()[1], "host": own_address(), "abstract": abstract, "allowed": web.port,
        "pids": [pid for pid in (os.getpid(), os.getppid()) if pid > 16],  # it has the first ones itself
        "asks": [
            ["files.lab", web.port, "POST"], ["files.lab", web.port, "CONNECT"], ["files.lab", 22, "GET"],
            ["other.lab", web.port, "GET"], ["127.0.0.1", web.port, "GET"], ["169.254.169.254", 80, "GET"],
            ["meta.lab", 80, "GET"], [own_address(), trap.getsockname()[1], "GET"], ["../etc", 80, "GET"],
            ["solve.lab\x00.files.lab", web.port, "GET"], ["", 0, ""],
        ],
    }  # fmt: skip
    program = f"FILTERED, SECRET = {filtered}, {json.dumps(secret)!r}\n{HOSTILE}"
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    network = Network({"setup": rules}, "setup")
    connector = Connector(ours, network, Operator.read(tmp_path), Ledger("box"), nobody)
    cgroup = Cgroup.create(f"{tmp_path.name}-{os.getpid()}", jail.limits(Bounds()))
    process = await jail.start(cgroup, theirs, door, Bounds(), program)
    theirs.close()
    door.close()
    serving = asyncio.create_task(connector.serve())
    try:
        assert process.stderr is not None
        said = b""
        async with asyncio.timeout(60):
            while not said.endswith(b"}"):
                piece = await process.stderr.read(65536)
                assert piece, said
                said += piece
        found = json.loads(said)
        assert found["done"] == []
        assert len(found["held"]) == 5  # its three streams, the control socket and its door
        assert set(found["environment"]) <= {"MALLOC_ARENA_MAX", "PWD", "LC_CTYPE"}
        assert [answer.get("denied") for answer in found["answers"]] == [
            "method", "method", "port", "host", "private", "address", "private", "address", "host", "host",
            "host",
        ]  # fmt: skip
        assert found["reply"].endswith("hello")
        proxy = inner(process.pid)
        about = status(proxy)
        assert about["CapEff"] == about["CapPrm"] == about["CapBnd"] == "0" * 16
        assert about["NoNewPrivs"] == "1" and about["Seccomp"] == ("2" if filtered else "0")
        if os.geteuid() == 0:
            assert all(int(uid) >= 64000 for uid in about["Uid"].split()) and about["Groups"] == ""
        for name in ("net", "user", "mnt", "pid", "ipc", "uts"):
            assert os.readlink(f"/proc/{proxy}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")
        for listener in (trap, plain, hidden):
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert web.connections == 1
        assert connector.ledger.reasons.total() == len(secret["asks"])
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        connector.close()
        process.kill()
        await cgroup.remove()
        await process.wait()
        for sock in (ours, plain, hidden, sibling):
            sock.close()


@pytest.mark.parametrize(
    "message",
    [
        b"", b"{", b"[]", b"{}", b"[" * 2000, b'{"ask": 1}', b'{"ready": 1}',
        b'{"ask": true, "method": "GET", "host": "a", "port": 1}',
        b'{"ask": 1, "method": "GET", "host": 5, "port": 1}',
        b'{"ask": 1, "method": "GET", "host": "a", "port": -1}',
        b'{"ask": 1, "method": "GET", "host": "a", "port": 1e3}',
        b'{"deny": "proxy", "method": "GET", "host": "a", "port": 1}',
        b'{"deny": "phase", "method": "GET", "host": "a", "port": 1}',
        b'{"deny": ["host"], "method": "GET", "host": "a", "port": 1}',
        b'{"ask": 1, "method": "GET", "host": "' + b"a" * 3000 + b'", "port": 1}',
    ],
)  # fmt: skip
async def test_a_proxy_that_talks_out_of_turn_is_not_heard_further(message: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        connector = Connector(ours, Network({"setup": ()}, "setup"), Operator(), Ledger("box"), nobody)
        theirs.sendall(message)
        theirs.shutdown(socket.SHUT_WR)
        if message:
            with pytest.raises(Broken):
                await connector.serve()
        else:
            await connector.serve()
        connector.close()


async def test_a_proxy_that_talks_without_end_does_not_have_the_node_to_itself() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    enough, message = threading.Event(), b'{"deny": "host", "method": "GET", "host": "a", "port": 1}'

    def talk() -> int:
        end, said = time.monotonic() + 20, 0
        while time.monotonic() < end and not enough.is_set():
            theirs.sendall(message)
            said += 1
        theirs.shutdown(socket.SHUT_WR)
        return said

    with ours, theirs:
        connector = Connector(ours, Network({"setup": ()}, "setup"), Operator(), Ledger("box"), nobody)
        talking = asyncio.create_task(asyncio.to_thread(talk))
        serving = asyncio.create_task(connector.serve())
        theirs.settimeout(30)
        began = time.monotonic()
        for _ in range(20):
            await asyncio.sleep(0.05)
        heard = connector.ledger.reasons.total()
        assert 0 < heard <= 500 * (time.monotonic() - began + 1)
        enough.set()
        await serving
        assert connector.ledger.reasons == {DenialReason.HOST: await talking}
        connector.close()


async def test_a_proxy_that_takes_more_than_its_bounds_is_cut_by_the_node(web: Any, tmp_path: Path) -> None:
    (tmp_path / "network.json").write_text(
        json.dumps(
            {
                "private": [f"127.0.0.1:{web.port}"],
                "names": {"files.lab": "127.0.0.1"},
                "bounds": {"response_bytes": 20_000, "connections": 2},
            }
        )
    )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    rule = Rule("files.lab", web.port, private=True)
    connector = Connector(
        ours, Network({"setup": (rule,)}, "setup"), Operator.read(tmp_path), Ledger("box"), nobody
    )
    serving = asyncio.create_task(connector.serve())
    question = json.dumps({"ask": 1, "method": "GET", "host": "files.lab", "port": web.port}).encode()

    def greedy() -> tuple[dict[str, Any], int]:
        sockets: list[socket.socket] = []
        while True:
            theirs.sendall(question)
            data, fds, _, _ = socket.recv_fds(theirs, 2048, 1)
            if not fds:
                break
            sockets.append(socket.socket(fileno=fds[0]))
        sockets[0].setblocking(True)
        sockets[0].sendall(b"GET /endless HTTP/1.1\r\n\r\n")
        taken = 0
        try:
            while piece := sockets[0].recv(65536):
                taken += len(piece)
        except ConnectionError:
            pass
        held = len(sockets)
        for sock in sockets:
            sock.close()
        return json.loads(data), taken if held == 2 else -1

    with ours, theirs:
        refused, taken = await asyncio.to_thread(greedy)
        assert refused["denied"] == "connections"
        assert taken > 20_000  # until the node looks; then it is over, whatever the proxy does
        assert connector.ledger.reasons[DenialReason.TOO_LARGE] == 1
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        connector.close()
