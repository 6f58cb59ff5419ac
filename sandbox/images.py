"""The built-in Python image, made of this machine's own files: no registry, seconds, named by its content.

It is the system's interpreter with its standard library, the shared libraries that it and some twenty tools
need, and the resident agent. Two machines with the same files make an image of the same name.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors

from sandbox.backends.base import COMMAND_UID
from sandbox.toolkit import build

REPOSITORY = "tempering-python"
AGENT_FOLDER = "/opt/tempering"
"""Where an image has the resident agent."""

_PYTHON = Path("/usr/bin/python3")
_TOOLS = (
    "sh", "bash", "cat", "ls", "cp", "mv", "rm", "mkdir", "rmdir", "head", "tail", "wc", "sort", "uniq",
    "cut", "tr", "grep", "sed", "find", "xargs", "env", "sleep", "true", "false", "echo", "test", "dd",
    "stat", "chmod", "touch", "ln", "tee", "seq", "yes", "id", "setsid", "timeout", "diff", "awk",
    "printf", "nohup", "mkfifo", "readlink", "basename", "dirname", "mktemp", "date", "stty", "tty",
)  # fmt: skip
_EXCLUDED = re.compile(
    r"/(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|config-.*)(/|$)|\.opt-[12]\.pyc$"
)
_FOLDERS = (
    "bin",
    "dev",
    "etc",
    "lib",
    "lib64",
    "opt/tempering",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr/bin",
    "workspace",
)


class ImageError(RuntimeError):
    """The image cannot be made on this machine: what is missing."""


def ensure_image(client: Any) -> str:
    """Returns the name of the built-in image, making it when the engine does not have it.

    Raises:
        ImageError: The machine has no system Python.
    """
    if not _PYTHON.exists():
        raise ImageError("the image is made of the system's Python: as root, apt-get install python3")
    with tempfile.TemporaryDirectory() as scratch:
        files = sorted(image_files(build(Path(scratch), str(_PYTHON))))
        name = f"{REPOSITORY}:{_digest(files)}"
        try:
            client.images.get(name)
        except docker.errors.ImageNotFound:
            repository, tag = name.split(":")
            client.api.import_image_from_data(archive(files), repository=repository, tag=tag)
    return name


def image_files(agent: Path) -> Iterator[tuple[str, Path]]:
    """Yields (path in the image, file of this machine), with the compiled agent that lies in `agent`."""
    interpreter = _PYTHON.resolve()
    programs = [
        interpreter,
        *(Path(found) for tool in _TOOLS if (found := shutil.which(tool, path="/usr/bin:/bin"))),
    ]
    library = Path(f"/usr/lib/{interpreter.name}")
    extensions = list(library.glob("lib-dynload/*.so"))
    for folder, _, names in os.walk(library):
        for name in names:
            path = Path(folder) / name
            if not _EXCLUDED.search(str(path)) and path.is_file():
                yield str(path), path
    for program in programs:
        yield f"/usr/bin/{program.name}", program
    yield "/usr/bin/python3", interpreter
    for path in sorted(shared_libraries([*programs, *extensions])):
        yield path, Path(path)
    if (
        cache := Path("/etc/ld.so.cache")
    ).exists():  # without it each program looks for its libraries in vain places
        yield str(cache), cache
    for path in sorted(agent.rglob("*.py*")):
        yield f"{AGENT_FOLDER}/agent/{path.relative_to(agent)}", path


def shared_libraries(programs: Iterable[Path]) -> set[str]:
    """Returns the libraries that programs or libraries need, their loader among them."""
    found: set[str] = set()
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
        found |= set(re.findall(r"(/\S+\.so\S*) \(0x", listed))
    return found


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    digest = hashlib.sha256(b"layout 4")
    for name, path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{name} {content} {path.stat().st_mode & 0o111} {_mtime(name, path)}\n".encode())
    return digest.hexdigest()[:16]


def _mtime(name: str, path: Path) -> int:
    """Returns a file's time in the image: a library module's own, by which its compiled form is valid."""
    return int(path.stat().st_mtime) if name.startswith("/usr/lib/python") else 0


def archive(files: Iterable[tuple[str, Path]]) -> bytes:
    """Returns the image's root as a tar archive: files owned by root, without set-user-id bits."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in _FOLDERS:
            _add_folder(tar, folder)
        for name, path in files:
            info = tar.gettarinfo(path.resolve(), arcname=name.lstrip("/"))
            info.uid = info.gid = 0
            info.uname = info.gname = "root"
            info.mode &= 0o755
            info.mtime = _mtime(name, path)
            info.type = tarfile.REGTYPE
            with path.open("rb") as file:
                tar.addfile(info, file)
        _add_text(
            tar,
            "etc/passwd",
            f"root:x:0:0::/:/bin/sh\nagent:x:{COMMAND_UID}:{COMMAND_UID}::/workspace:/bin/sh\n",
        )
        _add_text(tar, "etc/group", f"root:x:0:\nagent:x:{COMMAND_UID}:\n")
        for tool in ("sh", "bash", "env"):
            link = tarfile.TarInfo(f"bin/{tool}")
            link.type, link.linkname = tarfile.SYMTYPE, f"/usr/bin/{tool}"
            tar.addfile(link)
    return buffer.getvalue()


def _add_folder(tar: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o1777 if name in ("tmp", "workspace") else 0o755
    tar.addfile(info)


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text), 0o644
    tar.addfile(info, io.BytesIO(text.encode()))


def main() -> None:
    """Makes the image and prints its name."""
    print(ensure_image(docker.from_env()))


if __name__ == "__main__":
    main()
