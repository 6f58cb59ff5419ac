"""The records of the fleet: what a sandbox is asked to be, and what a command in it returned."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

from sandbox.errors import PolicyError, raise_for
from sandbox.policy import Network

Latency = Literal["sensitive", "best_effort"]
"""Whether somebody waits for a sandbox's commands, or they may run in the time that others leave."""


class Verdict(StrEnum):
    """The outcome of a verification run. `INFRASTRUCTURE` says nothing about the policy."""

    PASS = "pass"
    FAIL = "fail"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of one sandbox: cores, bytes, processes.

    Files are written to memory, at most `tmpfs_bytes` of them; with `disk_bytes` to a file of that size on
    the node's disk instead (capability `disk_file`). Either way there are at most `tmpfs_inodes` of them.
    """

    cpus: float = 1.0
    memory_bytes: int = 256 << 20
    pids: int = 64
    tmpfs_bytes: int = 64 << 20
    tmpfs_inodes: int = 8192
    open_files: int = 256
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend holds on this machine. Asking for what it lacks is an error, never a downgrade.

    `terminal_signals`: keys such as Ctrl-C signal the processes of a terminal. `oom_told`: a process beyond
    the memory limit is ended alone, and its command's result says so; without it an allocation fails or the
    whole sandbox ends. `stateful`: what a command leaves is there for the next; without it each command
    starts in an empty place of its own, and only commands are on offer. `terminal_limit`: the terminals that
    it opens are not taken from those that the machine has for all. `own_kernel`: its system calls end in a
    kernel of its own, whose devices, mounts and priorities are none of the machine's. `own_users`: what the
    kernel counts by user it shares with no sibling, unless it has layers. `masked_kernel`: its agent, too,
    sees nothing of the kernel's own memory.
    """

    images: bool
    memory_limit: bool
    process_limit: bool
    cpu_limit: bool
    inode_limit: bool
    separate_users: bool
    pause: bool = False
    disk_snapshot: bool = True
    memory_snapshot: bool = False
    terminal: bool = True
    network: bool = False
    terminal_signals: bool = True
    oom_told: bool = True
    stateful: bool = True
    layers: bool = False
    disk_file: bool = False
    terminal_limit: bool = False
    own_kernel: bool = False
    own_users: bool = False
    masked_kernel: bool = False


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to create.

    `image` names a base layer (`name:tag` or digest) or an image of the backend; empty is the
    built-in Python. `workspace` and `toolkit` are layers over it (`temper sandbox layer`).

    A sandbox that nobody has used for `ttl_s` seconds is ended, and any one `life_s` seconds after its start
    unless that is 0. With `journal` its commands and their results are written down, so that a caller who
    starts over can attach to it. `backend` is used in place of the connection's. A `best_effort` sandbox
    runs in the processor time that all others leave. `network` says what it may reach in each phase; nothing,
    if nothing is said.
    """

    image: str = ""
    limits: Limits = field(default_factory=Limits)
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    ttl_s: float = 3600.0
    journal: bool = True
    life_s: float = 0.0
    workspace: str = ""
    toolkit: str = ""
    network: Network = field(default_factory=Network)
    backend: str = ""
    latency: Latency = "sensitive"

    def __post_init__(self) -> None:
        if self.latency not in get_args(Latency):
            raise PolicyError(f"latency is {' or '.join(get_args(Latency))}, not {self.latency!r}")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command returned. An exit code that is not known is None, which is never an exit 0.

    A command ended by signal n has exit code 128 + n and that `signal`; one that was ended for its time has
    None. `truncated` says that output beyond the cap was dropped (head and tail are kept), `oom` that the
    kernel ended a process of the sandbox for memory while the command ran, `disk_full` that the command
    failed and a folder of the sandbox had no room left.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    timed_out: bool = False
    oom: bool = False
    duration_s: float = 0.0
    signal: int | None = None
    disk_full: bool = False

    def check(self) -> ExecResult:
        """Returns itself when the command exited with 0.

        Raises:
            CommandError: It did not; the kind says why (see `sandbox.errors`).
        """
        raise_for(self)
        return self


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A path in a sandbox. `mtime` in nanoseconds; `target` of a link; `kind` file, dir, link or other."""

    path: str
    kind: str
    size: int
    mode: int
    mtime: int
    uid: int
    target: str


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of a running command's output: of stdout or stderr, as it comes."""

    data: bytes
    stderr: bool


@dataclass(frozen=True, slots=True)
class Ear:
    """Where an owner hears one sandbox.

    Attributes:
        sock: Listens.
        secret: A text that belongs to this sandbox alone, and is the same for whoever goes on with it: a key
            that a command is given must be the same when the command is given again.
    """

    sock: socket.socket
    secret: str
