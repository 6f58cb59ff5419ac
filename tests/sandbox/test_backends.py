"""What is chosen per sandbox: its backend and its latency class; and what the kernel then does."""

from __future__ import annotations

from pathlib import Path

import docker
import pytest

from sandbox.backends import cgroups
from sandbox.client import Fleet
from sandbox.errors import BackendMissingError, PolicyError
from sandbox.types import Limits, SandboxSpec


@pytest.fixture
async def light(state_dir: Path) -> Fleet:
    return await Fleet.connect("local", backend="bubblewrap", state_dir=state_dir, owner="backends")


async def test_an_unknown_backend_or_class_is_an_error(light: Fleet) -> None:
    async with light as fleet:
        with pytest.raises(BackendMissingError, match="there are docker, bubblewrap, gvisor"):
            await fleet.create(SandboxSpec(backend="chroot"))
    with pytest.raises(PolicyError, match="sensitive or best_effort"):
        SandboxSpec(latency="later")  # type: ignore[arg-type]


@pytest.mark.docker
async def test_a_sandbox_has_the_backend_of_its_specification(light: Fleet) -> None:
    async with light as fleet:
        own = await fleet.create(SandboxSpec(backend="docker", latency="best_effort"))
        assert fleet.backend == "bubblewrap"
        assert (await own.exec("test -e /.dockerenv && cat /etc/passwd")).stdout.startswith(b"root:")
        client = docker.from_env()
        container = client.containers.get(f"tempering-{own.id}")
        assert container.attrs["HostConfig"]["CpuShares"] == 2
        client.close()


async def test_best_effort_runs_in_an_idle_group(light: Fleet) -> None:
    if "cpu" not in cgroups.controllers():
        return  # there is no class without a group
    async with light as fleet:
        box = await fleet.create(SandboxSpec(latency="best_effort"))
        idle = [path for path in Path("/sys/fs/cgroup").rglob(box.id) if cgroups._IDLE_PARENT in str(path)]
        assert idle and all(not path.is_symlink() for path in idle)


def test_the_idle_class_in_both_versions(tmp_path: Path) -> None:
    for version, file, value in ((1, "cpu.idle", "1"), (1, "cpu.shares", "2"), (2, "cpu.weight", "1")):
        root = tmp_path / f"{version}-{file}"
        top = (root if version == 2 else root / "cpu") / cgroups._IDLE_PARENT
        top.mkdir(parents=True)
        (top / file).write_text("0")
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu memory pids")
        made = cgroups.Cgroup.create("box", Limits(), root, latency="best_effort")
        assert made.folders["cpu"].parents[1] == top
        assert (top / file).read_text() == value
        assert cgroups._IDLE_PARENT not in str(cgroups.Cgroup.create("box", Limits(), root).folders["cpu"])
