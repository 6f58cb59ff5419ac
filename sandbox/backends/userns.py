"""Becomes another program as root of a user namespace: powers over its own namespaces, none over the machine.

    python userns.py FIRST COUNT FOLDER PROGRAM ARGUMENTS...

Users 0 to COUNT - 1 of the namespace are FIRST and following outside. The program finds FOLDER, which such a
user could perhaps not reach, as /run/shown. Pure standard library; started by root.
"""

from __future__ import annotations

import ctypes
import os
import sys

SHOWN = "/run/shown"
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def must(done: int, what: str) -> None:
    """Ends with a word on what the kernel did not do."""
    if done != 0:
        raise SystemExit(f"{what}: {os.strerror(ctypes.get_errno())}")


def show(folder: str) -> None:
    """Puts a folder where everybody may look, for this process alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    must(libc.unshare(CLONE_NEWNS), "no mount namespace")
    must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mounts stay shared")
    must(libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, b"mode=755"), "no folder to show things in")
    os.mkdir(SHOWN)
    must(libc.mount(folder.encode(), SHOWN.encode(), None, MS_BIND, None), f"{folder} cannot be shown")


def enter(first: str, count: str) -> None:
    """Makes the namespace and becomes its root; a child that stays outside writes its users."""
    pid, (hear, say) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(say)
        os.read(hear, 1)
        for file in ("gid_map", "uid_map"):
            with open(f"/proc/{pid}/{file}", "w") as users:
                users.write(f"0 {first} {count}")
        os._exit(0)
    must(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER), "no user namespace")
    os.write(say, b"x")
    must(os.waitpid(helper, 0)[1], "the users of the namespace were not set")
    os.close(hear)
    os.close(say)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def main() -> None:
    """Does all of it."""
    first, count, folder, *argv = sys.argv[1:]
    show(folder)
    enter(first, count)
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
