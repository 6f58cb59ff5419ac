"""Attacks that a sibling would feel: what the kernel counts by user, or for the whole machine at once."""

from __future__ import annotations

import asyncio

from benchmarks.sandbox_attack_kit import Scene, Table, check

TABLE = Table("siblings")


async def starved(scene: Scene, take: str, use: str, needs_s: float = 1.5) -> None:
    """Takes all of something in the attacked sandbox; a sibling must still get what it needs of it.

    Args:
        scene: Where it happens.
        take: Python that takes until refused. It has `libc`, `os`, `socket`, `signal`; 40 processes run it.
        use: Python of the sibling, raising an OSError when it gets nothing.
        needs_s: How long taking takes.
    """
    head = "import ctypes, os, signal, socket, time\nlibc = ctypes.CDLL(None, use_errno=True)\nheld = []\n"
    head += (
        "def sure(value):\n    if value < 0: raise OSError(ctypes.get_errno(), 'refused')\n    return value\n"
    )
    body = "".join(f"    {line}\n" for line in take.strip().splitlines())
    greedy = f"{head}for n in range(40):\n    if os.fork() == 0: break\n"
    greedy += f"try:\n{body}except OSError: pass\ntime.sleep(20)"
    attack = asyncio.create_task(scene.python(greedy, needs_s + 15))
    await asyncio.sleep(needs_s)
    try:
        result = await scene.python(f"{head}{use}\nprint('fine')", box=scene.sibling)
    finally:
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
    last = result.stderr.strip().splitlines()[-1:]
    check(result.stdout == b"fine\n", f"a sibling gets nothing any more: {last or result}")
    await scene.answers()


@TABLE.attack("processes of one user", case=11, needs="process_limit")
async def nproc(scene: Scene) -> None:
    """As many processes as it may have -> a sibling can start its own."""
    await starved(scene, "while True: os.fork() or time.sleep(20)",
                  "pids = [os.fork() or os._exit(0) for _ in range(30)]")  # fmt: skip


@TABLE.attack("inotify instances")
async def inotify(scene: Scene) -> None:
    """All inotify instances of its user -> a sibling has its own."""
    await starved(
        scene, "while True: sure(libc.inotify_init())", "[sure(libc.inotify_init()) for _ in range(5)]"
    )


@TABLE.attack("inotify watches")
async def watches(scene: Scene) -> None:
    """As many watches as the kernel gives its user -> a sibling has its own."""
    take = """
fd = sure(libc.inotify_init())
for root, folders, names in os.walk('/usr'):
    sure(libc.inotify_add_watch(fd, root.encode(), 2))
    for name in names: sure(libc.inotify_add_watch(fd, (root + '/' + name).encode(), 2))
"""
    use = "fd = sure(libc.inotify_init())\n"
    use += "for n in range(9): sure(libc.inotify_add_watch(fd, b'/usr/bin', 1 << n))"
    await starved(scene, take, use, 3)


@TABLE.attack("pending signals and timers")
async def pending(scene: Scene) -> None:
    """All pending signals and timers of its user -> a sibling can make timers and queue signals."""
    take = """
made = ctypes.c_int()
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
while True:
    sure(libc.syscall(222, 1, 0, ctypes.byref(made)))
"""
    use = """
made = ctypes.c_int()
signal.pthread_sigmask(signal.SIG_BLOCK, {40})
for n in range(20):
    sure(libc.syscall(222, 1, 0, ctypes.byref(made)))
    if libc.sigqueue(os.getpid(), 40, 0): raise OSError(11, 'no signal')
"""
    await starved(scene, take, use, 3)


@TABLE.attack("bytes of message queues")
async def mqueue(scene: Scene) -> None:
    """All bytes of POSIX message queues of its user -> a sibling can open one."""
    make = "sure(libc.syscall(240, b'q%d-%d' % (os.getpid(), n), 0o102, 0o600, 0))"
    await starved(scene, f"for n in range(9999): {make}", f"for n in range(3): {make}")


@TABLE.attack("descriptors in flight")
async def in_flight(scene: Scene) -> None:
    """Descriptors in messages that nobody reads -> a sibling can still pass its own, its agent too."""
    take = """
import array
fds = array.array('i', [0] * 200)
while True:
    a, b = socket.socketpair()
    held.append((a, b)); a.setblocking(False)
    try:
        while True: a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    except BlockingIOError: pass
"""
    use = """
import array
a, b = socket.socketpair()
for n in range(9): a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 9))])
"""
    await starved(scene, take, use)


