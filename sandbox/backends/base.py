"""What a backend is: it starts one sandbox with the resident agent in it, and can end it for certain."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sandbox.backends import seccomp
from sandbox.errors import PolicyError
from sandbox.frames import FrameProtocol
from sandbox.types import Capabilities, Limits, SandboxSpec

if TYPE_CHECKING:
    from sandbox.egress.gate import Gate
    from sandbox.layers.writable import Writable

AUTO = ("docker", "bubblewrap")
"""What `auto` stands for: the first that is there. Others differ too much to be had unasked."""

COMMAND_UID = 60000
"""The user of commands; Python commands have one each of those that follow."""

DOOR = "/run/tempering.sock"
"""Where a sandbox with a network finds its door (`sandbox.egress.gate.door_of`)."""


CHANNEL = "/run/tempering-channel.sock"
"""Where the agent of a container finds its channel."""


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox that runs: its agent's channel, how to end it, and how often the kernel killed for memory.

    `pause` stops (True) all its processes or lets them go on; None where the backend cannot. `groups` gives
    the folders of its control groups by controller, as far as there are any. `gate` is its network, if it has
    one; no backend makes that. `writable` is the upper folder of a root of layers. `spec` is what was
    started: names of layers have become digests. `settle` puts it into its latency class, once it is up.
    """

    channel: FrameProtocol
    kill: Callable[[], Awaitable[None]]
    oom_kills: Callable[[], int]
    pause: Callable[[bool], Awaitable[None]] | None = None
    groups: Callable[[], Mapping[str, Path]] = dict[str, Path]
    gate: Gate | None = None
    settle: Callable[[], Awaitable[None]] | None = None
    writable: Writable | None = None
    spec: SandboxSpec | None = None


def refuse_layers(backend: str, spec: SandboxSpec, *, images: bool = False) -> None:
    """Returns when `spec` asks for none of the things that only layers give.

    Raises:
        PolicyError: It does.
    """
    asked = {
        "images": "" if images else spec.image,
        "workspaces": spec.workspace,
        "toolkits": spec.toolkit,
        "disks": spec.limits.disk_bytes,
    }
    for what, which in asked.items():
        if which:
            raise PolicyError(f"the {backend} backend has no {what} (asked for {which!r}); try bubblewrap")


class Backend(Protocol):
    """One way to isolate. A node has one instance of each."""

    name: str

    async def missing(self) -> str:
        """Returns in one line what this machine lacks, with the way to get it; empty when all is there."""
        ...

    def capabilities(self) -> Capabilities:
        """Returns what it holds on this machine."""
        ...

    async def start(self, box_id: str, owner: str, spec: SandboxSpec) -> Started:
        """Starts one sandbox."""
        ...

    def prepares(self, spec: SandboxSpec) -> bool:
        """Whether part of such a start can be done ahead, for a name that it is then to have."""
        ...

    async def prepare(self, box_id: str, spec: SandboxSpec) -> None:
        """Does ahead what it can of the start of a sandbox such as `spec`, until `start` or `drop`."""
        ...

    async def drop(self, box_id: str) -> None:
        """Undoes what was prepared under a name, if that has not been started."""
        ...

    def leave(self) -> None:
        """Lets go of what the node shares between its sandboxes; there are none any more."""
        ...

    async def reap(self, held: Callable[[], Set[str]]) -> list[str]:
        """Removes what this node's run has under names that are not held; returns names.

        Args:
            held: Gives the names (`box_id` of `start`) that must stay; to be asked after looking what there
                is, on the event loop, as a start may begin meanwhile.
        """
        ...

    async def reclaim(self, state_dir: Path) -> list[str]:
        """Removes what an earlier node of `state_dir` left behind; returns names."""
        ...


class Unprepared:
    """A backend that does nothing ahead of a start."""

    def prepares(self, spec: SandboxSpec) -> bool:
        """It does not."""
        return False

    async def prepare(self, box_id: str, spec: SandboxSpec) -> None:
        """Does nothing."""

    async def drop(self, box_id: str) -> None:
        """Has nothing to undo."""


def agent_command(
    folder: str,
    limits: Limits,
    *,
    uid: int | None,
    alone: bool,
    network: bool = False,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
    channel: bool = False,
) -> list[str]:
    """Returns the interpreter's arguments that start the agent found at `folder`/agent.

    Args:
        folder: Where the sandbox has the agent.
        limits: Of the sandbox; those that the kernel keeps per process are passed on.
        uid: The first user of commands, or None to run them as the agent's.
        alone: Whether no control group holds memory and processes, so that limits per process must do.
        network: Whether there is a door to hand a listener through.
        fresh: Whether each command has namespaces and folders of its own, which the agent must be let make.
        env: What commands have in their environment unless they bring something else.
        channel: Whether its channel is the socket at `CHANNEL`, and not its standard input and output.
    """
    largest = max(limits.tmpfs_bytes, limits.disk_bytes)
    rlimits = {"NOFILE": limits.open_files, "FSIZE": largest, "MEMLOCK": 1 << 16}
    if alone:
        rlimits |= {"AS": limits.memory_bytes, "NPROC": limits.pids}
    door = DOOR if network else ""
    sized = f"mode=1777,size={limits.tmpfs_bytes},nr_inodes={limits.tmpfs_inodes}" if fresh else ""
    told = {"door": door, "fresh": sized, "env": dict(env or {}), "channel": CHANNEL if channel else ""}
    config = json.dumps({"uid": uid, "rlimits": rlimits, "seccomp": seccomp.program(), **told})
    start = f"import sys; sys.path.insert(0, {folder!r}); from agent.agent import main; main()"
    return ["-I", "-S", "-c", start, config]
