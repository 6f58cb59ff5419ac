"""Where the doors of sandboxes are: the Unix sockets by which they are handed their network."""

from __future__ import annotations

import os
import socket
from pathlib import Path

FOLDER = "doors"


def door_of(state_dir: Path, name: str) -> Path:
    """Returns where the door of a sandbox is; a backend mounts it at `sandbox.backends.base.DOOR`."""
    return state_dir / FOLDER / name


def listen(path: Path) -> socket.socket:
    """Returns a socket that listens at a path, however long: it is bound by way of its folder."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.bind(f"/proc/self/fd/{folder}/{path.name}")
        path.chmod(0o666)  # its folder is ours alone; in the sandbox anybody may find it shut
        door.listen(4)
    except OSError:
        door.close()
        raise
    finally:
        os.close(folder)
    return door


def sweep(state_dir: Path) -> None:
    """Removes the doors that a killed node left; its proxies ended with it."""
    for path in (state_dir / FOLDER).glob("*"):
        path.unlink(missing_ok=True)
