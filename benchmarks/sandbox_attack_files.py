"""Attacks by files on their way in and out: archives, trees, links that move, and what is not a file."""

from __future__ import annotations

import asyncio
import bz2
import functools
import gzip
import io
import lzma
import os
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.sandbox_attack_kit import Scene, Table, check, typed
from sandbox.errors import FileError, UnsafeTreeError

TABLE = Table("files")


def tar(*members: tuple[str, bytes, str, bytes], **options: object) -> bytes:
    """Returns a tar of (name, type, target, content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, target, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, len(content)
            info.mode = 0o6755
            info.pax_headers = {str(key): str(value) for key, value in options.items()}
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def one(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", content: bytes = b"x") -> bytes:
    """Returns a tar with one member."""
    return tar((name, kind, target, content if kind == tarfile.REGTYPE else b""))


def declared(size: int) -> bytes:
    """Returns a tar whose member declares a size that it has not."""
    info = tarfile.TarInfo("big")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def zipped(name: str, content: bytes = b"x", mode: int = 0o644, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Returns a zip with one member."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.compress_type = mode << 16, method
        archive.writestr(info, content)
    return out.getvalue()


def overlapping() -> bytes:
    """Returns a zip whose many entries are all the same bytes."""
    plain = zipped("a", bytes(4 << 20))
    start = plain.index(b"PK\x01\x02")
    entry = plain[start : plain.index(b"PK\x05\x06")]
    entries = b"".join(entry[:46] + b"%c" % (97 + n % 26) + entry[47:] for n in range(200))
    return (
        plain[:start] + entries + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 200, 200, len(entries), start, 0)
    )


def greedy() -> bytes:
    """Returns an xz whose dictionary alone would take a gigabyte and a half."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    data = bytearray(lzma.compress(one("a"), filters=filters))
    place = data.index(b"\x21\x01", 12)
    data[place + 2] = 40  # the largest dictionary there is
    size = (data[12] + 1) * 4
    data[12 + size - 4 : 12 + size] = struct.pack(
        "<I", __import__("zlib").crc32(bytes(data[12 : 12 + size - 4]))
    )
    return bytes(data)


def _links(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_symlink() and os.readlink(path)[:1] == "/"]


@functools.cache
def hostile() -> dict[str, bytes]:
    """Returns archives, each of which must be refused."""
    makers: dict[str, Callable[[], bytes]] = {
        "a path upwards": lambda: one("../x"),
        "a path upwards, inside": lambda: one("a/../../x"),
        "an absolute path": lambda: one("/etc/x"),
        "a file through a link": lambda: tar(
            ("d", tarfile.SYMTYPE, "/tmp", b""), ("d/x", tarfile.REGTYPE, "", b"x")
        ),
        "a link upwards": lambda: one("d", tarfile.SYMTYPE, "../../etc"),
        "a link to a link": lambda: tar(
            ("a/b", tarfile.DIRTYPE, "", b""), ("l", tarfile.SYMTYPE, "a/b/../..", b"")
        ),
        "a hard link outside": lambda: one("h", tarfile.LNKTYPE, "/etc/passwd"),
        "a device": lambda: one("n", tarfile.CHRTYPE),
        "a block device": lambda: one("n", tarfile.BLKTYPE),
        "a pipe": lambda: one("p", tarfile.FIFOTYPE),
        "a name twice": lambda: tar(("a", tarfile.REGTYPE, "", b"x"), ("a", tarfile.REGTYPE, "", b"y")),
        "a folder that is a file": lambda: tar(
            ("a", tarfile.REGTYPE, "", b"x"), ("a/b", tarfile.REGTYPE, "", b"")
        ),
        "sixty thousand entries": lambda: tar(*((str(n), tarfile.REGTYPE, "", b"") for n in range(60_000))),
        "ten gigabytes declared": lambda: declared(10 << 30),
        "a size beyond all": lambda: declared((1 << 62) + 1),
        "a gzip bomb": lambda: gzip.compress(one("z", content=bytes(16 << 20)), 9),
        "a bzip2 bomb": lambda: bz2.compress(one("z", content=bytes(16 << 20))),
        "an xz bomb": lambda: lzma.compress(one("z", content=bytes(16 << 20))),
        "an xz with a giant dictionary": greedy,
        "a zip bomb": lambda: zipped("z", bytes(16 << 20)),
        "a zip of overlaps": overlapping,
        "a zip by LZMA": lambda: zipped("z", bytes(1 << 20), method=zipfile.ZIP_LZMA),
        "a zip with a path upwards": lambda: zipped("../x"),
        "a zip with a link out": lambda: zipped("l", b"/etc/passwd", 0o120777),
        "a zip with a device": lambda: zipped("d", b"", 0o060666),
        "a time that is infinite": lambda: tar(("a", tarfile.REGTYPE, "", b""), mtime="inf"),
        "a time that is no number": lambda: tar(("a", tarfile.REGTYPE, "", b""), mtime="nan"),
        "a size that is no number": lambda: tar(("a", tarfile.REGTYPE, "", b""), size="-1"),
        "a name with a zero": lambda: tar(("a", tarfile.REGTYPE, "", b""), path="a\0b"),
        "a name without end": lambda: one("/".join(["d" * 200] * 40)),
        "folders without end": lambda: one("/".join("d" * 200)),
        "half an archive": lambda: gzip.compress(one("a", content=bytes(9999)))[:-20],
        "noise": lambda: bytes(range(256)) * 40,
    }
    return {name: make() for name, make in makers.items()}


