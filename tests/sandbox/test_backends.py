"""What is chosen per sandbox: its backend and its latency class; and what the kernel then does."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path

import docker
import pytest

from sandbox.backends import cgroups
from sandbox.backends.registry import backends, choose
from sandbox.client import Fleet
from sandbox.errors import BackendMissingError, PolicyError
from sandbox.types import Capabilities, Limits, SandboxSpec


@pytest.fixture
async def light(state_dir: Path) -> Fleet:
    return await Fleet.connect("local", backend="bubblewrap", state_dir=state_dir, owner="backends")


async def test_an_unknown_backend_or_class_is_an_error(light: Fleet) -> None:
    async with light as fleet:
        with pytest.raises(BackendMissingError, match="there are docker, bubblewrap, gvisor"):
            await fleet.create(SandboxSpec(backend="chroot"))
    with pytest.raises(PolicyError, match="sensitive or best_effort"):
        SandboxSpec(latency="later")  # type: ignore[arg-type]


def test_the_page_tells_what_each_backend_holds() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "sandbox.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    named = {name.split("`")[1]: cells for name, *cells in rows if len(cells) == 4}
    (head,) = [line for line in lines if line.startswith("| capability |")]
    columns = [cell.strip() for cell in head.strip("|").split("|")][1:]
    found = backends()
    assert columns == list(found)
    assert set(named) == {field.name for field in fields(Capabilities)}
    for place, backend in enumerate(found.values()):
        for name, held in asdict(backend.capabilities()).items():
            said = named[name][place]
            assert said == ("yes" if held else "no") or said.startswith(("with ", "as ")), (
                backend.name,
                name,
            )


async def test_auto_takes_neither_gvisor_nor_function() -> None:
    there = backends()
    for name in ("docker", "bubblewrap"):
        del there[name]
    with pytest.raises(BackendMissingError):
        await choose("auto", there)


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


def cpu_idle(folder: Path) -> bool:
    file = folder / "cpu.idle"
    return file.exists() and file.read_text().strip() == "1"


async def test_best_effort_runs_in_an_idle_group(light: Fleet) -> None:
    if "cpu" not in cgroups.controllers():
        return  # there is no class without a group
    async with light as fleet:
        box = await fleet.create(SandboxSpec(latency="best_effort"))
        found = [Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup/") if folder.endswith(box.id)]
        idle = [folder for folder in found if cgroups._IDLE_PARENT in str(folder) or cpu_idle(folder)]
        assert len(idle) == 1 and (idle[0] / "cgroup.procs").read_text().split()
    assert not any(folder.exists() for folder in found)


async def test_the_idle_class_in_both_versions(tmp_path: Path) -> None:
    for version, file, value in ((1, "cpu.idle", "1"), (1, "cpu.shares", "2"), (2, "cpu.weight", "1")):
        root = tmp_path / f"{version}-{file}"
        for controller in ("cpu", "memory", "pids", "freezer") if version == 1 else ():
            (root / controller).mkdir(parents=True)
        root.mkdir(exist_ok=True)
        if version == 2:
            (root / "cgroup.controllers").write_text("cpu memory pids")
        made = cgroups.Cgroup.create("box", Limits(), root)
        await made.settle("sensitive")
        assert cgroups._IDLE_PARENT not in str(made.folders["cpu"])
        idle = made.folders["cpu"] if version == 2 else root / "cpu" / cgroups._IDLE_PARENT
        idle.mkdir(exist_ok=True)
        (idle / file).write_text("0")
        await made.settle("best_effort")
        assert (idle / file).read_text() == value
        assert made.folders["cpu"].is_relative_to(idle)
        assert cgroups._IDLE_PARENT not in str(made.folders["memory"])
