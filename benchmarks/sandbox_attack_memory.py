"""Attacks on memory: the sandbox's own, and the kernel's that it can have filled on its behalf."""

from __future__ import annotations

import asyncio

import psutil

from benchmarks.sandbox_attack_kit import Scene, Table, check, typed
from sandbox.errors import LostError

TABLE = Table("memory")
_HOST = 600 << 20


async def bounded(scene: Scene, source: str, timeout_s: float = 4.0, most: int = _HOST) -> None:
    """Runs Python that takes what it can and holds it; fails when the host lost more than the limit."""
    before = psutil.virtual_memory().available
    attack = asyncio.create_task(scene.python(source, timeout_s))
    least = before
    while not attack.done():
        least = min(least, psutil.virtual_memory().available)
        await asyncio.sleep(0.05)
    error = await typed(attack) or await typed(scene.answers())  # its end may come after the command's
    check(error is None or isinstance(error, LostError), f"the sandbox ended as {error!r}")
    check(before - least < most, f"the host lost {(before - least) >> 20} MiB to a sandbox of 128")


@TABLE.attack("allocation beyond the limit", case=12, needs="memory_limit")
async def allocation(scene: Scene) -> None:
    """Allocates three times its memory, as a command and as a call -> 137 and the record says memory."""
    source = "x = b'x' * (400 << 20)"
    told = scene.fleet.capabilities.oom_told
    for result in (await scene.python(source), await scene.box.python(source)):
        if told:
            check((result.exit_code, result.oom) == (137, True), f"it ended as {result}")
        else:
            check(result.exit_code != 0, "it had more than the limit")
    other = await scene.box.exec(["sh", "-c", "kill -9 $$"])
    check((other.exit_code, other.oom) == (137, False), f"a kill was taken for a lack of memory: {other}")
    await scene.answers()


@TABLE.attack("memory of many small processes", needs="memory_limit")
async def small_eaters(scene: Scene) -> None:
    """Forty processes that each hold a little and lower their badness.

    -> agent or kernel, a typed end or none.
    """
    source = """
import os, time
for n in range(40):
    if os.fork() == 0:
        try: open('/proc/self/oom_score_adj', 'w').write('0')
        except OSError: pass
        held = [bytes(1 << 16) for _ in range(60 * 16)]
        time.sleep(3)
        os._exit(0)
time.sleep(3)
"""
    await bounded(scene, source)


@TABLE.attack("tmpfs counts as memory", case=14, needs="memory_limit")
async def tmpfs(scene: Scene) -> None:
    """Fills every writable folder -> no room or killed, the host loses no more than the limit."""
    source = """
import os
for folder in ('/tmp', '/workspace', '/dev/shm', '/dev', '/run', '/var/tmp', '/home', '/'):
    try:
        fd = os.open(folder + '/x', os.O_CREAT | os.O_WRONLY)
        while True: os.write(fd, bytes(1 << 20))
    except OSError: pass
"""
    await bounded(scene, source)
    for folder in ("/tmp", "/workspace", "/dev/shm"):
        await scene.box.exec(["rm", "-f", f"{folder}/x"])


@TABLE.attack("anonymous files", case=15, needs="memory_limit")
async def memfd(scene: Scene) -> None:
    """Writes a gigabyte into memfds, held by descriptors in flight too -> stopped at the limit."""
    await bounded(
        scene,
        """
import os, socket
held = []
while len(held) < 200:
    fd = os.memfd_create('x')
    held.append(fd)
    for _ in range(16): os.write(fd, bytes(1 << 20))
""",
    )


@TABLE.attack("many mappings", case=15, needs="memory_limit")
async def mappings(scene: Scene) -> None:
    """Sixty thousand mappings, and page tables without pages -> limited."""
    await bounded(
        scene,
        """
import mmap
held = []
try:
    for n in range(60000): held.append(mmap.mmap(-1, 4096 * (1 + n % 2), prot=1 + 2 * (n % 2)))
except OSError: pass
try:
    huge = mmap.mmap(-1, 1 << 42, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    for at in range(0, 1 << 42, 1 << 21): huge[at]
except OSError: pass
""",
    )


@TABLE.attack("page cache thrash", case=15, needs="memory_limit")
async def page_cache(scene: Scene) -> None:
    """Reads all of /usr again and again -> its page cache is its own, siblings go on."""
    await bounded(
        scene,
        """
import os
for root, _, names in os.walk('/usr'):
    for name in names:
        try:
            with open(root + '/' + name, 'rb') as file:
                while file.read(1 << 20): pass
        except OSError: pass
""",
        3,
    )


