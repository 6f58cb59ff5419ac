"""What every composed root has of us: the built-in base layer, and the resident agent with its interpreter.

The interpreter is the system's with the libraries it needs, started by its own loader from a read-only mount:
whatever layers or commands put in the place of shells, interpreters or libraries is not run by the agent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from sandbox.archives import read_archive
from sandbox.errors import InfrastructureError
from sandbox.images import archive, image_files, shared_libraries
from sandbox.layers.records import Config, Kind, Layer
from sandbox.layers.store import LayerStore
from sandbox.layers.tree import write
from sandbox.toolkit import build, publish
from sandbox.trees import TreeLimits

NAME = "tempering-python:built-in"
_LIMITS = TreeLimits(1 << 30, 100_000)
_making = threading.Lock()


def ensure_base(store: LayerStore) -> Layer:
    """Returns the built-in base layer, of the built-in image's files; makes it when it is not there."""
    with _making:
        if (layer := store.find(NAME, Kind.BASE)) is not None:
            return layer
        with tempfile.TemporaryDirectory() as empty, store.draft() as draft:
            data = archive(sorted(image_files(Path(empty))))
            (draft / "tree").mkdir()
            write(read_archive(data, _LIMITS, links_out=True), draft / "tree")
            return store.publish(draft / "tree", Kind.BASE, Config(), name=NAME)


@dataclass(frozen=True, slots=True)
class Control:
    """A folder with the agent and an interpreter, to be mounted read-only at one place."""

    folder: Path
    library: Path

    def command(self, at: str) -> list[str]:
        """Returns how the interpreter is started when the folder is mounted `at`."""
        return [f"{at}/lib/{_LOADER}", "--library-path", f"{at}/lib", "--argv0", f"{at}/bin/python3",
                f"{at}/bin/python3"]  # fmt: skip


_LOADER = "loader.so"


def ensure_control(target: Path, interpreter: str) -> Control:
    """Returns the control folder below `target`; makes it when it is not there.

    Raises:
        InfrastructureError: The interpreter is not one of a kind that can be moved.
    """
    agent = build(target, interpreter)
    asked = subprocess.run(
        [interpreter, "-I", "-S", "-c", "import sysconfig as s; print(s.get_path('stdlib'))"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    library = Path(asked.stdout.strip() or "/nowhere")
    folder = target / f"control-{agent.name.removeprefix('agent-')}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            draft = Path(scratch) / "control"
            _fill(draft, interpreter, agent, library)
            publish(draft, folder)
    return Control(folder, library)


def _fill(draft: Path, interpreter: str, agent: Path, library: Path) -> None:
    for name in ("bin", "lib", f"lib/{library.name}"):
        (draft / name).mkdir(parents=True)
    shutil.copytree(agent, draft / "agent")
    shutil.copyfile(os.path.realpath(interpreter), draft / "bin/python3")
    libraries = shared_libraries([Path(interpreter).resolve(), *library.glob("lib-dynload/*.so")])
    for path in libraries:
        name = _LOADER if Path(path).name.startswith("ld-") else Path(path).name
        shutil.copyfile(path, draft / "lib" / name)
    if not (draft / "lib" / _LOADER).exists():
        raise InfrastructureError(f"{interpreter} names no loader (ldd): install a dynamically linked Python")
    for path in (draft, *draft.rglob("*")):
        path.chmod(0o755)