@TABLE.attack("hostile archives", case=22)
async def archives(scene: Scene) -> None:
    """Thirty archives that lead out, lie about sizes or hold what is no file.

    -> each refused, nothing made.
    """
    through: list[str] = []
    for name, data in (await asyncio.to_thread(hostile)).items():
        error = await typed(scene.box.upload_archive(data, "/workspace/in/here"))
        if not isinstance(error, UnsafeTreeError):
            through.append(f"{name} ({error!r})")
    seen = await scene.box.exec("find /workspace /tmp /dev/shm -mindepth 1 | head -20")
    check(not through, f"went through: {', '.join(through)}")
    check(seen.stdout == b"", f"it left {seen.stdout!r}")


@TABLE.attack("set-id bits", case=22)
async def set_id(scene: Scene) -> None:
    """An archive with set-user and set-group bits -> unpacked without them."""
    await scene.box.upload_archive(one("s"), "/workspace")
    check((await scene.box.stat("/workspace/s")).mode & 0o7000 == 0, "the bits came through")


@TABLE.attack("zip bombs, nested", case=23)
async def nested(scene: Scene) -> None:
    """A zip within a zip that unpacks to a thousandfold -> refused by ratio; the inner one stays a file."""
    inner = zipped("z", bytes(40 << 20))
    error = await typed(scene.box.upload_archive(inner, "/workspace"))
    check(isinstance(error, UnsafeTreeError), f"the bomb went through: {error!r}")
    await scene.box.upload_archive(zipped("inner.zip", inner), "/workspace")
    check((await scene.box.stat("/workspace/inner.zip")).size == len(inner), "the inner archive was changed")


@TABLE.attack("folder swapped for a link", case=22)
async def swapped(scene: Scene) -> None:
    """A process swaps the target folder for links while files are written -> nothing outside is touched."""
    await scene.box.start(
        "while :; do ln -sfn /etc /workspace/t; rm -f /workspace/t; mkdir -p /workspace/t; "
        "rm -rf /workspace/t; ln -sfn /run/tempering /workspace/t; rm -f /workspace/t; done"
    )
    before = (await scene.sibling.exec("ls -la /etc /usr /run 2>/dev/null")).stdout
    for n in range(20):
        await typed(scene.box.write_file("/workspace/t/f", b"x" * n))
        await typed(scene.box.upload_archive(one("sub/x"), "/workspace/t"))
        with tempfile.TemporaryDirectory() as folder:
            await typed(scene.box.download("/workspace/t", Path(folder) / "to"))
            check(not _links(folder), "a link out came through")
    after = (await scene.sibling.exec("ls -la /etc /usr /run 2>/dev/null")).stdout
    check(before == after, "the system's folders changed")
    await scene.answers()


