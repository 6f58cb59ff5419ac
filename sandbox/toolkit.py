"""The toolkit of a sandbox: the resident agent, compiled for the interpreter that runs it.

A sandbox cannot write where its agent lies, so an agent that came as source would be compiled at every start,
for half of its start time and a tenth of its memory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sandbox.errors import InfrastructureError

AGENT = Path(__file__).parent / "agent"
"""The folder of the resident agent's source; a sandbox has it as `<somewhere>/agent`."""


def build(target: Path, interpreter: str) -> Path:
    """Returns a folder below `target` with the agent, compiled by `interpreter`; makes it if it is not there.

    Raises:
        InfrastructureError: The interpreter cannot compile it.
    """
    digest = hashlib.sha256(interpreter.encode() + str(os.stat(interpreter).st_mtime_ns).encode())
    for path in sorted(AGENT.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    built = target / f"agent-{digest.hexdigest()[:16]}"
    if built.exists():
        return built
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        draft = Path(scratch) / "agent"
        draft.mkdir(mode=0o755)
        for path in AGENT.glob("*.py"):
            shutil.copyfile(path, draft / path.name)
        _compile(draft, interpreter)
        for path in (draft, *draft.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        publish(draft, built)
    return built


def publish(draft: Path, to: Path) -> None:
    """Gives a folder its name, with all that is in it on disk, unless somebody else was faster."""
    for path in (*draft.rglob("*"), draft):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    try:
        draft.rename(to)
    except OSError:  # the kernel refuses to put a folder over one that has something in it
        if not to.exists():
            raise


def _compile(folder: Path, interpreter: str) -> None:
    modules = [path.name for path in sorted(folder.glob("*.py"))]
    program = (
        "import py_compile, sys\n"
        "for name in sys.argv[1:]:\n"
        "    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH\n"
        "    py_compile.compile(name, doraise=True, invalidation_mode=mode)\n"
    )
    done = subprocess.run(
        [interpreter, "-I", "-c", program, *modules], cwd=folder, capture_output=True, check=False
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InfrastructureError(
            f"{interpreter} cannot compile the agent: {last[0] if last else 'no reason'}"
        )
