"""`temper export`: a trained policy as a plain folder with a model card."""

from __future__ import annotations

import argparse
from typing import Any

from rl.launch.folders import add_new_folder, add_root

_HELP = """\
  temper export my-run --out my-model          the newest checkpoint
  temper export my-run@40 --out my-model       that of step 40
  temper export path/to/policy --out my-model  any policy's folder, such as one with adapters
The folder has weights, configuration, tokenizer, chat format and README.md. That of a model of transformers
(policy=hf) is read by transformers and vLLM, that of our own network by Tempering.
"""


def add_export(commands: Any) -> None:
    """Adds `temper export` to the commands."""
    command = commands.add_parser(
        "export",
        help="a checkpoint as a plain folder with a model card",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("source", metavar="RUN|FOLDER", help="a run, RUN@STEP, or a policy's folder")
    add_new_folder(command)
    add_root(command)
    command.set_defaults(action=_export)


def _export(parsed: argparse.Namespace, rest: list[str]) -> int:
    from rl.evals.target import find_target
    from rl.export import export

    for line in export(find_target(parsed.source, parsed.root), parsed.out.expanduser()):
        print(line)
    return 0
