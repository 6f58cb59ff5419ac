"""What an attack is, where it takes place, and what host and siblings must look like after it.

An attack is an async function that does its worst in a fresh sandbox and fails by `check` when the sandbox,
the node or the host let it. After each, `Stage.wounds` looks at all that it must not have touched.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from sandbox.client import Fleet, RemoteBox
from sandbox.errors import LostError, PolicyError, SandboxError
from sandbox.node import SOCKET
from sandbox.types import ExecResult, Limits, SandboxSpec

SPEC = SandboxSpec(
    limits=Limits(memory_bytes=128 << 20, tmpfs_bytes=8 << 20, tmpfs_inodes=2000, open_files=256),
    ttl_s=600,
)
CANARY = "TEMPERING_CANARY"
"""A variable of the node's environment that no sandbox may ever see."""

QUICK_S, GROWTH = 5.0, 96 << 20
_FDS, _FREE = 24, 512 << 20
_DEPTHS = ("docker", "*/docker", "tempering*/*", "*/tempering*/*")
NODE_SANDBOXES = 12


class NotHeld(AssertionError):
    """An attack got through; the text says what it did."""


def check(holds: object, what: str) -> None:
    """Fails the attack unless `holds`."""
    if not holds:
        raise NotHeld(what)


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack. `needs`: capabilities without which (with `!`: with which) no tier claims to hold it."""

    name: str
    kind: str
    case: int | None
    what: str
    needs: tuple[str, ...]
    run: Callable[[Scene], Awaitable[None]]


@dataclass(slots=True)
class Table:
    """The attacks of one kind, in the order in which they are written down."""

    kind: str
    attacks: list[Attack] = field(default_factory=list[Attack])

    def attack(
        self, name: str, *, case: int | None = None, needs: str = ""
    ) -> Callable[[Callable[[Scene], Awaitable[None]]], Callable[[Scene], Awaitable[None]]]:
        """Enters a function: what it does and the condition it passes by are its docstring."""

        def enter(run: Callable[[Scene], Awaitable[None]]) -> Callable[[Scene], Awaitable[None]]:
            what = " ".join((run.__doc__ or "").split())
            self.attacks.append(Attack(name, self.kind, case, what, tuple(needs.split()), run))
            return run

        return enter


@dataclass(slots=True)
class Scene:
    """Where one attack takes place: its own sandbox, a sibling, and the stage they stand on."""

    stage: Stage
    box: RemoteBox
    opened: list[RemoteBox] = field(default_factory=list[RemoteBox])

    @property
    def fleet(self) -> Fleet:
        """The fleet of the stage."""
        return self.stage.fleet

    @property
    def sibling(self) -> RemoteBox:
        """A sandbox that has nothing to do with the attack."""
        return self.stage.sibling

    async def fresh(self, spec: SandboxSpec = SPEC, **how: Any) -> RemoteBox:
        """Starts one more sandbox, closed after the attack."""
        box = await self.fleet.create(spec, **how)
        self.opened.append(box)
        return box

    async def python(
        self, source: str, timeout_s: float = 10.0, box: RemoteBox | None = None, limit: int = 1 << 16
    ) -> ExecResult:
        """Runs Python as an ordinary command."""
        command = ["/usr/bin/python3", "-c", source]
        return await (box or self.box).exec(command, timeout_s=timeout_s, output_limit=limit)

    async def says(self, source: str, expected: bytes, timeout_s: float = 10.0) -> None:
        """Runs Python that tries something and prints what came of it; fails when that is not `expected`."""
        result = await self.python(source, timeout_s)
        said = result.stdout + result.stderr
        check(said.strip() == expected, f"it said {said[-200:]!r} instead of {expected!r}")

    async def answers(self, box: RemoteBox | None = None) -> None:
        """Fails when a sandbox, the attacked one if no other is given, does not answer rightly."""
        await alive(box or self.box)


async def alive(box: RemoteBox) -> None:
    """Fails when a sandbox does not answer, with the right bytes, within `QUICK_S` seconds a command."""
    word = secrets.token_hex(4)
    start = time.monotonic()
    result = await box.exec(["echo", word], timeout_s=30)
    check(result.stdout == f"{word}\n".encode(), f"a healthy command gave {result}")
    inner = await box.python(f"print({word!r})", timeout_s=30)
    check(inner.stdout == f"{word}\n".encode(), f"a healthy call gave {inner}")
    took = time.monotonic() - start
    check(took < 2 * QUICK_S, f"two healthy commands took {took:.1f} s")


class Stage:
    """A node of one's own with one backend, a fleet on it, and a sibling that must never notice anything."""

    fleet: Fleet
    sibling: RemoteBox
    node: psutil.Process

    def __init__(self, tier: str, folder: Path, off: tuple[str, ...] = ()):
        self.tier, self.folder, self.off = tier, folder, off
        self._before: dict[str, int] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Starts node, fleet and sibling, and takes down what a healthy host looks like."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.sandbox_attack_node", str(self.folder), *self.off]
        root = Path(__file__).parent.parent
        with (self.folder / "attacks.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, "--", "--max-sandboxes", str(NODE_SANDBOXES), cwd=root, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(root), CANARY: secrets.token_hex(8)},
                stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        while not (self.folder / SOCKET).exists():
            if self._process.returncode is not None:
                raise RuntimeError(f"the node ended: {(self.folder / 'attacks.log').read_text()[-2000:]}")
            await asyncio.sleep(0.02)
        self.fleet = await Fleet.connect(state_dir=self.folder, owner="attacks", backend=self.tier)
        if self.fleet.node_pid != self._process.pid:
            raise RuntimeError("another node answers: the benchmark's own has ended")
        self.node = psutil.Process(self.fleet.node_pid)
        self.sibling = await self.fleet.create(SPEC)
        await alive(self.sibling)
        self._before = self._size()

    async def close(self) -> list[str]:
        """Ends all; returns what is left of it that should not be."""
        boxes = [box.id for box in await self.fleet.boxes()]
        await self.fleet.close()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(self._process.wait(), 60)
        return await asyncio.to_thread(self.left_of, boxes)

    async def abandon(self) -> None:
        """Ends all, whatever state an attack has brought it into."""
        try:
            await asyncio.wait_for(self.close(), 30)
        except (SandboxError, TimeoutError, psutil.Error):
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()

    def _size(self) -> dict[str, int]:
        kept = (path.lstat().st_size for path in self.folder.rglob("*") if path.is_file())
        return {"fds": self.node.num_fds(), "memory": self.node.memory_info().rss, "disk": sum(kept)}

    async def wounds(self, ended: list[str]) -> str:
        """Returns what an attack whose sandboxes `ended` has done to host or siblings; empty when nothing."""
        try:
            await alive(self.sibling)
        except (SandboxError, NotHeld) as error:
            return f"the sibling: {error}"
        now = await asyncio.to_thread(self._size)
        for name, more in (("fds", _FDS), ("memory", GROWTH), ("disk", GROWTH)):
            if now[name] > self._before[name] + more:
                return f"the node grew from {self._before[name]} to {now[name]} ({name})"
        if psutil.virtual_memory().available < _FREE or shutil.disk_usage(self.folder).free < _FREE:
            return "the host has no memory or disk left"
        return ", ".join(await asyncio.to_thread(self.left_of, ended))

    def left_of(self, ended: list[str], wait_s: float = 10.0) -> list[str]:
        """Returns what stays of sandboxes that have ended: processes, control groups, mounts, containers."""
        deadline = time.monotonic() + wait_s
        while (found := sorted(_traces(ended))) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found


def _traces(ended: list[str]) -> Iterator[str]:
    names = {*ended, *(container for box in ended for container in _containers(box))}
    if not names:
        return
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if any(name in text for name in names):
            yield f"process {path.parent.name}"
    for name in names:
        yield from (f"control group {path}" for path in _groups(name))
        if name in Path("/proc/self/mountinfo").read_text():
            yield f"a mount of {name}"
    yield from (f"container {name}" for name in names - set(ended))


def _groups(name: str) -> list[Path]:
    while True:
        try:
            return [path for depth in _DEPTHS for path in Path("/sys/fs/cgroup").glob(f"{depth}/{name}")]
        except FileNotFoundError:  # a group of somebody else has gone meanwhile
            continue


_engine: list[Any] = []


def _containers(box: str) -> list[str]:
    import docker  # a machine without it has no containers either
    import docker.errors

    if not _engine:
        try:
            _engine.append(docker.from_env(timeout=30))
        except docker.errors.DockerException:
            _engine.append(None)
    if _engine[0] is None:
        return []
    listed = _engine[0].api.containers(all=True, filters={"label": f"tempering.sandbox={box}"})
    return [str(container["Id"]) for container in listed]


def limited(spec: SandboxSpec = SPEC, **changes: Any) -> SandboxSpec:
    """Returns a specification with other limits."""
    return replace(spec, limits=replace(spec.limits, **changes))


async def typed(work: Awaitable[Any]) -> SandboxError | None:
    """Returns the typed error that some work ends in; another kind of error is passed on.

    So is a refusal of a tier without state, which says that it does not offer what the attack is about.
    """
    try:
        await work
    except SandboxError as error:
        if isinstance(error, PolicyError) and "(stateful)" in str(error):
            raise
        return error
    return None


async def ended(box: RemoteBox, within_s: float = 10.0) -> None:
    """Fails unless a sandbox is gone, with a typed reason, within a time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if isinstance(await typed(box.exec(["true"], timeout_s=5)), LostError | SandboxError):
            return
        await asyncio.sleep(0.1)
    raise NotHeld("the sandbox was not ended")
