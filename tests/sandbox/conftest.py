from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import psutil
import pytest

from sandbox.client import Fleet, RemoteBox
from sandbox.layers.built_in import ensure_base
from sandbox.layers.store import LayerStore
from sandbox.types import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20, tmpfs_bytes=8 << 20, tmpfs_inodes=2000))


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("node")


BACKENDS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
GVISOR = pytest.param("gvisor", marks=[pytest.mark.gvisor, pytest.mark.slow])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs what asks for a `backend` on each, in a module with `ON_GVISOR = True` also on the slow one."""
    if "backend" in metafunc.fixturenames:
        on_gvisor = getattr(metafunc.module, "ON_GVISOR", False)
        metafunc.parametrize("backend", [*BACKENDS, *([GVISOR] if on_gvisor else [])])


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


@pytest.fixture(scope="session")
def alive() -> Callable[[Iterable[psutil.Process]], list[psutil.Process]]:
    """Picks those of some processes that have not ended."""
    return lambda tree: [process for process in tree if _lives(process)]


@pytest.fixture
async def fleet(backend: str, state_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    async with await Fleet.connect(
        "local", backend=backend, state_dir=state_dir, owner=request.node.name
    ) as fleet:
        yield fleet


@pytest.fixture
async def box(fleet: Fleet) -> RemoteBox:
    return await fleet.create(SPEC)


@pytest.fixture(scope="session")
def layered_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state folder whose store has the built-in base layer."""
    folder = tmp_path_factory.mktemp("layered")
    ensure_base(LayerStore(folder / "layers"))
    return folder