@TABLE.attack("reading what is no file")
async def no_file(scene: Scene) -> None:
    """read_file of pipes, devices, sockets, folders, endless and growing files -> an error in little time."""
    await scene.box.exec("mkfifo /workspace/p; ln -s /workspace/l /workspace/l; ln -s /dev/zero /workspace/z")
    await scene.box.start("while :; do cat /usr/bin/ls; done > /tmp/growing")
    await asyncio.sleep(0.2)
    for path in ("/workspace/p", "/workspace/l", "/workspace/z", "/dev/zero", "/workspace", "/proc/kmsg",
                 "/proc/self/mem", "/proc/kcore", "/tmp/growing"):  # fmt: skip
        async with asyncio.timeout(10):
            error = await typed(scene.box.read_file(path, limit=4096))
        check(isinstance(error, FileError), f"{path} was read, or failed otherwise: {error!r}")
    await scene.answers()


@TABLE.attack("writing into what is no file")
async def write_no_file(scene: Scene) -> None:
    """A pipe, a link or a folder where a file is to be written -> an error in little time, or replaced."""
    await scene.box.exec("mkfifo /workspace/p; ln -s /tmp/there /workspace/l; mkdir /workspace/d")
    for path in ("/workspace/p", "/workspace/l", "/workspace/d", "/proc/self/mem", "/dev/full"):
        async with asyncio.timeout(10):
            error = await typed(scene.box.write_file(path, b"x" * 100))
        check(isinstance(error, FileError), f"{path} was written, or failed otherwise: {error!r}")
    check((await scene.box.exec("ls /tmp/there")).exit_code != 0, "it wrote through a link")
    async with asyncio.timeout(10):
        await scene.box.upload_archive(one("p"), "/workspace")
    check(await scene.box.read_file("/workspace/p") == b"x", "the pipe was not replaced")


@TABLE.attack("names of every kind, downloaded")
async def odd_names(scene: Scene) -> None:
    """Names with newlines, escapes, no UTF-8, 255 bytes, times before 1970.

    -> all as they are, in their place.
    """
    await scene.python(r"""
import os
for name in (b'a\nb', b'\x1b[2Jc', b'\xff\xfe', b'-rf', b'...', b'$(id)', b'x' * 255, b'\xed\xa0\x80', b' '):
    os.close(os.open(b'/workspace/' + name, os.O_CREAT, 0o600))
open('/workspace/old', 'w').close(); os.utime('/workspace/old', ns=(-(1 << 60), -(1 << 60)))
os.mkfifo('/workspace/pipe')
""")
    check(len(await scene.box.list_files()) == 11, "the list is wrong")
    with tempfile.TemporaryDirectory() as folder:
        await scene.box.download("/workspace", Path(folder) / "to")
        found = os.listdir(os.path.join(folder, "to"))
        check(len(found) == 10, f"{len(found)} files came")
        check(os.listdir(folder) == ["to"], "something came beside it")
    await scene.answers()


@TABLE.attack("download of links out")
async def links_out(scene: Scene) -> None:
    """A tree with links to the host's files and upwards -> refused, and nothing is there."""
    for target in ("/etc/passwd", "../../x", "a/../../../x"):
        await scene.box.exec(["ln", "-sfn", target, "/workspace/l"])
        with tempfile.TemporaryDirectory() as folder:
            error = await typed(scene.box.download("/workspace", Path(folder) / "to"))
            check(isinstance(error, UnsafeTreeError), f"a link to {target} came through")
            check(not os.listdir(folder), "a part of it is there")


