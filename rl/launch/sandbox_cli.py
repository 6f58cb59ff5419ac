"""The command line of `temper sandbox`; what the commands do is in `sandbox.commands`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.launch.layer_cli import add_layer

_TOKENS = """\
Tokens come from the environment or from files that only you can read, never from the command line:
  TEMPER_SANDBOX_TOKEN, or TEMPER_SANDBOX_TOKEN_FILE             of a client
  TEMPER_SANDBOX_NODE_TOKEN, or TEMPER_SANDBOX_NODE_TOKEN_FILE   of fronts to nodes, the same on both
`temper sandbox token` makes one.
"""
_SORTS = ("cpu", "memory", "processes", "disk", "commands", "age", "owner", "state", "id")
STATE = Path("~/.tempering")
"""Where the local node is unless a command says otherwise."""


def add_sandbox(
    commands: argparse._SubParsersAction[Any], parser_class: type[argparse.ArgumentParser]
) -> None:
    """Adds `sandbox` and what is below it to the parser of `temper`."""
    sandbox = commands.add_parser("sandbox", help="run a fleet of sandboxes, and look at it").add_subparsers(
        dest="what", metavar="COMMAND", required=True, parser_class=parser_class
    )
    front = _add(sandbox, "serve", "run_front", "a front: the entry to a fleet of nodes")
    front.add_argument("--nodes", type=Path, help="a file with a line `name http://host:port` for each node")
    front.add_argument("--local", action="store_true", help="this machine is the one node, started here too")
    front.add_argument("--state", type=Path, default=STATE, help=f"state folder of --local (default {STATE})")
    front.add_argument("--e2b", default="", metavar="HOST:PORT", help="serve clients of the E2B SDK there")
    front.add_argument("--e2b-templates", type=Path, metavar="FILE", help="what their templates are")
    front.add_argument("--access", type=Path, help="a file of tokens, projects and quotas (docs/sandbox.md)")
    front.add_argument(
        "--choices", type=int, default=2, help="random nodes compared for a create (default 2)"
    )
    _add_server(front, 7330)
    node = _add(sandbox, "node", "run_node", "a node agent: this machine's sandboxes, for fronts")
    node.add_argument("--name", default="", help="its name in all ids (default this machine's)")
    node.add_argument("--label", action="append", default=[], metavar="NAME=VALUE", help="as in unit=1")
    node.add_argument(
        "--starts-per-s", type=float, default=0.0, help="starts a second (default by backend and cores)"
    )
    node.add_argument(
        "--warm", action="append", default=[], metavar="FILE[=COUNT]",
        help="keep sandboxes of this specification ready: JSON with spec, backend, count; may be repeated",
    )  # fmt: skip
    node.add_argument("--state", type=Path, default=STATE, help=f"its state folder (default {STATE})")
    _add_server(node, 7331)
    _add_looks(sandbox)
    add_layer(sandbox, parser_class, STATE)
    health = _add(
        sandbox, "health", "check_health", "ask a front or node agent how it is (with the node token)"
    )
    health.add_argument("--url", required=True, help="of the front or the agent")
    health.add_argument("--wait", type=float, default=0.0, help="seconds to wait until it is well")
    _add(sandbox, "token", "make_token", "make a token, and its hash for an access file")


def _add_looks(sandbox: argparse._SubParsersAction[Any]) -> None:
    listing = _add(sandbox, "ls", "list_owners", "who holds how many sandboxes, and where")
    collect = _add(sandbox, "gc", "collect", "end the sandboxes of owners that have no client any more")
    collect.add_argument(
        "--keep", action="append", default=[], metavar="OWNER", help="not those of this owner"
    )
    stats = _add(sandbox, "stats", "show_stats", "how full the nodes are")
    top = _add(sandbox, "top", "show_top", "a live table of the sandboxes and what each uses")
    top.add_argument("--sort", choices=_SORTS, default="cpu", help="by what (default cpu)")
    top.add_argument("--once", action="store_true", help="print it once, for scripts")
    top.add_argument("--every", type=_seconds, default=2.0, help="seconds between two looks (default 2)")
    top.add_argument("--rows", type=int, default=0, help="at most so many sandboxes (default all)")
    drain = _add(sandbox, "drain", "drain", "have a node take no more sandboxes")
    drain.add_argument("node", help="its name")
    drain.add_argument("--off", action="store_true", help="have it take them again")
    for command in (listing, collect, stats, top, drain):
        local = command is not drain
        command.add_argument("--url", default="local", required=not local, help="of a front (default local)")
        command.add_argument("--state", type=Path, default=STATE, help=f"of the local node (default {STATE})")


def _seconds(word: str) -> float:
    if not 0.1 <= (seconds := float(word)) <= 3600:
        raise argparse.ArgumentTypeError(f"from 0.1 to 3600 seconds, not {word}")
    return seconds


def _add(
    sandbox: argparse._SubParsersAction[Any], name: str, function: str, about: str
) -> argparse.ArgumentParser:
    command = sandbox.add_parser(
        name, help=about, epilog=_TOKENS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.set_defaults(action=_action(function))
    return command


def _add_server(command: argparse.ArgumentParser, port: int) -> None:
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    command.add_argument("--port", type=int, default=port, help=f"default {port}; 0 takes a free one")
    command.add_argument("--public", action="store_true", help="listen on an address that others can reach")
    command.add_argument("--tls-cert", type=Path, help="certificate chain (PEM): serve https")
    command.add_argument("--tls-key", type=Path, help="its private key (PEM)")
    command.add_argument("--audit", type=Path, help="file of the audit log (default standard error)")


def _action(function: str) -> Callable[[argparse.Namespace, list[str]], int]:
    def action(parsed: argparse.Namespace, rest: list[str]) -> int:
        from sandbox import commands, fronts

        return getattr(fronts if function == "run_front" else commands, function)(parsed)

    return action
