"""Control groups, on a folder laid out like the kernel's and, where there are some, on the kernel's own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.backends import cgroups
from sandbox.types import Limits

ROOT = Path(__file__).parents[2]
LIMITS = Limits(cpus=0.5, memory_bytes=1 << 20, pids=9)


def entered(groups: cgroups.Cgroup) -> str:
    """Returns how early the kernel ends a process that has entered the groups."""
    program = (
        "import sys; from pathlib import Path; from sandbox.backends.cgroups import Cgroup; "
        "Cgroup({path: Path(path) for path in sys.argv[1:]}).enter(); "
        "print(open('/proc/self/oom_score_adj').read())"
    )
    folders = map(str, groups.folders.values())
    done = subprocess.run(
        [sys.executable, "-c", program, *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_version_2(tmp_path: Path) -> None:
    """The files that the kernel would make are laid out first."""
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    node = tmp_path / "tempering" / cgroups._node_name(os.getpid())
    box = node / "box"
    box.mkdir(parents=True)
    for file in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (box / file).write_text("max")
    made = cgroups.Cgroup.create("box", LIMITS, tmp_path)
    assert set(made.folders.values()) == {box}
    assert (box / "memory.max").read_text() == "1048576"
    assert (box / "memory.swap.max").read_text() == "0"
    assert (box / "pids.max").read_text() == "9"
    assert (box / "cpu.max").read_text() == "50000 100000"
    assert (node / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    (box / "cgroup.procs").write_text("")
    assert entered(made) == "500" and (box / "cgroup.procs").read_text() == "0"
    (box / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert made.oom_counter()() == 2


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    made = cgroups.Cgroup.create("box", LIMITS, tmp_path / "none")
    assert made.folders == {} and made.oom_counter()() == 0
    assert entered(made) == "500"


def test_groups_of_dead_nodes_are_swept(tmp_path: Path) -> None:
    parent = tmp_path / "memory" / "tempering"
    for node in ("999999999-1", f"{os.getpid()}-1", cgroups._node_name(os.getpid())):
        (parent / node / f"box of {node}").mkdir(parents=True)
    assert set(cgroups.sweep(tmp_path)) == {"box of 999999999-1", f"box of {os.getpid()}-1"}
    assert [path.name for path in parent.glob("*")] == [cgroups._node_name(os.getpid())]


async def test_the_kernels_own() -> None:
    if not cgroups.controllers():
        pytest.skip("this machine lets nobody make control groups")
    made = cgroups.Cgroup.create("test-box", LIMITS)
    assert all(folder.exists() for folder in made.folders.values())
    await made.remove()
    assert not any(folder.exists() for folder in made.folders.values())
    cgroups.leave()


STARTS_PROGRAMS = """
import os, sys; from pathlib import Path; from sandbox.backends.cgroups import Cgroup
Cgroup({path: Path(path) for path in sys.argv[1:]}).enter()
print("in", flush=True)
while True:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
"""


async def test_what_starts_programs_without_end_can_be_paused() -> None:
    """Its `vfork`: with version 1 one request in twenty is never met, as the kernel waits for who waits."""
    if "freezer" not in cgroups.controllers():
        pytest.skip("this machine lets nobody pause a control group")
    made = cgroups.Cgroup.create("test-starts", Limits())
    command = [sys.executable, "-c", STARTS_PROGRAMS, *map(str, made.folders.values())]
    pipe = asyncio.subprocess.PIPE
    busy = [await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe) for _ in range(4)]
    try:
        for process in busy:
            assert process.stdout is not None and await process.stdout.readline() == b"in\n"
        for _ in range(200):
            await made.freeze(True)
            assert cgroups._frozen(made.folders["freezer"])
            await made.freeze(False)
            await asyncio.sleep(0.003)
    finally:
        await made.remove()
        codes = [await process.wait() for process in busy]
    assert codes == [-signal.SIGKILL] * len(busy)
    cgroups.leave()
