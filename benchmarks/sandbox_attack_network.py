"""Attacks on an allow-list: what a sandbox with a network reaches beside the one place that it may.

The place is a server of this process under a name of its own; every other name and address of these attacks
leads to the same server or to nothing, so that whatever gets through is seen there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from benchmarks.sandbox_attack_kit import SPEC, Scene, Table, check
from sandbox.client import RemoteBox
from sandbox.egress.operator import FILE
from sandbox.policy import DenialReason, Network, Rule
from sandbox.types import SandboxSpec

TABLE = Table("network")
NEEDS = "network"

_SEND = """
import base64, json, os, socket, sys
port, answers = int(os.environ['http_proxy'].rsplit(':', 1)[1].strip('/')), []
for text in json.load(sys.stdin):
    got = b''
    try:
        with socket.create_connection(('127.0.0.1', port), timeout=20) as sock:
            sock.sendall(base64.b64decode(text))
            while data := sock.recv(65536):
                got += data
    except OSError:
        pass
    answers.append(got[:60].decode('latin-1'))
print(json.dumps(answers))
"""


class Web:
    """A server that keeps the heads that it is sent: `/away` leads elsewhere, `/endless` has no end."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._server.getsockname()[1]
        self.seen: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._server.accept()[:1], daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(20)
            data = sock.recv(65536)
            self.seen.append(data)
            if b"/away" in data:
                sock.sendall(
                    b"HTTP/1.1 302 Found\r\nLocation: http://other.lab:%d/denied\r\n\r\n" % self.port
                )
            elif b"/endless" in data:
                sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    sock.sendall(bytes(65536))
            else:
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
                sock.shutdown(socket.SHUT_WR)
                while more := sock.recv(65536):  # what comes behind a request is seen, too
                    self.seen.append(more)

    def close(self) -> None:
        """Stops."""
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


class Lab:
    """A sandbox that may fetch from `files.lab`, the server, and what else its names lead to."""

    def __init__(self, scene: Scene, web: Web, spec: SandboxSpec, box: RemoteBox):
        self.scene, self.web, self.spec, self.box = scene, web, spec, box

    async def send(self, *requests: bytes, box: RemoteBox | None = None) -> list[str]:
        """Sends requests to the sandbox's proxy, each on a connection of its own; returns the answers."""
        texts = json.dumps([base64.b64encode(request).decode() for request in requests]).encode()
        result = await (box or self.box).exec(["/usr/bin/python3", "-c", _SEND], stdin=texts, timeout_s=50)
        check(result.exit_code == 0, f"the attack did not run: {result.stderr[-300:]!r}")
        return json.loads(result.stdout)

    def get(self, path: str, *fields: str, host: str = "") -> bytes:
        """Returns a request as it should be."""
        where = host or f"files.lab:{self.web.port}"
        return "\r\n".join((f"GET http://{where}{path} HTTP/1.1", f"Host: {where}", *fields, "", "")).encode()

    async def fetches(self, box: RemoteBox | None = None, within_s: float = 10.0) -> None:
        """Fails unless what is allowed is still there, and soon."""
        begin = time.monotonic()
        (answer,) = await self.send(self.get("/fine"), box=box)
        check(" 200 " in answer[:20], f"what is allowed is answered by {answer!r}")
        check(time.monotonic() - begin < within_s, f"what is allowed took {time.monotonic() - begin:.1f} s")

    async def refused(self, requests: list[bytes], secret: bytes) -> None:
        """Fails when one is not refused, or the server hears of the secret."""
        for request, answer in zip(requests, await self.send(*requests), strict=True):
            check(answer[:12] in ("", "HTTP/1.1 400", "HTTP/1.1 403", "HTTP/1.1 408", "HTTP/1.1 413"),
                  f"{request[:80]!r} was answered by {answer!r}")  # fmt: skip
        check(not [head for head in self.web.seen if secret in head], "a request got through")

    async def counted(self, *reasons: DenialReason) -> None:
        """Fails unless denials for all of these reasons are heard of."""
        deadline, seen = time.monotonic() + 10, set[DenialReason]()
        while not seen >= {*reasons} and time.monotonic() < deadline:
            seen = {denial.reason for denial in await self.box.denials()}
            await asyncio.sleep(0.05)
        check(seen >= {*reasons}, f"only {sorted(seen)} were counted")