@TABLE.attack("tree that changes while it is read")
async def changing(scene: Scene) -> None:
    """Files grow, shrink, vanish and become links while a tree is downloaded -> whole or an error."""
    await scene.box.exec("for i in $(seq 200); do head -c 9000 /dev/zero > /workspace/$i; done")
    await scene.box.start(
        "while :; do for i in $(seq 200); do rm -f $i; ln -s /etc/passwd $i; rm -f $i; mkdir $i; rmdir $i; "
        "head -c $((RANDOM % 9000 + 1)) /dev/zero > $i; done; done"
    )
    for _ in range(4):
        with tempfile.TemporaryDirectory() as folder:
            error = await typed(scene.box.download("/workspace", Path(folder) / "to"))
            check(error is None or isinstance(error, FileError), f"it failed otherwise: {error!r}")
            check(not _links(folder), "a link out came through")
    await scene.answers()


@TABLE.attack("shell, interpreter and agent overwritten", case=27)
async def overwritten(scene: Scene) -> None:
    """Writes over /bin/sh, env, python and the agent, by commands and by upload -> next commands as ever."""
    await scene.box.exec(
        "for f in /bin/sh /usr/bin/env /usr/bin/python3 /usr/bin/echo /etc/ld.so.preload "
        "/run/tempering/agent/*.py /opt/tempering/agent/*.py "
        "/proc/self/exe /proc/1/exe; do echo evil > $f; cp /usr/bin/true $f; rm -f $f; "
        "mv $f $f.x; chmod 777 $f; done; mount --bind /usr/bin/true /bin/sh",
        timeout_s=20,
    )
    for path in ("/usr/bin/sh", "/usr/bin/env", "/usr/bin/python3", "/etc/ld.so.preload"):
        check(isinstance(await typed(scene.box.write_file(path, b"evil")), FileError), f"{path} was written")
        error = await typed(scene.box.upload_archive(one(Path(path).name), str(Path(path).parent)))
        check(isinstance(error, FileError), f"{path} was uploaded over")
    await scene.answers()
    result = await scene.box.exec("env true; /usr/bin/env echo right")
    check(result.stdout == b"right\n", f"a command gave {result}")


@TABLE.attack("files that the next command reads", case=27)
async def planted(scene: Scene) -> None:
    """Plants .bashrc, BASH_ENV, sitecustomize, json.py, .pth, a PATH and preloads.

    -> control is unaffected.
    """
    await scene.python(r"""
import os
evil = "import os\nos.write(1, b'evil')\nos._exit(0)\n"
os.chdir('/workspace')
for name in ('json.py', 'os.py', 'sitecustomize.py', 'usercustomize.py', 'encodings.py', 'agent.py'):
    for folder in ('/workspace', '/tmp', '/workspace/.local/lib/python3.11/site-packages'):
        os.makedirs(folder, exist_ok=True); open(folder + '/' + name, 'w').write(evil)
for name in ('.bashrc', '.profile', '.bash_profile', '.bash_login', '.shrc', '.pythonrc', '.inputrc'):
    open(name, 'w').write('echo evil; exit 0\n')
for name in ('echo', 'sh', 'env', 'python3', 'bash'):
    open(name, 'w').write('#!/bin/sh\necho evil\n'); os.chmod(name, 0o777)
""")
    await scene.box.exec(
        "export PATH=/workspace BASH_ENV=/workspace/.bashrc LD_PRELOAD=/workspace/x.so "
        "PYTHONSTARTUP=/workspace/json.py PYTHONPATH=/workspace ENV=/workspace/.shrc"
    )
    await scene.answers()
    inner = await scene.box.python("import json; print(json.__file__)")
    check(inner.stdout.startswith(b"/usr/"), f"a call imported {inner.stdout!r}")
    shell = scene.box.shell()
    check((await shell.exec("echo right")).stdout == b"right\n", "a session read a planted file")
    await scene.box.write_file("/workspace/sub/f", b"data")
    check(await scene.box.read_file("/workspace/sub/f") == b"data", "file operations are affected")
