"""Calls of the C library that Python has no function for.

By way of `_ctypes` alone: all of `ctypes` takes longer to import than the rest of the agent's start.
"""

from __future__ import annotations

import _ctypes
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 38
EPERM = 1
CAPABILITY_VERSION = 0x20080522
SFD_CLOEXEC = 0o2000000
RTLD_NOW = 2
_ffi: Any = _ctypes
_handle = _ffi.dlopen(None, RTLD_NOW)


class _Char(_ffi._SimpleCData):
    _type_ = "c"


class _One(_ffi.Array):
    _type_, _length_ = _Char, 1


class Pointer(_ffi._SimpleCData):
    """An address."""

    _type_ = "P"


class Memory:
    """Writable memory with a place that stays: its address is `at`."""

    def __init__(self, buffer: Any):
        self._buffer, self._held = buffer, _One.from_buffer(buffer)
        self.at: int = _ffi.addressof(self._held)

    def write(self, place: int, data: bytes) -> None:
        """Puts bytes there."""
        self._buffer[place : place + len(data)] = data

    def read(self, place: int, size: int) -> bytes:
        """Returns bytes."""
        return bytes(self._buffer[place : place + size])

    def protect(self, access: int) -> None:
        """Changes what may be done with all of it, which is whole pages."""
        if call("mprotect", Pointer(self.at), len(self._buffer), access) != 0:
            raise OSError(EPERM, "the kernel did not change the access to memory")


def call(name: str, *arguments: int | bytes | Pointer | None) -> int:
    """Calls a function that takes and returns C integers and takes addresses."""
    return _ffi.call_cdeclfunction(_ffi.dlsym(_handle, name), arguments)


def prctl(option: int, value: int) -> None:
    """Sets an attribute of this process."""
    if call("prctl", option, value, None, None, None) != 0:
        raise OSError(0, "prctl " + str(option) + " was refused")


def drop_capabilities() -> None:
    """Gives up every capability of this process."""
    if call("capset", struct.pack("II", CAPABILITY_VERSION, 0), bytes(24)) != 0:
        raise OSError(0, "the capabilities were not given up")


def unshare(flags: int) -> None:
    """Leaves namespaces for new ones."""
    if call("unshare", flags) != 0:
        raise OSError(EPERM, "the kernel made no namespaces")


def mount(kind: bytes | None, at: bytes, flags: int, options: bytes | None) -> None:
    """Mounts a file system of a kind; with none, changes what is mounted there."""
    if call("mount", kind, at, kind, flags, options) != 0:
        raise OSError(EPERM, "the kernel did not mount " + at.decode())


def signalfd(number: int) -> int:
    """Returns a descriptor that can be read when a signal has come."""
    fd = call("signalfd", -1, (1 << number - 1).to_bytes(128, "little"), SFD_CLOEXEC)
    if fd < 0:
        raise OSError(0, "no descriptor for signals")
    return fd


def filter_calls(program: bytes) -> None:
    """Has the kernel run a filter over every system call from now on."""

    class Code(_ffi.Array):
        _type_, _length_ = _Char, len(program)

    code = Code.from_buffer(bytearray(program))
    head = struct.pack("HxxxxxxQ", len(program) // 8, _ffi.addressof(code))
    if call("prctl", PR_SET_SECCOMP, 2, head, None, None) != 0:
        raise OSError(0, "the system call filter was refused")
