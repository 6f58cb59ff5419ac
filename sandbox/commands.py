"""The commands `temper sandbox`: a front, a node agent, and what an operator looks at."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from sandbox.audit import Audit
from sandbox.channel import Header
from sandbox.client import Fleet, Reclaimed, release_ownerless
from sandbox.connection import Connection, Link
from sandbox.errors import InfrastructureError, LostError, PolicyError
from sandbox.listening import Listener, serve
from sandbox.node import SOCKET
from sandbox.node_server import OPERATIONS, NodeServer
from sandbox.serving import Bind, Shell
from sandbox.tokens import (
    NODE_TOKEN,
    NODE_TOKEN_FILE,
    TOKEN,
    TOKEN_FILE,
    Principal,
    fresh_token,
    read_token,
    token_access,
)
from sandbox.top import Row, watch
from sandbox.warm_spec import read_warm
from sandbox.web import Caller, WebConnection
from sandbox.wire import Sink

_PATIENCE_S, _RETRY_S = 5.0, 0.3


def run_node(parsed: argparse.Namespace) -> int:
    """Serves a node agent until it is told to stop; the node's sandboxes stay."""
    token = read_token(os.environ, NODE_TOKEN, NODE_TOKEN_FILE)
    labels = dict(_label(word) for word in parsed.label)
    warm = [read_warm(word) for word in parsed.warm]
    bind, audit = _bind(parsed), Audit(parsed.audit)
    name = parsed.name or socket.gethostname().partition(".")[0].lower()

    async def work() -> None:
        node = NodeServer(name, parsed.state, labels, parsed.starts_per_s, warm=warm)

        async def act(who: Principal, header: Header, body: bytes, sink: Sink) -> tuple[Header, bytes]:
            return await node.perform(header, body, sink)

        shell = Shell("node", token_access(token, "front"), act, audit, OPERATIONS, health=node.health)
        shell.metrics.gauge("temper_sandbox_node", "What the node holds.", node.samples, "what")
        try:
            await node.start()
            await serve([Listener(f"node {name}", shell.application(), bind)], node.tend(), ready=_say)
        finally:
            await node.close()

    return _run(work())


def list_owners(parsed: argparse.Namespace) -> int:
    """Prints who holds what."""
    owners = asyncio.run(_ask(parsed, {"op": "owners"})).get("owners", {})
    rows = [
        (name, str(held["sandboxes"]), str(held["clients"]), " ".join(held.get("nodes", ())))
        for name, held in owners.items()
    ]
    _table(("OWNER", "SANDBOXES", "CLIENTS", "NODES"), rows)
    return 0


def collect(parsed: argparse.Namespace) -> int:
    """Ends the sandboxes of owners without a client, and says what there was."""

    async def work() -> Reclaimed:
        if parsed.url == "local":
            return await Fleet.reclaim(parsed.state, frozenset(parsed.keep))
        return await release_ownerless(_connect(parsed), frozenset(parsed.keep))

    ended = asyncio.run(work())
    for name, count in sorted(ended.sandboxes.items()):
        print(f"{name}: {count} sandboxes ended")
    print(f"{ended.total} sandboxes ended")
    return 0


def show_stats(parsed: argparse.Namespace) -> int:
    """Prints how full the nodes are."""
    if parsed.url == "local":
        load = asyncio.run(_ask(parsed, {"op": "load"}))
        stats: Header = {"nodes": {"local": load} if load else {}, "unheard": []}
    else:
        stats = asyncio.run(_ask(parsed, {"op": "stats"}))
    _table(("NODE", "SANDBOXES", "MEMORY GIB", "CORES", "STARTING", "STATE", "BACKENDS"), list(_rows(stats)))
    for name, node in stats["nodes"].items():
        for pool in node.get("pools", ()):
            about = f"{pool['ready']} of {pool['target']} ready, {pool['claimed']} claimed"
            print(f"{name}: warm pool {pool['pool']} ({pool['backend']}): {about} {pool['problem']}".rstrip())
        if reaper := node.get("reaper"):
            late = f"; {reaper['problem']}" if reaper["problem"] else ""
            seen = f"looked {reaper['age_s']:.0f} s ago, every {reaper['period_s']:g} s{late}"
            print(
                f"{name}: reaped {reaper['removed']} ({', '.join(reaper['last'][-3:]) or 'nothing'}), {seen}"
            )
    if stats.get("refusals"):
        print("refused by nodes: " + ", ".join(f"{why} {count}" for why, count in stats["refusals"].items()))
    return 0


