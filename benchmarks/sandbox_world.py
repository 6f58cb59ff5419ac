"""The processes of a small fleet, started with their places to die: node, node agent, front."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.sandbox_breakpoint import kill
from benchmarks.sandbox_traces import Traces, traces
from sandbox.client import Fleet
from sandbox.connection import Connection
from sandbox.errors import LostError
from sandbox.node import SOCKET
from sandbox.tokens import NODE_TOKEN, TOKEN, fresh_token

_ROOT = Path(__file__).parents[1]


@dataclass(slots=True)
class World:
    """One state folder with its node; with `web` also a node agent and a front, all on loopback."""

    folder: Path
    web: bool
    docker: Any = None
    nodes: list[int] = field(default_factory=list[int])
    servers: dict[str, subprocess.Popen[str]] = field(default_factory=dict[str, "subprocess.Popen[str]"])
    urls: dict[str, str] = field(default_factory=dict[str, str])
    watch: Fleet | None = None
    token: str = field(default_factory=lambda: fresh_token()[0])
    node_token: str = field(default_factory=lambda: fresh_token()[0])

    @property
    def state(self) -> Path:
        """The node's state folder."""
        return self.folder / "state"

    @property
    def arm(self) -> Path:
        """What arms a place."""
        return self.folder / "arm"

    @property
    def url(self) -> str:
        """Where clients connect to."""
        return self.urls["front"] if self.web else "local"

    async def start(self) -> None:
        """Starts all processes."""
        self.state.mkdir(parents=True, mode=0o700)
        (self.folder / "runs").mkdir()
        await self.start_node()
        if self.web:
            await asyncio.to_thread(self.start_agent)
            await asyncio.to_thread(self.start_front)

    async def start_node(self) -> None:
        """Starts the node, and stays connected so that it does not end for want of clients."""
        words = [*_command(self.arm, "node"), str(self.state), "--detach"]
        with (self.state / "node.log").open("ab") as log:
            done = await asyncio.to_thread(
                subprocess.run, words, stdout=subprocess.PIPE, stderr=log, env=self._env(), check=False
            )
        assert done.stdout == b"ready", (self.state / "node.log").read_text()[-2000:]
        self.watch = await Fleet.connect(state_dir=self.state, owner="watch", backend="bubblewrap", lease_s=0)
        self.nodes.append(self.watch.node_pid)

    def start_agent(self) -> None:
        """Starts the node agent."""
        self._serve("agent", "node", "--name", "n", "--state", str(self.state))
        (self.folder / "nodes").write_text(f"n {self.urls['agent']}\n")

    def start_front(self) -> None:
        """Starts the front."""
        self._serve("front", "serve", "--nodes", str(self.folder / "nodes"))

    def pid(self, victim: str) -> int:
        """Returns the process id of a victim; 0 for the client, which knows its own."""
        if victim == "client":
            return 0
        return self.nodes[-1] if victim == "node" else self.servers[victim].pid

    async def restart(self, victim: str) -> None:
        """Starts what was killed once more."""
        if victim == "node":
            assert self.watch is not None
            await self.watch.close(release=False)
            await self.start_node()
        elif victim != "client":
            process = self.servers.pop(victim)
            await asyncio.to_thread(process.communicate)
            await asyncio.to_thread(self.start_agent if victim == "agent" else self.start_front)

    def traces(self) -> Traces:
        """Returns what there is besides the fleet's own processes."""
        return traces(self.state, self.nodes, [p.pid for p in self.servers.values()], self.docker)

    async def stop(self) -> None:
        """Ends all processes as an operator would."""
        for process in self.servers.values():
            process.terminate()
            await asyncio.to_thread(process.communicate)
        self.servers.clear()
        if self.watch is not None:
            await self.watch.close()
            self.watch = None
        while await _answers(self.state):  # noqa: ASYNC110 (a node that nobody needs ends itself)
            await asyncio.sleep(0.1)

    def kill_all(self) -> None:
        """Ends what still runs after an error."""
        for process in self.servers.values():
            kill(process.pid)
            process.communicate()
        self.servers.clear()

    def _serve(self, name: str, *words: str) -> None:
        port = self.urls[name].rpartition(":")[2] if name in self.urls else "0"
        command = [*_command(self.arm, name), *words, "--port", port]
        command += ["--audit", str(self.folder / f"{name}.audit")]
        with (self.folder / f"{name}.log").open("a") as log:
            process = self.servers[name] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env()
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " serves at " in line, (self.folder / f"{name}.log").read_text()[-2000:]
        self.urls[name] = line.split()[-1]

    def _env(self) -> dict[str, str]:
        keep = {name: value for name, value in os.environ.items() if not name.startswith("TEMPER_SANDBOX")}
        return {**keep, "PYTHONPATH": str(_ROOT), TOKEN: self.token, NODE_TOKEN: self.node_token}


def _command(arm: Path, kind: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.sandbox_breakpoint", str(arm), kind]


async def _answers(state: Path) -> bool:
    try:
        connection = await Connection.open(state / SOCKET)
    except (OSError, LostError):
        return False
    await connection.close()
    return True