NAMES = {
    "files.lab": "127.0.0.1", "other.lab": "127.0.0.1", "rebound.lab": "127.0.0.2",
    "meta.lab": "169.254.169.254", "mapped.lab": "::ffff:127.0.0.1", "nat64.lab": "64:ff9b::7f00:1",
    "six.lab": "::1", "far.lab": "fd00:ec2::254", "shared.lab": "100.100.100.200", "zero.lab": "0.0.0.0",
    "wide.lab": "255.255.255.255", "azure.lab": "168.63.129.16",
}  # fmt: skip


@asynccontextmanager
async def lab(scene: Scene, **bounds: float) -> AsyncGenerator[Lab]:
    """Gives a sandbox of the lab."""
    web = Web()
    says = {"private": [f"127.0.0.1:{web.port}"], "names": NAMES, "bounds": bounds}
    (scene.stage.folder / FILE).write_text(json.dumps(says))
    try:
        allowed = Rule("files.lab", web.port, private=True)
        inside = tuple(Rule(name, web.port) for name in NAMES if name not in ("files.lab", "other.lab"))
        spec = replace(SPEC, network=Network({"setup": (allowed, *inside), "solve": ()}, "setup"))
        yield Lab(scene, web, spec, await scene.fresh(spec))
    finally:
        web.close()
        (scene.stage.folder / FILE).unlink()


@TABLE.attack("ways around an allow-list", case=35, needs=NEEDS)
async def around(scene: Scene) -> None:
    """Addresses in every spelling, other ports and hosts, user names in addresses, tunnels, gateways.

    -> none of them is reached, all are counted.
    """
    async with lab(scene) as here:
        port, requests = here.web.port, list[bytes]()
        spelled = (
            "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0x7f.1", "[::1]", "localhost",
            "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "172.17.0.1", "169.254.169.254", "other.lab",
            "files.lab.", "files.lab..", ".files.lab", "files.lab%00.other.lab", "files.lab@other.lab",
            "other.lab\\@files.lab", "other.lab#@files.lab", "[::1%25lo]", "files.lab.other.lab",
        )  # fmt: skip
        requests += [here.get("/secret", host=f"{name}:{port}") for name in spelled]
        requests += [
            here.get("/secret", host=f"files.lab:{other}") for other in (22, 80, 2375, port + 1, "+80")
        ]
        for name in ("files.lab", "127.0.0.1", "[::1]", "169.254.169.254", "metadata.google.internal"):
            connect = f"CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n"
            requests.append(connect.encode() + here.get("/secret"))
        lines = (
            "GET /secret HTTP/1.1", "GET * HTTP/1.1", f"GET //files.lab:{port}/secret HTTP/1.1",
            f"GET https://files.lab:{port}/secret HTTP/1.1", f"GET ftp://files.lab:{port}/secret HTTP/1.1",
            f"GET http:files.lab:{port}/secret HTTP/1.1", f"GET http://files.lab:{port}/secret HTTP/2.0",
            f"GET\thttp://files.lab:{port}/secret\tHTTP/1.1", f"get http://files.lab:{port}/secret HTTP/1.1",
            f"GET http://files.lab:{port}/secret", "PRI * HTTP/2.0",
        )  # fmt: skip
        requests += [f"{line}\r\nHost: files.lab:{port}\r\n\r\n".encode() for line in lines]
        for name in ("other.lab", f"files.lab:{port + 1}", f"files.lab:{port}, other.lab", ""):
            requests.append(
                here.get("/secret").replace(b"Host: files.lab:%d" % port, f"Host: {name}".encode())
            )
        await here.refused(requests, b"/secret")
        await here.counted(
            DenialReason.ADDRESS, DenialReason.HOST, DenialReason.PORT, DenialReason.HOST_MISMATCH
        )
        await here.fetches()


