"""The few system calls that a proxy is left with, as a classic BPF program.

It can read and write what it was handed, wait, and have threads and memory. It can open no file, make no
socket, connect nowhere, start no program, make no process and send no signal: what is not listed fails.
"""

from __future__ import annotations

import base64
import platform
import struct

_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _ANY_OF, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

ALLOWED: dict[str, tuple[int, int]] = {
    # name: number on x86_64, number on aarch64
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "poll": (7, 73), "ppoll": (271, 73),
    "accept4": (288, 242), "recvfrom": (45, 207), "recvmsg": (47, 212), "shutdown": (48, 210),
    "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209), "fstat": (5, 80),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "futex": (202, 98),
    "set_robust_list": (273, 99), "rseq": (334, 293), "gettid": (186, 178), "getpid": (39, 172),
    "sched_yield": (24, 124), "membarrier": (324, 283), "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "getrandom": (318, 278), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
"""What is allowed with any arguments. Not `connect`, `listen` or `setsockopt`: a socket that was handed over
is one of the host's network, and could be disconnected there and sent elsewhere."""

_CLONE, _SENDTO, _IOCTL, _CLONE3 = (56, 220), (44, 206), (16, 29), 435
_CLONE_THREAD, _MSG_FASTOPEN, _FIONBIO = 0x00010000, 0x20000000, 0x5421
_NUMBER, _ARCHITECTURE = 0, 4
_Step = tuple[int, int, int, int]


def program(machine: str = platform.machine()) -> str:
    """Returns the filter in base64; empty on a machine whose system call numbers are not known here."""
    if machine not in _ARCHITECTURES:
        return ""
    column = list(_ARCHITECTURES).index(machine)
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 1, _CLONE3),  # its flags are behind a pointer; libraries fall back to clone
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    # Threads, no processes.
    steps += _when(_CLONE[column], [(_LOAD, 0, 0, _argument(0)), (_ANY_OF, 0, 1, _CLONE_THREAD)])
    # No address, and no data that opens a connection.
    unaddressed = [(_LOAD, 0, 0, _argument(4) + half) for half in (0, 4)]
    steps += _when(
        _SENDTO[column],
        [
            (_LOAD, 0, 0, _argument(3)),
            (_ANY_OF, 5, 0, _MSG_FASTOPEN),
            unaddressed[0],
            (_EQUAL, 0, 3, 0),
            unaddressed[1],
            (_EQUAL, 0, 1, 0),
        ],
    )
    steps += _when(_IOCTL[column], [(_LOAD, 0, 0, _argument(1)), (_EQUAL, 0, 1, _FIONBIO)])
    for pair in ALLOWED.values():
        steps += _when(pair[column], [])
    steps.append((_RETURN, 0, 0, _ERRNO | _EPERM))
    return base64.b64encode(b"".join(struct.pack("HBBI", *step) for step in steps)).decode()


def _argument(place: int) -> int:
    """Returns where the kernel has the lower half of an argument of the call."""
    return 16 + 8 * place


def _when(number: int, conditions: list[_Step]) -> list[_Step]:
    """Returns the steps of one call: allowed when the last condition goes on, refused when it skips one."""
    refused = [(_RETURN, 0, 0, _ERRNO | _EPERM)] if conditions else []
    block = [*conditions, (_RETURN, 0, 0, _ALLOW), *refused]
    return [(_EQUAL, 0, len(block), number), *block]
