"""The writable places of a sandbox, each of limited bytes and files, in mounts that only the sandbox has.

They are made between fork and exec, in a mount namespace of the new process: no other process sees them, and
they end with the sandbox however it ends. With `disk_bytes` they lie on a file of the node's disk, which has
no name any more once it is mounted, so that it ends with them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from sandbox.errors import InfrastructureError, RefusedError
from sandbox.layers.mounts import NO_DEV, NO_SUID, loop_device, mount, own_namespace, unmount
from sandbox.types import Limits

BOX, PLACES = "box", ("tmp", "workspace", "shm")
"""Where, below the folder of mounts, a sandbox has its own; and what lies there without a composed root."""

_OWN_INODES = 16
_TERMINALS = b"newinstance,ptmxmode=0666,mode=620,max=64"
"""The machine has 4096 terminals for all."""

_FLAGS = NO_SUID | NO_DEV
_RESERVE = 64 << 20
_OVERLAY = "redirect_dir=nofollow,metacopy=off,index=off,xino=off"


@dataclass(frozen=True, slots=True)
class Writable:
    """The upper folder of a sandbox's root as the node reaches it, and the trees beneath it.

    `at` is the folder of the sandbox that it lies over: empty for `/`.
    """

    upper: Path
    trees: tuple[Path, ...]
    at: str = ""


@dataclass(frozen=True, slots=True)
class Private:
    """The mounts of one sandbox. `enter` is called in the child, before it becomes something else."""

    mounts: Path
    limits: Limits
    trees: tuple[Path, ...]
    device: str
    others: tuple[Path, ...]

    def enter(self) -> None:
        """Makes the mounts, in a namespace of their own.

        Raises:
            OSError: The kernel did not.
        """
        own_namespace()
        for other in self.others:  # what the node has mounted for others would live as long as this one
            with contextlib.suppress(OSError):
                unmount(other)
        self._mount()

    def _mount(self) -> None:
        box = os.fsencode(self.mounts / BOX)
        if self.device:
            mount(self.device.encode(), box, b"ext4", _FLAGS)
        elif self.trees:
            mount(b"tmpfs", box, b"tmpfs", _FLAGS, tmpfs(self.limits, 0o755))
        else:
            mount(b"tmpfs", box, b"tmpfs", _FLAGS, b"size=64k,nr_inodes=16,mode=755")
        names = ("pts", *(("upper", "work", "root", "shm") if self.trees else PLACES))
        for name in names:
            os.mkdir(box + b"/" + name.encode())
            os.chmod(box + b"/" + name.encode(), 0o755)
        mount(b"devpts", box + b"/pts", b"devpts", NO_SUID, _TERMINALS)
        for name in PLACES:
            if name == "shm" or not (self.trees or self.device):
                mount(b"tmpfs", box + b"/" + name.encode(), b"tmpfs", _FLAGS, tmpfs(self.limits, 0o1777))
            elif not self.trees:
                os.chmod(box + b"/" + name.encode(), 0o1777)
        if self.trees:
            overlay(self.trees, self.mounts / BOX)


def overlay(trees: tuple[Path, ...], at: Path) -> None:
    """Mounts trees, the uppermost first, with `at`/upper over them at `at`/root.

    Raises:
        OSError: The kernel does not.
    """
    lower = ":".join(_escaped(str(tree)) for tree in trees)
    upper = _escaped(str(at))
    options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work,{_OVERLAY}"
    mount(b"overlay", os.fsencode(at / "root"), b"overlay", _FLAGS, os.fsencode(options))


def _escaped(path: str) -> str:
    return path.replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")


def tmpfs(limits: Limits, mode: int) -> bytes:
    """Returns the options of a tmpfs with the limits of a sandbox."""
    inodes = limits.tmpfs_inodes + _OWN_INODES
    return f"size={limits.tmpfs_bytes},nr_inodes={inodes},mode={mode:o}".encode()


@contextlib.contextmanager
def private(mounts: Path, limits: Limits, trees: tuple[Path, ...]) -> Generator[Private]:
    """Gives what a child does before it becomes the sandbox; blocks when a file is to be made on disk.

    Args:
        mounts: The node's folder of mounts.
        limits: Of the sandbox.
        trees: Of the layers of its root, the uppermost first; none if it has the machine's own.

    Raises:
        RefusedError: The disk has no room for it.
        InfrastructureError: There is no disk for it.
    """
    (mounts / BOX).mkdir(mode=0o700, parents=True, exist_ok=True)
    with disk(mounts, limits) if limits.disk_bytes else contextlib.nullcontext("") as device:
        others = tuple(path for path in mounts.iterdir() if path not in trees and path.name != BOX)
        yield Private(mounts, limits, trees, device, others)


@contextlib.contextmanager
def disk(mounts: Path, limits: Limits) -> Generator[str]:
    """Gives a loop device with an ext4 file system of `disk_bytes`, whose room on disk is taken at once.

    Raises:
        RefusedError: The disk has no room for it.
        InfrastructureError: It cannot be made.
    """
    path = mounts / f"disk-{secrets.token_hex(6)}"
    try:
        with path.open("xb") as file:
            room = os.statvfs(mounts)
            if room.f_bavail * room.f_frsize < limits.disk_bytes + _RESERVE:
                raise RefusedError(f"the disk of {mounts} has no {limits.disk_bytes >> 20} MiB left", "disk")
            os.posix_fallocate(file.fileno(), 0, limits.disk_bytes)
        command = ["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "nodiscard", "-b", "4096"]
        command += ["-N", str(limits.tmpfs_inodes + _OWN_INODES), str(path)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            why = done.stderr.decode(errors="replace").strip()
            raise InfrastructureError(f"no file system of {limits.disk_bytes} bytes could be made: {why}")
        with loop_device(path) as device:
            path.unlink()
            yield device
    except FileNotFoundError as error:
        raise InfrastructureError(
            f"{error.filename} is missing: as root, apt-get install e2fsprogs"
        ) from error
    except OSError as error:
        raise InfrastructureError(f"no disk for a sandbox: {error}") from error
    finally:
        path.unlink(missing_ok=True)
