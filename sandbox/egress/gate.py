"""The network of one sandbox: its door, its proxy, its connector, and the phase it is in.

The door is a Unix socket that the sandbox finds mounted. Its agent, before anything else runs, hands a socket
through it that listens on the sandbox's own loopback. The proxy takes that and shuts the door: from then on
the sandbox has a port of its own to speak to, and no way to anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from sandbox.backends.base import Backend, Started
from sandbox.backends.cgroups import Cgroup
from sandbox.egress import jail
from sandbox.egress.connector import Broken, Connector
from sandbox.egress.doors import door_of, listen
from sandbox.egress.ledger import Ledger
from sandbox.egress.operator import FILE, Operator
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.owners import reach
from sandbox.policy import Denial, DenialReason, Network, literal
from sandbox.types import SandboxSpec

_START_S = 30.0
_LOG = logging.getLogger("sandbox.egress")
totals = Counter[DenialReason]()
"""Denials of sandboxes that have ended, by reason."""


class Gate:
    """The way out of one sandbox."""

    def __init__(self, path: Path, network: Network, operator: Operator):
        self._path, self._network, self._operator = path, network, operator
        self._ledger = Ledger(path.name)
        self._door = listen(path)
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        owner = partial(reach, path.parent.parent, path.name)
        self._connector = Connector(self._control, network, operator, self._ledger, owner)
        self._cgroup: Cgroup | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._serving: asyncio.Task[None] | None = None
        self._fault = ""
        self._closed = False

    @classmethod
    def open(cls, state_dir: Path, name: str, network: Network) -> Gate:
        """Opens the door of a sandbox; nobody is behind it yet.

        Raises:
            PolicyError: A rule wants an address that the operator has not opened.
            InfrastructureError: The operator's file is wrong, or there is no room for a socket.
        """
        operator = Operator.read(state_dir)
        _check(network, operator)
        try:
            return cls(door_of(state_dir, name), network, operator)
        except OSError as error:
            raise InfrastructureError(f"the door of a sandbox could not be made: {error}") from error

    @property
    def phase(self) -> str:
        """The phase it is in."""
        return self._connector.phase

    @property
    def reasons(self) -> Counter[DenialReason]:
        """How often something was denied, by reason."""
        return self._ledger.reasons

    async def start(self) -> None:
        """Starts the proxy; returns when it is confined.

        Raises:
            InfrastructureError: It does not start.
        """
        name = f"{self._path.name}-net"
        self._cgroup = await asyncio.to_thread(Cgroup.create, name, jail.limits(self._operator.bounds))
        try:
            self._process = await jail.start(self._cgroup, self._theirs, self._door, self._operator.bounds)
        except OSError as error:
            raise InfrastructureError(f"the proxy of a sandbox could not be started: {error}") from error
        finally:
            self._theirs.close()
            self._door.close()
        self._serving = asyncio.create_task(self._serve())
        ready = asyncio.create_task(self._connector.ready.wait())
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wait((ready, self._serving), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            ready.cancel()
        if not self._connector.ready.is_set():
            raise InfrastructureError(f"the proxy of a sandbox could not be confined: {await self._why()}")

    async def _why(self) -> str:
        assert self._process is not None and self._process.stderr is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        lines = (await self._process.stderr.read(1 << 14)).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it said nothing for {_START_S:.0f} s"

    async def _serve(self) -> None:
        try:
            await self._connector.serve()
            self._fault = "it has ended"
        except (Broken, OSError) as error:
            self._fault = str(error)
        if not self._closed and self._connector.ready.is_set():
            self._ledger.add(self.phase, DenialReason.PROXY, "", self._fault, 0)
        self._connector.close()
        self._control.close()

    def switch(self, phase: str) -> None:
        """Begins a phase; connections that it does not allow are cut before this returns.

        Raises:
            PolicyError: There is none of that name.
            InfrastructureError: The proxy has failed, so nothing passes any more.
        """
        self._network.check(phase)
        if self._fault:
            raise InfrastructureError(f"the sandbox has lost its proxy ({self._fault}): start it anew")
        _LOG.info("%s goes from phase %s to %s", self._path.name, self.phase, phase)
        self._connector.switch(phase)

    def denials(self) -> list[Denial]:
        """Returns what did not pass."""
        return self._ledger.denials()

    async def close(self) -> None:
        """Ends the proxy and all connections."""
        if self._closed:
            return
        self._closed = True
        totals.update(self.reasons)
        self._path.unlink(missing_ok=True)
        self._connector.close()
        for sock in (self._theirs, self._door):
            sock.close()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._cgroup is not None:
            await self._cgroup.remove()
        if self._process is not None:
            await self._process.wait()


async def start(backend: Backend, state_dir: Path, name: str, owner: str, spec: SandboxSpec) -> Started:
    """Starts a sandbox, with its network if it is to have one.

    Raises:
        PolicyError: The backend has no networks, or a rule wants what the operator has not opened.
        InfrastructureError: Sandbox or proxy did not start.
    """
    if not spec.network:
        return await backend.start(name, owner, spec)
    if not backend.capabilities().network:
        why = jail.lacking() or f"{backend.name} sandboxes have none (capability network)"
        raise PolicyError(f"a sandbox with a network cannot be had here: {why}")
    gate = await asyncio.to_thread(Gate.open, state_dir, name, spec.network)
    results = await asyncio.gather(gate.start(), backend.start(name, owner, spec), return_exceptions=True)
    started = results[1]
    if failures := [result for result in results if isinstance(result, BaseException)]:
        await gate.close()
        if isinstance(started, Started):
            await started.kill()
        raise failures[0]
    assert isinstance(started, Started)
    return replace(started, kill=lambda: _both(started.kill(), gate.close()), gate=gate)


def denied(gates: Iterable[Gate | None]) -> dict[str, int]:
    """Returns how often this node has denied something, by reason: to these sandboxes and those before."""
    counts = sum((gate.reasons for gate in gates if gate is not None), Counter(totals))
    return {str(reason): count for reason, count in counts.items()}


async def _both(first: Awaitable[None], second: Awaitable[None]) -> None:
    try:
        await first
    finally:
        await second


def _check(network: Network, operator: Operator) -> None:
    """Refuses, before anything is started, what could never be reached."""
    for rule in (rule for phase in network.phases for rule in network.rules(phase)):
        address = literal(rule.host) or operator.names.get(rule.host)
        if rule.private and address is not None and not operator.opens(address, rule.port):
            raise PolicyError(
                f"the operator of this node has not opened {rule.host}:{rule.port} "
                f"({FILE} in its state folder lists what is private and may be reached)"
            )
