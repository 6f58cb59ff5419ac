"""Many files into a box in one call."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from sandbox.remote import RemoteBox


async def write(box: RemoteBox, files: Mapping[str, bytes]) -> None:
    """Writes files by absolute path, with their folders.

    Raises:
        DiskFullError: They do not fit.
        FileError: They cannot be written.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path.lstrip("/"))
            info.size, info.mode = len(data), 0o644
            tar.addfile(info, io.BytesIO(data))
    await box.upload_archive(buffer.getvalue(), "/")
