"""Files of a sandbox to and from E2B clients, in pieces, so that no file has to fit into a front."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import aiohttp
from aiohttp import web

from sandbox.e2b.inside import Inside, number_of, user_of
from sandbox.e2b.status import BAD, SLOW, E2BError

_T = TypeVar("_T")
PIECE = 4 << 20
IDLE_S = 60.0
_MAX_FILES = 1000


async def download(inside: Inside, request: web.Request) -> web.StreamResponse:
    """Sends a file; one that cannot be read is an error before the first byte."""
    path = _asked(inside, request)
    data = await inside.box.read_at(path, 0, PIECE)
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    await response.prepare(request)
    sent = 0
    while data:
        await response.write(data)
        sent += len(data)
        data = await inside.box.read_at(path, sent, PIECE) if len(data) == PIECE else b""
    await response.write_eof()
    return response


async def upload(inside: Inside, request: web.Request) -> web.StreamResponse:
    """Takes a file, or a form of several, and says what was written."""
    if any(name.lower().startswith("x-metadata-") for name in request.headers):
        raise E2BError(BAD, "files have no metadata here")
    if request.content_type == "multipart/form-data":
        written = await _form(inside, request)
    elif request.content_type == "application/octet-stream":
        written = [await _store(inside, _asked(inside, request), request.content.iter_any())]
    else:
        raise E2BError(BAD, "a file comes as application/octet-stream or multipart/form-data")
    return web.json_response(written)


async def _form(inside: Inside, request: web.Request) -> list[dict[str, str]]:
    _check_user(request)
    written: list[dict[str, str]] = []
    try:
        reader = await request.multipart()
        while (part := await _in_time(reader.next())) is not None:
            if not isinstance(part, aiohttp.BodyPartReader) or part.name != "file":
                raise E2BError(BAD, "a form has files, each in a part named file")
            if len(written) >= _MAX_FILES:
                raise E2BError(BAD, f"a form has at most {_MAX_FILES} files")
            path = inside.path(request.query.get("path") or part.filename)
            written.append(await _store(inside, path, _read(part)))
    except (ValueError, AssertionError, KeyError) as error:
        raise E2BError(BAD, f"the form cannot be read: {error}") from error
    if not written:
        raise E2BError(BAD, "the form has no file")
    return written


async def _read(part: aiohttp.BodyPartReader) -> AsyncIterator[bytes]:
    while data := await part.read_chunk(1 << 16):
        yield data


async def _store(inside: Inside, path: str, pieces: AsyncIterator[bytes]) -> dict[str, str]:
    kept, at, waiting = bytearray(), 0, True
    while waiting:
        piece = await _in_time(anext(pieces, None))
        waiting = piece is not None
        kept += piece or b""
        if len(kept) >= PIECE or (not waiting and (kept or not at)):
            await inside.box.write_at(path, at, bytes(kept))
            at += len(kept)
            kept.clear()
    return {"name": posixpath.basename(path), "type": "file", "path": path}


async def _in_time(work: Awaitable[_T]) -> _T:
    try:
        async with asyncio.timeout(IDLE_S):
            return await work
    except TimeoutError as error:
        raise E2BError(SLOW, f"nothing of the file came for {IDLE_S:.0f} s") from error


def _asked(inside: Inside, request: web.Request) -> str:
    _check_user(request)
    return inside.path(request.query.get("path"))


def _check_user(request: web.Request) -> None:
    if number_of(request.query.get("username", "")) is not None or user_of(request) is not None:
        raise E2BError(BAD, "files belong to 'user'; another user's are reached by commands that run as it")
