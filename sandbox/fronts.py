"""The command `temper sandbox serve`: a front for a fleet or for this machine alone, with E2B if asked.

With `--local` one process is front and node agent: it makes its own tokens, in files of its state folder that
only its user can read, and hears of its node on loopback like any other front.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path

from sandbox.audit import Audit
from sandbox.channel import Header
from sandbox.e2b.access import Keys
from sandbox.e2b.server import E2BFront
from sandbox.e2b.templates import read_templates
from sandbox.errors import PolicyError
from sandbox.listening import Listener, listen, serve
from sandbox.node_server import OPERATIONS, NodeServer
from sandbox.server import Front
from sandbox.serving import Bind, Shell
from sandbox.tokens import (
    NODE_TOKEN,
    NODE_TOKEN_FILE,
    TOKEN,
    TOKEN_FILE,
    Access,
    Principal,
    own_token,
    read_access,
    read_token,
    token_access,
)
from sandbox.wire import Sink

_NODE = "local"


def run_front(parsed: argparse.Namespace) -> int:
    """Serves a front until it is told to stop."""
    if bool(parsed.nodes) == parsed.local:
        raise PolicyError("a front has either a list of nodes (--nodes FILE) or this machine (--local)")
    if parsed.e2b_templates and not parsed.e2b:
        raise PolicyError("--e2b-templates is for --e2b HOST:PORT")
    bind = Bind(parsed.host, parsed.port, parsed.public, parsed.tls_cert, parsed.tls_key)
    e2b = replace(bind, **_address(parsed.e2b)) if parsed.e2b else None
    for address in (bind, e2b):
        if address is not None:
            address.check()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(_serve(parsed, bind, e2b))
    return 0


async def _serve(parsed: argparse.Namespace, bind: Bind, e2b_bind: Bind | None) -> None:
    templates = read_templates(parsed.e2b_templates)
    audit, state = Audit(parsed.audit), parsed.state.expanduser().absolute()
    async with contextlib.AsyncExitStack() as stack:
        access, secret = _tokens(parsed, state)
        nodes = await _local(state, secret, audit, stack) if parsed.local else parsed.nodes
        front = Front(nodes, access, secret, choices=parsed.choices)
        shell = _shell(front, access, audit, secret)
        stack.push_async_callback(front.close)
        await front.start()
        listeners, tasks = [Listener("front", shell.application(), bind)], [front.tend()]
        if e2b_bind is not None:
            e2b = E2BFront(front, Keys(access, secret), shell.watched, templates, audit)
            listeners.append(Listener("e2b", e2b.application(), e2b_bind))
            tasks.append(e2b.tend())
        await serve(listeners, *tasks, ready=_say)


def _tokens(parsed: argparse.Namespace, state: Path) -> tuple[Access, str]:
    """Returns who may call, and the secret that the front shares with its nodes."""
    if not parsed.local:
        return read_access(parsed.access, os.environ), read_token(os.environ, NODE_TOKEN, NODE_TOKEN_FILE)
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = own_token(state / "node.token")
    if parsed.access or os.environ.get(TOKEN) or os.environ.get(TOKEN_FILE):
        return read_access(parsed.access, os.environ), secret
    token = own_token(state / "client.token")
    print(f"the token of clients is in {state / 'client.token'}", flush=True)
    return token_access(token, "local"), secret


async def _local(state: Path, secret: str, audit: Audit, stack: contextlib.AsyncExitStack) -> Path:
    """Serves this machine's node on loopback; returns a list of nodes with it."""
    node = NodeServer(_NODE, state, {})

    async def act(who: Principal, header: Header, body: bytes, sink: Sink) -> tuple[Header, bytes]:
        return await node.perform(header, body, sink)

    stack.push_async_callback(node.close)
    await node.start()
    shell = Shell("node", token_access(secret, "front"), act, audit, OPERATIONS, health=node.health)
    address, gate = await listen(Listener(_NODE, shell.application(), Bind()), stack, 1024)
    for work in (gate.tend(), node.tend()):
        stack.callback(asyncio.create_task(work).cancel)
    (state / "nodes").write_text(f"{_NODE} {address}\n")
    return state / "nodes"


def _shell(front: Front, access: Access, audit: Audit, secret: str) -> Shell:
    probe = token_access(secret, "health")
    shell = Shell("front", access, front.act, audit, front.operations, health=front.health, probe=probe)
    shell.metrics.gauge(
        "temper_sandbox_nodes", "What the last heartbeats said.", front.node_samples, "node", "what"
    )
    shell.metrics.gauge(
        "temper_sandbox_refusals",
        "Creates that a node refused, by reason, since the start.",
        lambda: [((reason,), float(count)) for reason, count in front.refusals.items()],
        "reason",
    )
    return shell


def _address(text: str) -> Header:
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise PolicyError(f"--e2b has an address HOST:PORT, as in 127.0.0.1:7340, not {text!r}")
    return {"host": host.strip("[]"), "port": int(port)}


def _say(what: str, address: str) -> None:
    print(f"{what} serves at {address}", flush=True)
