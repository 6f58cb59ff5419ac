"""The process of the candidate: does what the trusted parent asks for, and is believed in nothing.

It connects, and says that it is there, before it loads anything of the candidate. From then on all that is in
it belongs to the candidate.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from types import ModuleType
from typing import Any

from . import suite
from .wire import MAX_MESSAGE, receive, send

FOREVER = 1e9


def connect(address: str, start_s: float) -> socket.socket:
    """Returns the connection to the parent, which may not be there yet.

    Raises:
        TimeoutError: It never was.
    """
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + address)
            return connection
        except ConnectionRefusedError:
            connection.close()
            time.sleep(0.01)
    raise TimeoutError("the parent is not there")


def load(name: str, path: str) -> ModuleType:
    """Runs a file as a module.

    Raises:
        ImportError: There is no such file.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not os.path.isfile(path):
        raise ImportError(f"there is no module {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def answer(module: ModuleType, message: dict[str, Any]) -> dict[str, Any]:
    """Calls a function; returns its value or what came instead."""
    try:
        value = getattr(module, message["call"])(*message["args"], **message["kwargs"])
    except BaseException as error:
        return {"raised": type(error).__name__, "text": str(error)[:200]}
    try:
        size = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return {"type": type(value).__name__}
    if size > MAX_MESSAGE // 2:
        return {"raised": "OverflowError", "text": f"a value of {size} bytes as JSON is too large"}
    return {"value": value}


def serve(connection: socket.socket, message: dict[str, Any]) -> None:
    """Loads the candidate's module and answers calls until the parent goes."""
    path: str = message["module"]
    try:
        module = load(os.path.splitext(os.path.basename(path))[0], path)
    except BaseException as error:
        send(connection, {"raised": type(error).__name__, "text": str(error)[:200]})
        return
    send(connection, {"loaded": True})
    while True:
        try:
            message = receive(connection, time.monotonic() + FOREVER)
        except EOFError:
            return
        send(connection, answer(module, message))


def main() -> None:
    """Connects and does what it is told."""
    job = json.loads(sys.stdin.buffer.read())
    connection = connect(job["address"], job["start_s"])
    send(connection, {"hello": True})
    message = receive(connection, time.monotonic() + FOREVER)
    os.chdir(tempfile.mkdtemp(dir="/tmp"))
    os.environ["TMPDIR"] = os.environ["HOME"] = os.getcwd()
    sys.path += message["libraries"]
    if "files" in message:
        suite.run(connection, message)
    else:
        sys.path.append(message["root"])
        serve(connection, message)
