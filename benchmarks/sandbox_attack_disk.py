"""Attacks on disk: bytes, names, logs, what is unlinked but open, and what a snapshot makes of a sandbox."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from benchmarks.sandbox_attack_kit import CANARY, SPEC, Scene, Table, check, limited, typed
from sandbox.errors import FileError, SandboxError
from sandbox.trees import TreeLimits

TABLE = Table("disk")


def _files(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


_FOLDERS = ("/workspace", "/tmp", "/dev/shm")


@TABLE.attack("dd into every folder", case=16)
async def dd(scene: Scene) -> None:
    """Fills every writable folder with dd -> no room, and the host's disk has what it had."""
    before = shutil.disk_usage(scene.stage.folder).free
    for folder in _FOLDERS:
        result = await scene.box.exec(
            f"for i in 1 2 3 4; do dd if=/dev/zero of={folder}/$i bs=1M || exit 9; done"
        )
        check(result.exit_code == 9, f"{folder} took more than its size")
    await scene.box.exec("rm -rf /workspace/* /tmp/* /dev/shm/*")
    check(before - shutil.disk_usage(scene.stage.folder).free < 1 << 30, "the host's disk was filled")
    await scene.answers()


@TABLE.attack("writing outside the folders", case=16)
async def outside(scene: Scene) -> None:
    """Looks for any other place that takes a file -> there is none."""
    await scene.says(
        """
import os
got = []
for root, folders, _ in os.walk('/'):
    folders[:] = [f for f in folders if root != '/' or f not in ('proc', 'workspace', 'tmp', 'sys')]
    if root == '/dev': folders.remove('shm')
    if root.startswith('/dev/mqueue'): continue
    try: os.close(os.open(root + '/.probe', os.O_CREAT | os.O_WRONLY)); got.append(root)
    except OSError: pass
print(got)
""",
        b"[]",
        30,
    )


@TABLE.attack("names without bytes", needs="inode_limit")
async def inodes(scene: Scene) -> None:
    """Makes a hundred thousand empty files, folders and links -> no room left for names."""
    source = """
import os
made = 0
try:
    for n in range(100000):
        os.close(os.open('/workspace/%d' % n, os.O_CREAT)); os.mkdir('/workspace/d%d' % n); made += 2
except OSError as error: print(error.errno == 28 and made <= 3000)
"""
    await scene.says(source, b"True")
    await scene.box.exec("rm -rf /workspace/*")
    await scene.answers()


@TABLE.attack("files unlinked while open")
async def unlinked(scene: Scene) -> None:
    """Writes into files that it has unlinked, never closing them -> the same limit, free when it ends."""
    source = """
import os
held, total = [], 0
try:
    while total < 1 << 30:
        fd = os.open('/workspace/x', os.O_CREAT | os.O_WRONLY); os.unlink('/workspace/x'); held.append(fd)
        total += os.write(fd, bytes(1 << 20))
except OSError: pass
print(total <= 9 << 20)
"""
    await scene.says(source, b"True")
    result = await scene.box.exec("head -c 4000000 /dev/zero > /workspace/y")
    check(result.exit_code == 0, "the room was not free again")


@TABLE.attack("sparse terabyte, downloaded", case=18)
async def sparse(scene: Scene) -> None:
    """Sparse files as large and as many as allowed, then download -> refused by size before it is read."""
    await scene.python("""
import os
for size in (1 << 40, 1 << 32, 8 << 20):
    for n in range(100):
        try: os.truncate(os.open('/workspace/%d' % n, os.O_CREAT | os.O_RDWR), size)
        except OSError: break
""")
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "to"
        error = await typed(scene.box.download("/workspace", to, limits=TreeLimits(64 << 20, 1000)))
        check(isinstance(error, SandboxError), "the download was not refused")
        check(sum(path.stat().st_size for path in _files(folder)) <= 64 << 20, "it was read")
    await scene.answers()


@TABLE.attack("snapshot of holes", needs="disk_snapshot")
async def holes(scene: Scene) -> None:
    """Hundreds of sparse files in a snapshot -> what the host keeps is no more than the sandbox may hold."""
    await scene.python("""
import os
for n in range(100): os.truncate(os.open('/workspace/%d' % n, os.O_CREAT | os.O_RDWR), 8 << 20)
""")
    error = await typed(scene.box.snapshot())
    kept = sum(path.stat().st_size for path in scene.stage.folder.rglob("*") if path.is_file())
    for name in await scene.fleet.snapshots():
        await scene.fleet.forget(name)
    check(kept < 64 << 20, f"a sandbox of 24 MiB made the host keep {kept >> 20} MiB")
    check(error is None or isinstance(error, FileError), f"it failed otherwise: {error!r}")
    await scene.answers()


@TABLE.attack("snapshot of depths and odd names", needs="disk_snapshot")
async def odd_snapshot(scene: Scene) -> None:
    """Folders a thousand deep, names of 255 bytes that are no UTF-8, times before 1970.

    -> whole, or refused.
    """
    await scene.python(r"""
import os
os.chdir('/workspace')
os.mkdir(b'\xff\xfe\n' + b'\x80' * 250)
open('old', 'w').close(); os.utime('old', ns=(-(1 << 60), -(1 << 60)))
os.mkfifo('pipe')
os.symlink('/etc/passwd', 'link')
""")
    name = await scene.box.snapshot()
    copy = await scene.fresh(SPEC, snapshot=name)
    seen = await scene.python("import os; print(len(os.listdir('.')), os.readlink('link'))", box=copy)
    check(seen.stdout == b"3 /etc/passwd\n", f"the copy has {seen}")
    await scene.fleet.forget(name)
    await scene.python("""
import os
os.chdir('/workspace')
for n in range(1500): os.mkdir('d'); os.chdir('d')
""")
    error = await typed(scene.box.snapshot())
    check(error is None or isinstance(error, FileError), f"it failed otherwise: {error!r}")
    await scene.answers()