def show_top(parsed: argparse.Namespace) -> int:
    """Shows the sandboxes and what each uses, until interrupted."""

    async def ask() -> list[Row]:
        rows: list[Row] = (await _ask(parsed, {"op": "top"})).get("rows", [])
        return rows

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch(parsed, ask))
    return 0


def check_health(parsed: argparse.Namespace) -> int:
    """Asks a front or a node agent how it is, waiting for at most `--wait` seconds until it is well."""
    token = read_token(os.environ, NODE_TOKEN, NODE_TOKEN_FILE)

    async def work() -> str:
        caller, until = Caller(parsed.url, token), time.monotonic() + parsed.wait
        try:
            while True:
                try:
                    async with asyncio.timeout(_PATIENCE_S):
                        return await caller.get("/health")
                except (LostError, InfrastructureError, TimeoutError):
                    if time.monotonic() > until:
                        raise
                await asyncio.sleep(_RETRY_S)
        finally:
            await caller.close()

    print(asyncio.run(work()))
    return 0


def drain(parsed: argparse.Namespace) -> int:
    """Has a node take no more sandboxes, or take them again."""
    asyncio.run(_ask(parsed, {"op": "drain", "node": parsed.node, "on": not parsed.off}))
    print(f"node {parsed.node} {'takes sandboxes again' if parsed.off else 'is draining'}")
    return 0


def make_token(parsed: argparse.Namespace) -> int:
    """Prints a new token and what an access file says of it."""
    token, digest = fresh_token()
    print(f"token   {token}\nsha256  {digest}")
    return 0


async def _ask(parsed: argparse.Namespace, header: Header) -> Header:
    if parsed.url == "local":
        try:
            connection: Link = await Connection.open(parsed.state.expanduser().absolute() / SOCKET)
        except OSError:
            return {}
    else:
        connection = _connect(parsed)
    try:
        return (await connection.request(header))[0]
    finally:
        await connection.close()


def _connect(parsed: argparse.Namespace) -> WebConnection:
    return WebConnection(Caller(parsed.url, read_token(os.environ, TOKEN, TOKEN_FILE)), "operator", 0.0)


def _rows(stats: Header) -> Iterator[tuple[str, ...]]:
    for name, node in stats["nodes"].items():
        used, most = node["used"], node["capacity"]
        state = "down" if node.get("down") else "draining" if node["draining"] else "up"
        memory = f"{used[1] / 2**30:.1f}/{most[1] / 2**30:.1f}"
        cores = f"{used[2]:g}/{most[2]:g}"
        backends = " ".join(node.get("backends", ()))
        yield name, f"{used[0]}/{most[0]}", memory, cores, str(node["starting"]), state, backends
    for name in stats["unheard"]:
        yield name, "-", "-", "-", "-", "never heard of", ""


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _bind(parsed: argparse.Namespace) -> Bind:
    bind = Bind(parsed.host, parsed.port, parsed.public, parsed.tls_cert, parsed.tls_key)
    bind.check()
    return bind


def _label(word: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not (name and sign):
        raise PolicyError(f"a label is name=value, not {word!r}")
    return name, value


def _say(what: str, address: str) -> None:
    print(f"{what} serves at {address}", flush=True)


def _run(work: Any) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(work)
    return 0
