"""Layers as EROFS images: one file each, read-only by its nature, mounted without a loop device."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.layers.mounts import NO_DEV, NO_SUID, READ_ONLY, loop_device, mount, unmount

_FLAGS = READ_ONLY | NO_SUID | NO_DEV


@functools.cache
def available() -> bool:
    """Whether images can be made and mounted here; tries it."""
    if os.geteuid() != 0 or shutil.which("mkfs.erofs") is None:
        return False
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "tree").mkdir()
        (folder / "at").mkdir()
        try:
            make_image(folder / "tree", folder / "image")
            mount_image(folder / "image", folder / "at")
        except (OSError, LayerError):
            return False
        unmount(folder / "at")
    return True


def make_image(tree: Path, image: Path) -> None:
    """Writes an image of a folder, with its owners, times and extended attributes.

    Raises:
        LayerError: `mkfs.erofs` does not.
    """
    command = ["mkfs.erofs", "-zlz4", "--preserve-mtime", "-U00000000-0000-0000-0000-000000000000"]
    done = subprocess.run([*command, "--quiet", image, tree], capture_output=True, check=False)
    if done.returncode:
        image.unlink(missing_ok=True)
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise LayerError(f"mkfs.erofs failed: {last[0] if last else done.returncode}; is the disk full?")


def mount_image(image: Path, at: Path) -> None:
    """Mounts an image, as a file where the kernel can and else by a loop device.

    Raises:
        OSError: The kernel does not.
    """
    try:
        mount(os.fsencode(image), os.fsencode(at), b"erofs", _FLAGS)
    except OSError as error:
        if error.errno != errno.ENOTBLK:
            raise
        with loop_device(image) as device:
            mount(device.encode(), os.fsencode(at), b"erofs", _FLAGS)