@TABLE.attack("deep folders, removed and listed")
async def deep(scene: Scene) -> None:
    """Folders deeper than any path may be long -> operations on them end in an error or work; it lives."""
    await scene.python("""
import os
os.chdir('/workspace')
for n in range(3000):
    try: os.mkdir('d' * 200); os.chdir('d' * 200)
    except OSError: break
""")
    with tempfile.TemporaryDirectory() as folder:
        for work in (scene.box.list_files(), scene.box.download("/workspace", Path(folder) / "x")):
            error = await typed(work)
            check(error is None or isinstance(error, FileError), f"it failed otherwise: {error!r}")
    error = await typed(scene.box.remove("/workspace/" + "d" * 200))
    check(error is None, f"the tree could not be removed: {error}")
    await scene.answers()


@TABLE.attack("endless output", case=19)
async def endless(scene: Scene) -> None:
    """`yes` to both streams, and to all of pid 1's -> cut to the limit; nothing grows on the host."""
    line = "yes & yes >&2 & yes > /proc/1/fd/1; yes > /proc/1/fd/2; wait"
    result = await scene.box.exec(line, timeout_s=1.5, output_limit=10_000)
    check(result.timed_out and result.truncated, f"it was not cut: {result.exit_code}")
    check(len(result.stdout) + len(result.stderr) < 21_000, "more came than was asked for")
    await scene.answers()


@TABLE.attack("endless log of a background process", case=19)
async def endless_log(scene: Scene) -> None:
    """A background process that never stops writing -> its last bytes are kept, no more."""
    process = await scene.box.start("yes", log_limit=10_000)
    await asyncio.sleep(1)
    log = await process.logs()
    check(0 < len(log.data) <= 10_000, f"{len(log.data)} bytes were kept")
    await process.signal(9)
    await scene.answers()


@TABLE.attack("open files", case=20)
async def descriptors(scene: Scene) -> None:
    """Opens files until it may not, in sixty processes -> only they fail."""
    source = """
import os, time
for n in range(40):
    if os.fork() == 0: break
fds = []
try:
    while len(fds) < 5000: fds.append(os.open('/dev/null', 0))
except OSError: pass
print(len(fds) <= 1024, flush=True)
time.sleep(1)
"""
    result = await scene.python(source)
    check(set(result.stdout.split()) == {b"True"}, f"it opened more than its limit: {result.stdout[:99]!r}")
    await scene.answers()


@TABLE.attack("core dumps", case=21)
async def cores(scene: Scene) -> None:
    """Dies by every signal that dumps core, with the limit raised or lowered -> no core is written."""
    await scene.box.exec(
        "ulimit -c unlimited; ulimit -c 0; for s in ABRT QUIT SEGV ILL TRAP FPE BUS SYS XCPU XFSZ; do "
        "sh -c 'kill -'$s' $$'; done; cd /tmp; sh -c 'kill -ABRT $$'",
        timeout_s=20,
    )
    left = await scene.box.exec("ls -A /workspace /tmp | grep -i core; ulimit -c; ulimit -Hc")
    check(left.stdout == b"0\n0\n", f"a core is there, or allowed: {left.stdout!r}")
    result = await scene.python("""
import resource
print(resource.getrlimit(4))
try: resource.setrlimit(4, (0, 0)); print('could')
except (OSError, ValueError): pass
""")
    check(result.stdout == b"(1, 1)\n", f"a handler of the host may get cores: {result.stdout!r}")


@TABLE.attack("host's names and secrets in the tree")
async def names(scene: Scene) -> None:
    """Looks through mounts, command lines and environments.

    -> no owner, no sibling, no variable of the node.
    """
    seen = (await scene.box.exec(
        "cat /proc/mounts /proc/self/mountinfo /proc/[0-9]*/cmdline /proc/[0-9]*/environ /proc/[0-9]*/cgroup"
        " 2>/dev/null; env; hostname", output_limit=1 << 20
    )).stdout  # fmt: skip
    for word in (CANARY, scene.sibling.id, "PYTHONPATH", "TOKEN"):
        check(word.encode() not in seen, f"{word} can be seen inside")


@TABLE.attack("limits of nothing")
async def limits(scene: Scene) -> None:
    """A specification whose limits are zero, negative or not numbers -> refused, as none means no limit."""
    for changes in (
        {"memory_bytes": 0}, {"memory_bytes": -1}, {"pids": -1}, {"pids": 0}, {"cpus": 0}, {"cpus": -1.0},
        {"tmpfs_bytes": 0}, {"tmpfs_inodes": -1}, {"open_files": -1},
    ):  # fmt: skip
        error = await typed(scene.fresh(limited(SPEC, **changes)))
        check(isinstance(error, SandboxError), f"{changes} was granted")
        check(type(error).__name__ == "PolicyError", f"{changes} was refused as {error!r}")
