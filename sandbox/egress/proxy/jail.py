"""What the proxy gives up before the first byte of a sandbox reaches it: nearly every system call."""

from __future__ import annotations

import ctypes
import resource
import struct
from binascii import a2b_base64

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 4, 22, 38
MEMORY = 512 << 20


def confine(program: str, descriptors: int) -> None:
    """Limits this process and, by the filter `program` (base64), the system calls of all its threads.

    Raises:
        OSError: The kernel does not take the filter.
    """
    for name, most in (("NOFILE", descriptors), ("FSIZE", 0), ("CORE", 0), ("AS", MEMORY), ("MEMLOCK", 0)):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    code = a2b_base64(program)
    buffer = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the system call filter was refused")
