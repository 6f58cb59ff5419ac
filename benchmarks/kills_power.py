"""A folder that can lose power: a file system in a file, which the kernel can be told to stop in its tracks.

An ext4 image is mounted by loop, with a journal that commits by itself only every ten minutes. `lose`
asks the kernel for what file system tests call a *shutdown without log flush* (EXT4_IOC_SHUTDOWN): from
then on nothing reaches the image, as if the power were gone. `back` mounts it again, which replays the
journal as after a real loss: what was synced is there, what was not is not, renames and new names
included.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, 2
"""_IOR('X', 125, __u32) and its flag."""

_BUSY_S = 20.0
_OPTIONS = "loop,commit=600,noauto_da_alloc"


def offered() -> str:
    """Returns why this machine has no such folders; empty when it has."""
    if os.geteuid() != 0:
        return "only root may mount a file system"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    return ""


@dataclass(slots=True)
class Power:
    """A mounted image of `mebibytes`; `folder` is where it is."""

    image: Path
    folder: Path
    mebibytes: int = 2048

    def make(self) -> None:
        """Makes the image and mounts it."""
        with self.image.open("wb") as file:
            file.truncate(self.mebibytes << 20)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(self.image))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.back()

    def lose(self) -> None:
        """Cuts the power; kill the processes first, they could write nothing more."""
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(handle)
        self.end()

    def back(self) -> None:
        """Mounts what is left."""
        _run("mount", "-o", _OPTIONS, str(self.image), str(self.folder))

    def end(self) -> None:
        """Unmounts, as soon as what was killed has let go; what never does keeps a dead file system."""
        deadline = time.monotonic() + _BUSY_S
        while os.path.ismount(self.folder):
            lazy = ["-l"] if time.monotonic() > deadline else []
            if subprocess.run(
                ["umount", *lazy, str(self.folder)], capture_output=True, check=False
            ).returncode:
                time.sleep(0.2)
        # Sandboxes that are ending may have a copy of the mount: mounted again, it would still be dead.
        while self._attached():
            if time.monotonic() > deadline:  # whoever has it keeps it, and what is on disk goes on elsewhere
                copy = self.image.with_name(f"{self.image.name}+")
                _run("cp", "--sparse=always", str(self.image), str(copy))
                self.image.unlink()
                self.image = copy
                break
            time.sleep(0.05)

    def _attached(self) -> bool:
        listed = subprocess.run(["losetup", "-j", str(self.image)], capture_output=True, check=True)
        return bool(listed.stdout.strip())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
