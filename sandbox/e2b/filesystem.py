"""What E2B clients do with paths of a sandbox: look, make, move, remove."""

from __future__ import annotations

import posixpath
import stat
from collections.abc import AsyncIterator
from datetime import UTC, datetime

from aiohttp import web

from sandbox.e2b.connect import Message
from sandbox.e2b.inside import Inside, user_of
from sandbox.e2b.status import BAD, THERE, UNOFFERED, E2BError
from sandbox.errors import FileError
from sandbox.trees import Entry, batches
from sandbox.types import FileInfo

_MAX_DEPTH, _MAX_ENTRIES = 64, 10_000
_ASK_S = 60.0
_TYPES = {"file": "FILE_TYPE_FILE", "dir": "FILE_TYPE_DIRECTORY", "link": "FILE_TYPE_SYMLINK"}


async def look(inside: Inside, request: web.Request, message: Message) -> Message:
    """Describes a path."""
    _check_user(request)
    return {"entry": _entry(await inside.box.stat(inside.path(message.get("path"))))}


async def list_folder(inside: Inside, request: web.Request, message: Message) -> Message:
    """Describes what is in a folder, and below it down to a depth."""
    _check_user(request)
    depth = message.get("depth") or 1
    if not isinstance(depth, int) or not 0 < depth <= _MAX_DEPTH:
        raise E2BError(BAD, f"depth is a number from 1 to {_MAX_DEPTH}")
    path = inside.path(message.get("path"))
    if (await inside.box.stat(path)).kind == "file":
        raise E2BError(BAD, f"{path} is not a folder")
    found = [info async for info in _walk(inside, path, depth)]
    return {"entries": [_entry(info) for info in found]}


async def make_folder(inside: Inside, request: web.Request, message: Message) -> Message:
    """Makes a folder and those that it is in."""
    _check_user(request)
    path = inside.path(message.get("path"))
    try:
        kind = (await inside.box.stat(path)).kind
    except FileError:
        kind = ""
    if kind:
        raise E2BError(THERE if kind == "dir" else BAD, f"{path} is there already")
    for batch in batches([(Entry(".", "dir", 0o755), b"")]):
        outcome = await inside.box.run({"op": "unpack", "path": path}, batch, _ASK_S, 4096)
        if outcome.result.exit_code != 0:
            why = outcome.result.stderr.decode(errors="replace").strip()
            raise FileError(f"unpack of {path!r} in the sandbox failed: {why}")
    return {"entry": _entry(await inside.box.stat(path))}


async def move(inside: Inside, request: web.Request, message: Message) -> Message:
    """Gives a file or folder another path; a file that is there is replaced."""
    _check_user(request)
    source, to = inside.path(message.get("source")), inside.path(message.get("destination"))
    await inside.box.stat(source)
    await inside.box.move(source, to)
    return {"entry": _entry(await inside.box.stat(to))}


async def remove(inside: Inside, request: web.Request, message: Message) -> Message:
    """Removes a file or a whole folder."""
    _check_user(request)
    await inside.box.remove(inside.path(message.get("path")))
    return {}


async def watch(inside: Inside, request: web.Request, message: Message) -> AsyncIterator[Message]:
    """Refuses to watch a folder."""
    raise _no_watching()
    yield {}


async def watcher(inside: Inside, request: web.Request, message: Message) -> Message:
    """Refuses to watch a folder."""
    raise _no_watching()


def _no_watching() -> E2BError:
    return E2BError(UNOFFERED, "folders cannot be watched here: list them, or run a command that waits")


def _check_user(request: web.Request) -> None:
    if user_of(request) is not None:
        raise E2BError(BAD, "files belong to 'user'; another user's are reached by commands that run as it")


async def _walk(inside: Inside, path: str, depth: int) -> AsyncIterator[FileInfo]:
    folders, count = [(path, depth)], 0
    while folders:
        folder, left = folders.pop(0)
        for info in await inside.box.list_files(folder, limit=_MAX_ENTRIES):
            count += 1
            if count > _MAX_ENTRIES:
                raise E2BError(BAD, f"{path} has more than {_MAX_ENTRIES} entries: ask for less depth")
            yield info
            if info.kind == "dir" and left > 1:
                folders.append((info.path, left - 1))


def _entry(info: FileInfo) -> Message:
    """Returns a path as clients know it."""
    path = _text(info.path)
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), _text(info.target)))
    owner = "root" if info.uid == 0 else "user"
    link = {"symlinkTarget": target, "isSymlink": True} if info.kind == "link" else {}
    return {
        "name": posixpath.basename(path), "path": path, "size": str(info.size), "mode": info.mode,
        "type": _TYPES.get(info.kind, "FILE_TYPE_UNSPECIFIED"), "permissions": stat.filemode(info.mode)[1:],
        "owner": owner, "group": owner, "modifiedTime": _time(info.mtime), **link,
    }  # fmt: skip


def _text(name: str) -> str:
    """Returns a name as text, whatever bytes a sandbox has put into it."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _time(nanoseconds: int) -> str:
    try:
        moment = datetime.fromtimestamp(nanoseconds // 10**9, UTC)
    except (ValueError, OverflowError, OSError):  # a sandbox may say anything of its files
        moment = datetime.fromtimestamp(0, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S") + f".{nanoseconds % 10**9:09d}Z"
