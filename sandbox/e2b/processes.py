"""Commands and terminals of E2B clients: each is a background process of its sandbox.

So it goes on when its client leaves, another front finds it again, and the node ends it when its time is up.
A pid is the number of the process in its sandbox. Its output waits, up to 1 MiB, for a client that reads it.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web

from sandbox.channel import Header
from sandbox.e2b.connect import Message, deadline_of, part, read_messages
from sandbox.e2b.inside import Inside, user_of
from sandbox.e2b.status import BAD, MISSING, SLOW, E2BError
from sandbox.errors import PolicyError

_ASK_S, _LOOK_S = 60.0, 15.0
_LOG, _PIECE = 1 << 20, 1 << 18
_INPUT_IDLE_S = 3600.0
_SIZES = range(1, 10_001)
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}


async def start(inside: Inside, request: web.Request, message: Message) -> AsyncIterator[Message]:
    """Starts a process and follows it.

    Raises:
        E2BError: The request is wrong, or the process's time is up.
        SandboxError: It cannot be started or the sandbox is gone.
    """
    life_s, begun = deadline_of(request), time.monotonic()
    size = _size(message)
    header: Header = {
        **_command(inside, message), "pty": size, "flow": True, "life_s": life_s,
        "eof": not (size or message.get("stdin", True)),
    }  # fmt: skip
    if (user := user_of(request)) is not None:
        header["user"] = user
    outcome = await inside.box.run(header, b"", _ASK_S, _LOG)
    number = json.loads(outcome.extra)["process"]
    yield _event("start", {"pid": number})
    async for event in _follow(inside, number, bool(size)):
        late = life_s is not None and time.monotonic() - begun >= life_s
        if late and "end" in event["event"]:
            raise E2BError(SLOW, f"the command was ended for its time ({life_s:g} s)")
        yield event


async def connect(inside: Inside, request: web.Request, message: Message) -> AsyncIterator[Message]:
    """Follows a process that runs, or gives what nobody has read of one that has ended.

    Raises:
        E2BError: There is none.
    """
    process = await _find(inside, message, ended=True)
    yield _event("start", {"pid": process["process"]})
    async for event in _follow(inside, process["process"], bool(process.get("pty"))):
        yield event


async def listing(inside: Inside, request: web.Request, message: Message) -> Message:
    """Returns the processes that run."""
    return {"processes": [_shown(process) for process in await _known(inside) if process["running"]]}


async def update(inside: Inside, request: web.Request, message: Message) -> Message:
    """Changes the size of a terminal."""
    process, size = await _find(inside, message), _size(message)
    if size is None or not process.get("pty"):
        raise E2BError(BAD, "only the size of a terminal can be changed, to rows and columns")
    await _do(inside, "resize", process["process"], rows=size[0], columns=size[1])
    return {}


async def send_input(inside: Inside, request: web.Request, message: Message) -> Message:
    """Writes to a process."""
    process = await _find(inside, message)
    await _do(inside, "input", process["process"], _input(message), eof=False)
    return {}


async def stream_input(inside: Inside, request: web.Request) -> Message:
    """Writes what comes to a process, in its order."""
    number = 0
    async for message in read_messages(request, _INPUT_IDLE_S):
        if message.get("start"):
            number = (await _find(inside, part(message, "start")))["process"]
        elif message.get("data"):
            if not number:
                raise E2BError(BAD, "a stream of input begins with its process")
            await _do(inside, "input", number, _input(part(message, "data")), eof=False)
    return {}


async def close_stdin(inside: Inside, request: web.Request, message: Message) -> Message:
    """Ends the input of a process."""
    await _do(inside, "input", (await _find(inside, message))["process"], eof=True)
    return {}


async def send_signal(inside: Inside, request: web.Request, message: Message) -> Message:
    """Ends a process, or asks it to end."""
    number = _SIGNALS.get(message.get("signal", ""))
    if number is None:
        raise E2BError(BAD, "a process is sent SIGTERM or SIGKILL")
    await _do(inside, "signal", (await _find(inside, message))["process"], number=number)
    return {}


async def _follow(inside: Inside, number: int, terminal: bool) -> AsyncIterator[Message]:
    offset = 0
    while True:
        header: Header = {"op": "poll", "process": number, "offset": offset, "wait_s": _LOOK_S}
        outcome = await inside.box.run(header, b"", _ASK_S, _PIECE, True)
        polled: Message = json.loads(outcome.extra)
        data = outcome.result.stdout
        for stream, piece in _pieces(data, polled, terminal):
            yield _event("data", {stream: base64.b64encode(piece).decode()})
        offset = polled["offset"] + len(data)
        if not polled["running"]:
            yield _event("end", _ended(polled))
            return
        if not data:
            yield _event("keepalive", {})


def _pieces(data: bytes, polled: Message, terminal: bool) -> Iterator[tuple[str, bytes]]:
    """Yields output by stream, in the order in which it came."""
    begin, end = polled["offset"], polled["offset"] + len(data)
    turns: list[list[int]] = polled.get("turns") or []
    marks = [(max(at, begin), which) for at, which in turns if at < end] or [(begin, 0)]
    for (at, which), (until, _) in zip(marks, [*marks[1:], (end, 0)], strict=True):
        if at < until:
            yield ("pty" if terminal else "stderr" if which else "stdout"), data[at - begin : until - begin]


def _ended(polled: Message) -> Message:
    code, signal = polled["exit_code"], polled["signal"]
    if signal is not None:
        return {
            "exitCode": 128 + signal,
            "exited": False,
            "status": f"signal {signal}",
            "error": f"signal {signal}",
        }
    if code is None:
        return {"exitCode": -1, "exited": False, "status": "unknown", "error": "how it ended is not known"}
    failed = {"error": f"exit status {code}"} if code else {}
    return {"exitCode": code, "exited": True, "status": f"exit status {code}", **failed}


def _event(kind: str, value: Message) -> Message:
    return {"event": {kind: value}}


def _command(inside: Inside, message: Message) -> Header:
    config = part(message, "process")
    args: Any = config.get("args") or []
    words, env, cwd = [config.get("cmd") or None, *args], part(config, "envs"), config.get("cwd")
    if not all(isinstance(text, str) and "\0" not in text for text in (*words, *env, *env.values())):
        raise E2BError(BAD, "a process has a cmd, args and envs, which are texts without NUL")
    if message.get("tag"):
        raise E2BError(BAD, "processes are named by their pid here, not by a tag")
    folder = inside.path(cwd) if cwd else inside.home.cwd
    return {"op": "start", "argv": words, "env": {**inside.home.env, **env}, "cwd": folder}


def _size(message: Message) -> tuple[int, int] | None:
    if not message.get("pty"):
        return None
    rows, columns = (part(part(message, "pty"), "size").get(name) for name in ("rows", "cols"))
    if (
        isinstance(rows, int)
        and isinstance(columns, int)
        and 0 < min(rows, columns) <= max(rows, columns) <= 10_000
    ):
        return rows, columns
    raise E2BError(BAD, "a terminal has 1 to 10000 rows and columns")


def _input(message: Message) -> bytes:
    given = part(message, "input")
    text = given.get("stdin") or given.get("pty") or ""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise E2BError(BAD, "input is base64") from error


async def _known(inside: Inside) -> list[Message]:
    outcome = await inside.box.run({"op": "processes"}, b"", _ASK_S, 1024, True)
    return json.loads(outcome.extra)


async def _find(inside: Inside, message: Message, *, ended: bool = False) -> Message:
    number = part(message, "process").get("pid")
    if number is None:
        raise E2BError(BAD, "processes are named by their pid")
    for process in await _known(inside):
        if process["process"] == number and (ended or process["running"]):
            return process
    raise E2BError(MISSING, f"no process {number!r} runs in the sandbox")


async def _do(inside: Inside, op: str, process: int, body: bytes = b"", **fields: Any) -> None:
    try:
        await inside.box.run({"op": op, "process": process, **fields}, body, _ASK_S, 1024)
    except PolicyError as error:
        raise E2BError(MISSING, str(error)) from error


def _shown(process: Message) -> Message:
    first, *rest = process["argv"]
    config = {"cmd": first, "args": rest, "envs": process.get("env", {}), "cwd": process["cwd"]}
    return {"config": config, "pid": process["process"]}
