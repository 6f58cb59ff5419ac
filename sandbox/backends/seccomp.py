"""The system calls that no command of a sandbox may make, as a classic BPF program.

It denies what opens the kernel's rarely used doors (namespaces, mounts, keys, BPF, io_uring, tracing, sockets
of rare families) and allows the rest: a second wall behind namespaces and dropped capabilities, alike in
every backend. The agent installs it on itself before it serves, so that it holds for everything that follows.
"""

from __future__ import annotations

import base64
import platform
import struct

_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_CLONE_NEWUSER = 0x10000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

DENIED: dict[str, tuple[int, int]] = {
    # name: number on x86_64, number on aarch64
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_by_handle_at": (304, 265), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "swapon": (167, 224), "reboot": (169, 142), "acct": (163, 89),
    "quotactl": (179, 60), "syslog": (103, 116), "fsopen": (430, 430), "fsmount": (432, 432),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442), "kcmp": (312, 272),
    "lookup_dcookie": (212, 18), "memfd_secret": (447, 447), "fsconfig": (431, 431), "fspick": (433, 433),
    "pidfd_getfd": (438, 438), "quotactl_fd": (443, 443), "kexec_file_load": (320, 294),
    "delete_module": (176, 106), "swapoff": (168, 225), "fanotify_init": (300, 262), "io_setup": (206, 0),
}  # fmt: skip
"""`io_setup` takes of a number of contexts that the whole machine shares."""

_CLONE, _CLONE3 = (56, 220), 435
_SOCKET, _SOCKETPAIR, _IOCTL = (41, 198), (53, 199), (16, 29)
_SETRLIMIT, _PRLIMIT = (160, 164), (302, 261)
_FAMILIES, _NETLINK, _ROUTE = (1, 2, 10), 16, 0
"""Unix and the two of the internet; of netlink, routes. A vsock would reach what is beneath this machine."""

_FORGED_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX: they type into a terminal."""

_CORE = 4
Step = tuple[int, int, int, int]


def program(machine: str = platform.machine()) -> str:
    """Returns the filter in base64; empty on a machine whose system call numbers are not known here."""
    if machine not in _ARCHITECTURES:
        return ""
    column = list(_ARCHITECTURES).index(machine)
    steps: list[Step] = [
        (_LOAD, 0, 0, 4),
        (_JUMP_EQ, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_LOAD, 0, 0, 0),
        (_JUMP_GE, 0, 1, 0x40000000),
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
        (_JUMP_EQ, 0, 1, _CLONE3),  # its flags are behind a pointer; libraries fall back to clone
        (_RETURN, 0, 0, _ERRNO | _ENOSYS),
    ]
    for numbers, rule in _rules():
        steps += [(_JUMP_EQ, 0, len(rule), numbers[column]), *rule]
    denied = sorted(pair[column] for pair in DENIED.values())
    steps += [(_JUMP_EQ, len(denied) - place, 0, number) for place, number in enumerate(denied)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return base64.b64encode(b"".join(struct.pack("HBBI", *step) for step in steps)).decode()


def _rules() -> list[tuple[tuple[int, int], list[Step]]]:
    """Returns the calls that depend on their arguments, each with steps that end in an answer."""
    families: list[Step] = [
        _argument(0),
        *((_JUMP_EQ, 4 + len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)),
        (_JUMP_EQ, 1, 0, _NETLINK),
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
        _argument(2),
        (_JUMP_EQ, 1, 0, _ROUTE),
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    read_only: list[Step] = [  # a new limit is behind a pointer: there must be none
        _argument(1),
        (_JUMP_EQ, 0, 5, _CORE),
        _argument(2),
        (_JUMP_EQ, 0, 2, 0),
        (_LOAD, 0, 0, 16 + 8 * 2 + 4),
        (_JUMP_EQ, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    new_user = (_argument(0), (_JUMP_SET, 0, 1, _CLONE_NEWUSER))
    typing = (_argument(1), (_JUMP_EQ, 1, 0, _FORGED_INPUT[0]), (_JUMP_EQ, 0, 1, _FORGED_INPUT[1]))
    core = (_argument(0), (_JUMP_EQ, 0, 1, _CORE))
    answers: tuple[Step, Step] = ((_RETURN, 0, 0, _ERRNO | _EPERM), (_RETURN, 0, 0, _ALLOW))
    return [
        (_CLONE, [*new_user, *answers]),
        (_SOCKET, families),
        (_SOCKETPAIR, families),
        (_IOCTL, [*typing, *answers]),
        (_SETRLIMIT, [*core, *answers]),
        (_PRLIMIT, read_only),
    ]


def _argument(place: int) -> Step:
    """Loads the lower half of an argument, which is all that the kernel takes of these."""
    return (_LOAD, 0, 0, 16 + 8 * place)