@TABLE.attack("full pipes", needs="memory_limit")
async def pipes(scene: Scene) -> None:
    """Fills as many pipes of a megabyte as it gets -> the kernel's buffers count as its memory."""
    await bounded(
        scene,
        """
import fcntl, os, time
for n in range(24):
    if os.fork(): continue
    held = []
    try:
        while True:
            r, w = os.pipe(); held.append(r); os.set_blocking(w, False)
            try: fcntl.fcntl(w, 1031, 1 << 20)
            except OSError: pass
            try:
                while True: os.write(w, bytes(1 << 16))
            except BlockingIOError: pass
    except OSError: pass
    time.sleep(9)
time.sleep(9)
""",
        3,
    )


@TABLE.attack("full sockets", needs="memory_limit")
async def unix_sockets(scene: Scene) -> None:
    """Fills Unix socket pairs, stream and datagram, in many processes -> counted as its memory."""
    await bounded(scene, _FILL % "socket.socketpair(socket.AF_UNIX, kind)", 3)


@TABLE.attack("full TCP and UDP buffers", needs="memory_limit")
async def tcp(scene: Scene) -> None:
    """Fills loopback connections with the largest buffers -> the host's network memory is not touched."""
    source = _FILL % "pair(kind)"
    await bounded(scene, source, 4)


_FILL = """
import os, socket, time
def pair(kind):
    a = socket.socket(socket.AF_INET, kind)
    a.bind(('127.0.0.1', 0))
    b = socket.socket(socket.AF_INET, kind)
    for end in (a, b):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    if kind == socket.SOCK_STREAM: a.listen()
    b.connect(a.getsockname())
    return (a.accept()[0] if kind == socket.SOCK_STREAM else a), b
for n in range(24):
    if os.fork(): continue
    held, kind = [], (socket.SOCK_STREAM, socket.SOCK_DGRAM)[n %% 2]
    try:
        while True:
            a, b = %s
            held.append((a, b))
            for end in (a, b):
                end.setblocking(False)
                try:
                    for _ in range(1000): end.send(bytes(60000))
                except (BlockingIOError, OSError): pass
    except OSError: pass
    time.sleep(9)
time.sleep(9)
"""


@TABLE.attack("messages and shared memory of System V and POSIX", needs="memory_limit")
async def ipc(scene: Scene) -> None:
    """Message queues, semaphores and shared segments until refused -> counted, gone with the sandbox."""
    await bounded(
        scene,
        """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
for n in range(4096):
    at = libc.shmget(0, 1 << 24, 0o1600)
    if at < 0: break
    libc.shmat.restype = ctypes.c_void_p
    where = libc.shmat(at, None, 0)
    if where not in (None, ctypes.c_void_p(-1).value): ctypes.memset(where, 1, 1 << 24)
for n in range(32000):
    if libc.msgget(0, 0o1600) < 0: break
for n in range(32000):
    if libc.semget(0, 250, 0o1600) < 0: break
""",
        4,
    )


@TABLE.attack("watches, polls and timers of the kernel", needs="memory_limit")
async def watches(scene: Scene) -> None:
    """Watches of inotify, epoll items, eventfds, timerfds, signalfds and locks until refused -> counted."""
    await bounded(
        scene,
        """
import ctypes, fcntl, os, select, time
libc = ctypes.CDLL(None, use_errno=True)
for n in range(20):
    if os.fork(): continue
    try:
        inner = select.epoll()
        watch = libc.inotify_init()
        fds = []
        while len(fds) < 200:
            fd = os.eventfd(0)
            fds.append(fd)
            inner.register(fd, 1)
        for k in range(2000):
            path = '/tmp/w%d-%d' % (n, k)
            os.close(os.open(path, os.O_CREAT)); libc.inotify_add_watch(watch, path.encode(), 4095)
            os.unlink(path)
        lock = os.open('/tmp/l%d' % n, os.O_CREAT | os.O_RDWR)
        for k in range(0, 400000, 2): fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, k)
    except OSError: pass
    time.sleep(9)
time.sleep(9)
""",
        4,
    )


@TABLE.attack("names that are not there", needs="memory_limit")
async def dentries(scene: Scene) -> None:
    """Looks up hundreds of thousands of long names that do not exist -> the kernel's cache is bounded."""
    await bounded(
        scene,
        """
import os, time
end, n = time.monotonic() + 2.5, 0
while time.monotonic() < end:
    n += 1
    os.path.exists('/workspace/' + str(n) + 'x' * 230)
""",
        4,
    )


@TABLE.attack("huge arguments and environment")
async def arguments(scene: Scene) -> None:
    """Executes itself with the largest argv and environment, in a chain -> an error or its own end."""
    await bounded(
        scene,
        """
import os
big = ['x' * 131000] * 14
for n in range(30):
    if os.fork() == 0:
        try: os.execve('/usr/bin/sleep', ['sleep', '2', *big], {str(k): 'y' * 100000 for k in range(5)})
        except OSError: os.execv('/usr/bin/sleep', ['sleep', '2'])
""",
        4,
    )
