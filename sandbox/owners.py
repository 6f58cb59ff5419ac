"""What a sandbox may ask of its owner: a Unix socket for each sandbox, which its owner serves while it likes.

A rule for `OWNER_HOST` lets a phase reach it, through the sandbox's proxy like any other place. The connector
takes the socket of the one sandbox that asks, so no sandbox reaches the owner of another by it, whatever it
knows; and there is no address on a network that anybody else could find.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import socket
from collections.abc import Generator
from pathlib import Path

from sandbox.egress.doors import listen
from sandbox.errors import InfrastructureError
from sandbox.tokens import own_token
from sandbox.types import Ear

FOLDER, SECRET = "owners", "owner.secret"
_GENERATION = re.compile(r"-g[0-9]+$")


@contextlib.contextmanager
def hearing(state_dir: Path, box_id: str) -> Generator[Ear]:
    """Listens to a sandbox of the node of a state folder, until it is left.

    Raises:
        InfrastructureError: The socket cannot be made.
        PolicyError: Others can read the folder's secret.
    """
    path = _path(state_dir, box_id)
    key = own_token(state_dir / SECRET).encode()
    try:
        sock = listen(path)
    except OSError as error:
        raise InfrastructureError(f"the socket {path} could not be made: {error.strerror}") from error
    made = path.stat().st_ino
    try:
        yield Ear(sock, hmac.new(key, box_id.encode(), hashlib.sha256).hexdigest())
    finally:
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == made:  # not that of one who goes on with the sandbox
                path.unlink()


def reach(state_dir: Path, name: str) -> socket.socket:
    """Returns a connection to the owner of a sandbox, which `name` names in any generation.

    Raises:
        OSError: Nobody listens.
    """
    path = _path(state_dir, name)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")  # by its folder, as its path may be too long
    except OSError:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def sweep(state_dir: Path) -> None:
    """Removes sockets at which nobody listens any more."""
    for path in (state_dir / FOLDER).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            try:
                reach(state_dir, path.name).close()
            except ConnectionRefusedError:
                path.unlink()
            except BlockingIOError:
                continue  # somebody listens, and has much to do


def _path(state_dir: Path, name: str) -> Path:
    return state_dir / FOLDER / _GENERATION.sub("", name)