@TABLE.attack("requests smuggled", case=35, needs=NEEDS)
async def smuggled(scene: Scene) -> None:
    """Two lengths, chunks, folded and bare lines, odd names and spaces, upgrades, a second request behind.

    -> refused, or sent on without what was hidden in it.
    """
    async with lab(scene) as here:
        hidden, port = here.get("/hidden", host=f"other.lab:{here.web.port}"), here.web.port
        fields = (
            f"Content-Length: {len(hidden)}", f"Content-Length: {len(hidden)}\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked", "Transfer-Encoding : chunked", "Transfer-Encoding: xchunked",
            "Transfer-Encoding:\tchunked", "X: y\r\n Transfer-Encoding: chunked", "Content-Length: +9",
            "Content-Length: 0\r\nContent-Length: 9", "Content-Length: 0x9", "Content-Length: 9, 9",
            "Content-Length: 1_0", "Content-Length: \xb2", "X: a\nTransfer-Encoding: chunked", ": empty",
            "X: a\rHost: other.lab", "NoColon", "X\x00Y: z", "X: \x00", "Host : other.lab", "X y: z",
            "Host: other.lab", " Host: other.lab",
        )  # fmt: skip
        requests = [here.get("/first", field) + hidden for field in fields]
        await here.refused(requests, b"/first")
        outer = (
            "Expect: 100-continue", "Connection: Upgrade, X-Secret\r\nUpgrade: h2c\r\nX-Secret: 1",
            "Connection: keep-alive", "Proxy-Authorization: Basic eA==", "Upgrade: websocket", "Trailer: X",
            "Transfer_Encoding: chunked",
        )  # fmt: skip
        await here.send(*(here.get("/second", field) + hidden * 3 for field in outer))
        seen = b"".join(here.web.seen)
        check(seen.count(b"/second") == len(outer), "an ordinary request did not arrive once")
        check(b"/hidden" not in seen, "what was behind a request got through")
        for word in (b"upgrade", b"x-secret", b"expect", b"keep-alive", b"proxy-", b"trailer", b"chunked"):
            check(word not in seen.lower(), f"{word!r} was passed on")
        check(b"Host: files.lab:%d\r\n" % port in seen, "the host was not written anew")


@TABLE.attack("other methods than GET", needs=NEEDS)
async def methods(scene: Scene) -> None:
    """Methods that write, by name and by the headers in which servers take another -> GET and HEAD alone."""
    async with lab(scene) as here:
        plain = here.get("/write")
        others = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get", "GETX", "")
        await here.refused([plain.replace(b"GET", other.encode(), 1) for other in others], b"/write")
        names = ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override", "x-http-method-override",
                 "X_HTTP_METHOD_OVERRIDE")  # fmt: skip
        await here.send(*(here.get("/read", f"{name}: DELETE") for name in names))
        seen = b"".join(here.web.seen)
        check(
            seen.count(b"/read") and b"DELETE" not in seen, "a header that names another method got through"
        )


@TABLE.attack("names and redirects that lead inside", case=35, needs=NEEDS)
async def inside(scene: Scene) -> None:
    """Allowed names of the machine's, of metadata and other inner addresses; a redirect to a denied host.

    -> refused by the address, whatever the name is.
    """
    async with lab(scene) as here:
        names = [name for name in NAMES if name not in ("files.lab", "other.lab")]
        await here.refused(
            [here.get("/inside", host=f"{name}:{here.web.port}") for name in names], b"/inside"
        )
        await here.counted(DenialReason.PRIVATE)
        source = f"""
import urllib.error, urllib.request
try: print(urllib.request.urlopen('http://files.lab:{here.web.port}/away', timeout=20).status)
except urllib.error.HTTPError as error: print(error.code, error.headers['X-Tempering-Denied'])
"""
        result = await here.box.exec(["/usr/bin/python3", "-c", source], timeout_s=30)
        check(
            result.stdout == b"403 host\n",
            f"the redirect ended in {result.stdout!r} {result.stderr[-200:]!r}",
        )
        check(not [head for head in here.web.seen if b"/denied" in head], "the redirect was followed")


@TABLE.attack("names asked for to tell a secret", case=35, needs=NEEDS)
async def tunnel(scene: Scene) -> None:
    """Resolvers by UDP and TCP, long names through the proxy, multicast, raw packets -> nothing leaves."""
    async with lab(scene) as here:
        await here.refused(
            [here.get("/", host=f"{'secret' * 8}.{number}.lab") for number in range(20)], b"secret"
        )
        source = """
import socket
out = []
for where in ('8.8.8.8', '127.0.0.53', '224.0.0.251', '172.17.0.1', '2606:4700::1111'):
    family = socket.AF_INET6 if ':' in where else socket.AF_INET
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            with socket.socket(family, kind) as sock:
                sock.settimeout(1)
                sock.connect((where, 53))
                sock.send(b'x' * 40)
                sock.recv(1)
            out.append((where, kind))
        except OSError: pass
for name in ('secret.example.com', 'files.lab', '_x._tcp.files.lab'):
    try: out.append(socket.getaddrinfo(name, 80))
    except OSError: pass
print(out)
"""
        result = await here.box.exec(["/usr/bin/python3", "-c", source], timeout_s=40)
        check(result.stdout == b"[]\n", f"it reached {result.stdout[:200]!r} {result.stderr[-200:]!r}")


