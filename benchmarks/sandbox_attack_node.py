"""A node like any other, but of the benchmark's own: some protections switched off, some agents hostile.

    python -m benchmarks.sandbox_attack_node STATE_DIR [PROTECTION ...] -- [options of the node]

A sandbox whose label `attack.agent` holds a program gets that program in place of the resident agent, with
all that the agent may do: this is what an agent that was taken over looks like. SIGUSR1 sets the node's clock
one hour ahead. Nothing of this can be reached from production code.
"""

from __future__ import annotations

import importlib
import pkgutil
import signal
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import sandbox.backends
import sandbox.node
from benchmarks.sandbox_attack_protections import PROTECTIONS
from sandbox import health
from sandbox.backends.base import Backend, agent_command
from sandbox.backends.registry import backends

AGENT = "attack.agent"
_agent: ContextVar[str] = ContextVar("agent", default="")


def hostile_agents() -> None:
    """Has every backend start what the label says, where it says anything."""

    def command(*args: Any, **kwargs: Any) -> list[str]:
        usual = agent_command(*args, **kwargs)
        program = _agent.get()
        return [*usual[:-2], program, usual[-1]] if program else usual

    for module in pkgutil.iter_modules(sandbox.backends.__path__):
        loaded = importlib.import_module(f"sandbox.backends.{module.name}")
        if getattr(loaded, "agent_command", None) is agent_command:
            setattr(loaded, "agent_command", command)  # noqa: B010
    for kind in {type(backend) for backend in backends().values()}:
        kind.start = _labelled(kind.start)
        kind.prepares = _unlabelled(kind.prepares)


def _labelled(start: Callable[..., Any]) -> Callable[..., Any]:
    async def labelled(self: Backend, box_id: str, owner: str, spec: Any, *more: Any, **how: Any) -> Any:
        _agent.set(spec.labels.get(AGENT, ""))
        return await start(self, box_id, owner, spec, *more, **how)

    return labelled


def _unlabelled(prepares: Callable[..., bool]) -> Callable[..., bool]:
    """What was prepared has the usual agent."""
    return lambda self, spec: AGENT not in spec.labels and prepares(self, spec)


def jump(*_: object) -> None:
    """Sets the clock an hour ahead."""
    now = time.time
    time.time = lambda: now() + 3600


def main() -> None:
    """Switches off what it is told to, and runs the node."""
    place = sys.argv.index("--")
    state_dir, *off = sys.argv[1:place]
    hostile_agents()
    health.EVERY_S, health.SILENT_S = 1.0, 2.0  # a test has no minute
    for name in off:
        PROTECTIONS[name].switch_off()
    signal.signal(signal.SIGUSR1, jump)
    sys.argv = ["sandbox.node", state_dir, *sys.argv[place + 1 :]]
    sandbox.node.main()


if __name__ == "__main__":
    main()
