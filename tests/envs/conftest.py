import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sandbox.client import Fleet
from sandbox.node import SOCKET


@pytest.fixture(scope="module")
def node_folder():
    """The state folder of a node that serves a file's tests; its path is short, for the socket's sake."""
    with (
        tempfile.TemporaryDirectory(prefix="tmpr") as folder,
        subprocess.Popen([sys.executable, "-m", "sandbox.node", folder]) as process,
    ):
        while not (Path(folder) / SOCKET).exists() and process.poll() is None:
            time.sleep(0.02)
        yield Path(folder)
        process.terminate()


@pytest.fixture
async def box(node_folder):
    """A real sandbox of its own."""
    connected = await Fleet.connect("local", backend="bubblewrap", state_dir=node_folder, owner="tests-envs")
    async with connected as fleet, await fleet.create() as sandbox:
        yield sandbox