@TABLE.attack("pages of pipes")
async def pipe_pages(scene: Scene) -> None:
    """All pages of pipes of its user -> a sibling's new pipes have their size and can grow."""
    take = """
import fcntl
while True:
    r, w = os.pipe()
    for size in (1 << 20, 1 << 18):
        try: fcntl.fcntl(w, 1031, size); break
        except OSError: pass
"""
    use = """
import fcntl
r, w = os.pipe()
if fcntl.fcntl(w, 1032) < 1 << 16: raise OSError(12, 'a pipe of %d' % fcntl.fcntl(w, 1032))
fcntl.fcntl(w, 1031, 1 << 18)
"""
    await starved(scene, take, use, 2)


@TABLE.attack("locked memory")
async def mlock(scene: Scene) -> None:
    """Locks memory and shared segments until refused -> a sibling can lock its share."""
    take = """
import mmap
while True:
    page = mmap.mmap(-1, 4096); held.append(page)
    sure(libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), 4096))
"""
    use = "import mmap\npage = mmap.mmap(-1, 4096)\n"
    use += "sure(libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page))), 4096))"
    await starved(scene, take, use)


@TABLE.attack("keys of the kernel")
async def keys(scene: Scene) -> None:
    """Adds keys to keyrings, which count by user, and looks for a sibling's -> no keys at all."""
    await scene.says(
        """
import ctypes
libc = ctypes.CDLL(None)
print([n for n in (248, 249, 250) if libc.syscall(n, b'user', b'x', b'y', 1, -4) >= 0])
""",
        b"[]",
    )


@TABLE.attack("asynchronous I/O contexts")
async def aio(scene: Scene) -> None:
    """All contexts of asynchronous I/O of the machine -> it gets none."""
    await scene.says(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "print(sum(libc.syscall(206, 1000, ctypes.byref(ctypes.c_ulong())) == 0 for _ in range(100)))",
        b"0",
    )


@TABLE.attack("terminals of the machine", needs="terminal terminal_limit")
async def terminals(scene: Scene) -> None:
    """Opens terminals until refused -> a sibling can still have one."""
    attack = asyncio.create_task(scene.python("""
import os, time
for n in range(40):
    if os.fork() == 0: break
try:
    while True: os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)
except OSError: pass
time.sleep(20)
""", 20))  # fmt: skip
    await asyncio.sleep(2)
    try:
        process = await scene.sibling.start(["echo", "here"], terminal=(24, 80))
        said = (await process.wait(10)).stdout
    finally:
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
    check(b"here" in said, f"a sibling has no terminal any more: {said!r}")


@TABLE.attack("files and sockets of a sibling")
async def files(scene: Scene) -> None:
    """Writes files, shared memory, queues and sockets by name -> a sibling sees none of them."""
    await scene.python("""
import ctypes, os, socket
libc = ctypes.CDLL(None)
for folder in ('/tmp', '/workspace', '/dev/shm'): open(folder + '/mine', 'w').write('secret')
socket.socket(socket.AF_UNIX).bind('/tmp/sock')
libc.shmget(4711, 4096, 0o1666); libc.msgget(4711, 0o1666); libc.semget(4711, 1, 0o1666)
libc.syscall(240, b'mine', 0o102, 0o666, 0)
""")
    result = await scene.python(
        """
import ctypes, os
libc = ctypes.CDLL(None)
paths = ('/tmp/mine', '/workspace/mine', '/dev/shm/mine', '/tmp/sock')
found = libc.shmget(4711, 0, 0), libc.msgget(4711, 0), libc.semget(4711, 0, 0)
print([path for path in paths if os.path.exists(path)], max(*found, libc.syscall(240, b'mine', 2, 0, 0)))
""",
        box=scene.sibling,
    )
    check(result.stdout == b"[] -1\n", f"a sibling sees {result}")


@TABLE.attack("all at once")
async def together(scene: Scene) -> None:
    """Storms of processes, memory, disk and output in four sandboxes at once -> a sibling answers."""
    storms = (
        "b() { b | b & b; }; b",
        "while :; do head -c 200000000 /dev/zero | tail -c 200000000 > /dev/null; done",
        "while :; do for f in /tmp /workspace /dev/shm; do cat /dev/zero > $f/x; rm -f $f/x; done; done",
        "yes & yes >&2 & yes",
    )
    boxes = await asyncio.gather(*(scene.fresh() for _ in storms))
    attacks = [
        asyncio.create_task(box.exec(line, timeout_s=3)) for box, line in zip(boxes, storms, strict=True)
    ]
    for _ in range(10):
        await scene.answers(scene.sibling)
    await asyncio.gather(*attacks, return_exceptions=True)
    for box in boxes:
        await scene.answers(box)
