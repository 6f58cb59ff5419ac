"""The command line of `temper sandbox layer`; what the commands do is in `sandbox.layers.commands`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("base", "workspace", "toolkit")
_ANSWERS = """\
ANSWERS is a JSON file of what must not be in a layer (all optional, one at least):
  strings, regexes   in files, bytecode, archives, git objects
  patches            gold patches, by their path from this file; added lines count as strings
  names              of files, such as hidden tests (shell patterns)
  package, version   of the task's target: newer ones are found in site-packages and caches
  waive              findings that are accepted, by name (shell patterns over kind:path)
"""


def add_layer(
    sandbox: argparse._SubParsersAction[Any], parser_class: type[argparse.ArgumentParser], state: Path
) -> None:
    """Adds `layer` and what is below it to the parser of `temper sandbox`.

    Args:
        sandbox: Where.
        parser_class: Of its parsers.
        state: The folder of the local node unless a command says otherwise.
    """
    layer = sandbox.add_parser("layer", help="base, workspace and toolkit layers of sandboxes")
    commands = layer.add_subparsers(
        dest="layer_what", metavar="COMMAND", required=True, parser_class=parser_class
    )
    build = _add(commands, "build", "build_layer", "build a layer and give it a name", state)
    build.add_argument("source", type=Path, help="a folder, a Dockerfile, or a tar of docker save/export")
    build.add_argument("--kind", choices=KINDS, required=True, help="what it is")
    build.add_argument("--name", required=True, metavar="NAME:TAG", help="how it is called")
    build.add_argument(
        "--at", default="", metavar="PATH", help="where a folder goes (default /, a workspace's /workspace)"
    )
    build.add_argument("--context", type=Path, help="what COPY reads (default the Dockerfile's folder)")
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="of an ARG")
    build.add_argument("--network", action="store_true", help="let RUN use this machine's network")
    build.add_argument("--clean-git", action="store_true", help="leave one commit in each git repository")
    _add_scan(build, required=False)
    _add(commands, "ls", "list_layers", "the layers of the local node", state)
    remove = _add(commands, "rm", "remove_layer", "take a layer's name away, or all of a digest", state)
    remove.add_argument("layer", help="its name or digest")
    remove.add_argument("--kind", choices=KINDS, help="when kinds share the name")
    _add(commands, "gc", "collect_layers", "delete layers without a name that no sandbox uses", state)
    scan = _add(commands, "scan", "scan_layer", "look for planted answers in a folder or layer", state)
    scan.add_argument("what_to_scan", metavar="FOLDER|LAYER", help="a folder, or a layer's name or digest")
    _add_scan(scan, required=True)


def _add_scan(command: argparse.ArgumentParser, *, required: bool) -> None:
    command.add_argument(
        "--scan", "--answers", type=Path, metavar="ANSWERS", required=required,
        help="refuse what gives these answers away (below)",
    )  # fmt: skip
    command.add_argument("--waive", action="append", default=[], metavar="KIND:PATH", help="accept a finding")


def _add(
    commands: argparse._SubParsersAction[Any], name: str, function: str, about: str, state: Path
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=about, epilog=_ANSWERS if name in ("build", "scan") else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("--state", type=Path, default=state, help=f"of the local node (default {state})")
    command.set_defaults(action=_action(function))
    return command


def _action(function: str) -> Callable[[argparse.Namespace, list[str]], int]:
    def action(parsed: argparse.Namespace, rest: list[str]) -> int:
        from sandbox.layers import commands

        return getattr(commands, function)(parsed)

    return action
