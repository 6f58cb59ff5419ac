"""Files and trees of a sandbox: what is there, trees out and in.

A tree is a stream of entries, each `!I` (length of the JSON object), the object and `size` bytes of content:

    {"path": "a/b", "kind": "file", "mode": 420, "mtime": ns, "size": bytes, "at": offset, "target": ""}

Paths are relative, with `/` between names; parents come before what is in them. A file may come in several
entries, by their `at`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time

from . import small_json
from .frames import CHUNK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .frames import Header

LENGTH = struct.Struct("!I")
KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "link"}
PIECE = 1 << 20


def perform(job: Header) -> int:
    """Does a file operation; an error of the system becomes the command's."""
    if job["op"] == "list":
        return tell(entries(str(job["path"]), job["max_entries"]))
    if job["op"] == "stat":
        return tell([describe(job["path"])])
    if job["op"] == "pack":
        for root in job["roots"]:
            pack(os.fsencode(root), os.fsencode(job["base"]), job["max_entries"], job["max_bytes"])
        return 0
    if job["op"] == "unpack":
        unpack(os.fsencode(job["path"]))
        return 0
    if job["op"] == "move":
        os.makedirs(os.path.dirname(job["to"]) or ".", exist_ok=True)
        os.rename(job["path"], job["to"])
        return 0
    remove(job["path"])
    return 0


def entries(folder: str, most: int) -> list[Header]:
    """Returns what is known of what is in a folder, by name; what is taken away meanwhile is left out."""
    names = sorted(os.listdir(folder))
    if len(names) > most:
        raise OSError(errno.EFBIG, str(len(names)) + " entries are more than the limit of " + str(most))
    found: list[Header] = []
    for name in names:
        try:
            found.append(describe(os.path.join(folder, name)))
        except FileNotFoundError:
            continue
    return found


def tell(found: list[Header]) -> int:
    """Writes a JSON object a line."""
    write_all("".join(small_json.dumps(one) + "\n" for one in found).encode())
    return 0


def describe(path: str) -> Header:
    """Returns what is known of a path itself, following no link."""
    info = os.lstat(path)
    return {
        "path": path,
        "kind": KINDS.get(stat.S_IFMT(info.st_mode), "other"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "mtime": info.st_mtime_ns,
        "uid": info.st_uid,
        "target": os.readlink(path) if stat.S_ISLNK(info.st_mode) else "",
    }


def pack(root: bytes, base: bytes, most: int, most_bytes: int) -> None:
    """Writes the tree below `root` as entries, relative to `base`; no sockets, pipes and devices.

    What is taken away meanwhile is left out.
    """
    total = 0
    for count, path in enumerate(walk(root)):
        try:
            info = os.lstat(path)
            total += info.st_size
            if count >= most or total > most_bytes:
                limit = str(most) + " entries or " + str(most_bytes) + " bytes"
                raise OSError(errno.EFBIG, "more than " + limit)
            pack_one(path, info, os.fsdecode(os.path.relpath(path, base)))
        except FileNotFoundError:
            if path == root:
                raise


def pack_one(path: bytes, info: os.stat_result, name: str) -> None:
    """Writes a file, a link or a folder itself as an entry `name`."""
    kind = KINDS.get(stat.S_IFMT(info.st_mode))
    entry: Header = {
        "path": name,
        "kind": kind,
        "mode": stat.S_IMODE(info.st_mode),
        "mtime": max(info.st_mtime_ns, 0),
    }
    if kind == "file":
        pack_file(path, entry)
    elif kind == "link":
        put({**entry, "target": os.fsdecode(os.readlink(path))}, b"")
    elif kind == "dir":
        put(entry, b"")


def walk(root: bytes) -> Iterator[bytes]:
    """Yields a path and, if it is a folder, all below it, parents first, through no link."""
    yield root
    try:
        names = sorted(os.listdir(root)) if stat.S_ISDIR(os.lstat(root).st_mode) else []
    except FileNotFoundError:
        return
    for name in names:
        yield from walk(os.path.join(root, name))


def pack_file(path: bytes, entry: Header) -> None:
    """Writes a file in pieces, as long as it was when it was opened."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    left, at = os.fstat(fd).st_size, 0
    while True:
        data = read_up_to(fd, min(left, PIECE))
        put({**entry, "at": at}, data)
        at, left = at + len(data), left - len(data)
        if not left or not data:
            os.close(fd)
            return


def read_up_to(fd: int, size: int) -> bytes:
    """Reads `size` bytes, or fewer when the file has become shorter."""
    data = b""
    while len(data) < size and (more := os.read(fd, size - len(data))):
        data += more
    return data


def put(entry: Header, data: bytes) -> None:
    """Writes an entry."""
    text = small_json.dumps({**entry, "size": len(data)}).encode()
    write_all(LENGTH.pack(len(text)) + text + data)


def write_all(data: bytes) -> None:
    """Writes to standard output."""
    view = memoryview(data)
    while view:
        view = view[os.write(1, view[:CHUNK]) :]


def unpack(base: bytes) -> None:
    """Makes the entries that standard input brings, below `base`."""
    while head := read_up_to(0, LENGTH.size):
        entry = small_json.loads(read_up_to(0, LENGTH.unpack(head)[0]))
        path = base if entry["path"] == "." else os.path.join(base, os.fsencode(entry["path"]))
        make(path, entry, read_up_to(0, entry["size"]))


def make(path: bytes, entry: Header, data: bytes) -> None:
    """Makes one entry; a link or file that is in the way is replaced, a folder kept."""
    parent = os.path.dirname(path)
    os.makedirs(parent, exist_ok=True)
    if entry["kind"] == "dir":
        if not os.path.isdir(path):
            os.mkdir(path, entry["mode"] | 0o700)
        return
    if os.path.lexists(path) and not entry.get("at") and not os.path.isdir(path):
        os.unlink(path)
    if entry["kind"] == "link":
        os.symlink(os.fsencode(entry["target"]), path)
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    os.lseek(fd, entry.get("at", 0), os.SEEK_SET)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fchmod(fd, entry["mode"] & 0o777)
    os.close(fd)
    os.utime(path, ns=(entry["mtime"], entry["mtime"]))


def remove(path: str) -> None:
    """Removes a file or a whole tree."""
    if os.path.isdir(path) and not os.path.islink(path):
        remove_tree(path, None)
    else:
        os.unlink(path)


def remove_tree(path: str, deadline: float | None) -> None:
    """Removes a folder with all in it, through no link, deeper than any path or stack may be.

    What lies deep is moved up before it is removed, so that no folder is more than two levels down.
    """
    os.chmod(path, 0o700)
    top, moved = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), 0
    try:
        while names := os.listdir(top):
            for name in names:
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "too many files")
                if not unlinked(name, top):
                    moved = empty(name, top, moved)
                    os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(path)


def unlinked(name: str, folder: int) -> bool:
    """Removes what is no folder; returns whether it was none, or gone already."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    except FileNotFoundError:
        pass
    return True


def empty(name: str, top: int, moved: int) -> int:
    """Removes the files of a folder in `top`, moves its folders there; returns how many were moved so far."""
    os.chmod(name, 0o700, dir_fd=top)
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for inner in os.listdir(fd):
            if not unlinked(inner, fd):
                moved += 1
                os.chmod(inner, 0o700, dir_fd=fd)
                os.rename(
                    inner, ".moved-" + str(os.getpid()) + "-" + str(moved), src_dir_fd=fd, dst_dir_fd=top
                )
    finally:
        os.close(fd)
    return moved
