"""Mounts by the kernel's own call: no program is run, which would cost more than the mount itself."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Generator
from pathlib import Path

READ_ONLY, NO_SUID, NO_DEV, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_DETACH, _NEW_NAMESPACE = 2, 0x20000
_LOOP_GET_FREE, _LOOP_CONFIGURE, _AUTOCLEAR = 0x4C82, 0x4C0A, 4
_TRIES = 16
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: bytes, target: bytes, kind: bytes, flags: int, options: bytes = b"") -> None:
    """Mounts.

    Raises:
        OSError: The kernel does not.
    """
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), options or None):
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {kind.decode()}: {os.strerror(number)}", os.fsdecode(target))


def unmount(target: Path) -> None:
    """Takes a mount away; whoever still uses it keeps it until then.

    Raises:
        OSError: It is none.
    """
    if _libc.umount2(os.fsencode(target), _DETACH):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def own_namespace() -> None:
    """Gives this process mounts of its own, which go with it and which nobody else sees.

    Raises:
        OSError: It may not.
    """
    if _libc.unshare(_NEW_NAMESPACE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    mount(b"none", b"/", b"none", RECURSIVE | PRIVATE)


def mounts_below(folder: Path) -> list[Path]:
    """Returns where something is mounted at or below a folder, the latest first."""
    found: list[Path] = []
    folder = folder.resolve()
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        path = Path(os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")))
        if path == folder or folder in path.parents:
            found.append(path)
    return found[::-1]


@contextlib.contextmanager
def loop_device(file: Path) -> Generator[str]:
    """Gives a block device with the content of a file. A mount keeps it; the last user's end frees it.

    Raises:
        OSError: The kernel has no loop devices, or none that is free.
    """
    with contextlib.ExitStack() as stack:
        backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, backing)
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, control)
        path = ""
        for attempt in range(_TRIES):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, _loop_config(backing))
            except OSError:  # somebody else was faster
                os.close(device)
                if attempt == _TRIES - 1:
                    raise
                continue
            stack.callback(os.close, device)
            break
        yield path


def _loop_config(backing: int) -> bytes:
    """Returns `struct loop_config`: the file, the block size, and `struct loop_info64` with its flags."""
    info = struct.pack("=QQQQQ IIII 64s 64s 32s QQ", 0, 0, 0, 0, 0, 0, 0, 0, _AUTOCLEAR, b"", b"", b"", 0, 0)
    return struct.pack("=II", backing, 0) + info + bytes(64)