@TABLE.attack("slow and countless connections", case=37, needs=NEEDS)
async def slow(scene: Scene) -> None:
    """Connections that dribble heads and bodies, thousands that are torn down -> a sibling's are as ever."""
    async with lab(scene, head_s=3.0) as here:
        other = await scene.fresh(here.spec)
        source = f"""
import os, socket, struct, sys, time
port = int(os.environ['http_proxy'].rsplit(':', 1)[1].strip('/'))
def connect():
    try: return socket.create_connection(('127.0.0.1', port), timeout=1)
    except OSError: return None
held = [sock for _ in range(100) if (sock := connect())]
print('ready', flush=True)
for number in range(12):
    for sock in held:
        line = b'X: y\\r\\n' if number else b'GET http://files.lab:{here.web.port}/x HTTP/1.1\\r\\n'
        try: sock.send(line)
        except OSError: pass
    for _ in range(60):
        if sock := connect():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
            sock.close()
    time.sleep(0.1)
"""
        attack = asyncio.create_task(here.box.exec(["/usr/bin/python3", "-c", source], timeout_s=40))
        await asyncio.sleep(1)
        for _ in range(3):
            await here.fetches(other, within_s=5)
        result = await attack
        check(b"ready" in result.stdout, f"the attack did not run: {result.stderr[-300:]!r}")
        await asyncio.sleep(0.5)
        await here.fetches()


@TABLE.attack("heads, bodies and answers without end", needs=NEEDS)
async def sizes(scene: Scene) -> None:
    """Lines and heads of megabytes, bodies that lie, answers without end -> cut, the proxy goes on."""
    async with lab(scene, head_s=3.0, response_bytes=4 << 20) as here:
        long = "x" * (1 << 20)
        requests = [
            here.get("/big" + long), here.get("/big", f"X: {long}"), here.get("/big", *["X: y"] * 5000),
            here.get("/big", host=f"{'a' * 300}.lab"), long.encode(),
            here.get("/big", "Content-Length: 9" + "9" * 30),
            b"\x16\x03\x01" + struct.pack("!H", 65535) + bytes(70000), b"\0" * 70000,
        ]  # fmt: skip
        await here.refused(requests, b"/big")
        source = f"""
import urllib.request
size, response = 0, urllib.request.urlopen('http://files.lab:{here.web.port}/endless', timeout=20)
try:
    while data := response.read(65536): size += len(data)
except OSError: pass
print(size)
"""
        result = await here.box.exec(["/usr/bin/python3", "-c", source], timeout_s=40)
        check(0 < int(result.stdout or b"0") <= 4 << 20, f"{result.stdout!r} bytes of an answer came")
        await here.fetches()


@TABLE.attack("door, proxy and phase", needs=NEEDS)
async def door(scene: Scene) -> None:
    """Knocks on the door again, looks for a sibling's port, holds a connection over a phase -> shut, cut."""
    async with lab(scene) as here:
        source = f"""
import os, socket, sys
found = []
for folder, _, names in os.walk('/run'):
    for name in names:
        try:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(1)
                sock.connect(os.path.join(folder, name))
                found.append(name)
                socket.send_fds(sock, [b'+'], [socket.create_server(('127.0.0.1', 0)).fileno()])
        except OSError: pass
port = int(os.environ['http_proxy'].rsplit(':', 1)[1].strip('/'))
sock = socket.create_connection(('127.0.0.1', port), timeout=20)
where = b'files.lab:{here.web.port}'
sock.sendall(b'GET http://' + where + b'/endless HTTP/1.1\\r\\nHost: ' + where + b'\\r\\n\\r\\n')
sock.recv(1000)
print(found, flush=True)
size = 0
try:
    while data := sock.recv(65536): size += len(data)
except OSError: pass
print('cut')
"""
        process = await here.box.start(["/usr/bin/python3", "-c", source])
        async with asyncio.timeout(30):
            while b"]" not in (log := await process.logs(wait_s=1)).data:
                check(log.running, f"the attack did not run: {log.data[-300:]!r}")
        await here.box.phase("solve")
        result = await process.wait(timeout_s=10)
        check(result.stdout.split() == [b"[]", b"cut"], f"it said {result.stdout[-200:]!r}")
        sibling = await scene.sibling.exec(
            ["/usr/bin/python3", "-c", "import os; print('http_proxy' in os.environ)"]
        )
        check(sibling.stdout == b"False\n", "a sibling without a network has a proxy")
        (answer,) = await here.send(here.get("/late"))
        check(
            "403" in answer and not [head for head in here.web.seen if b"/late" in head], f"late: {answer!r}"
        )
