"""`temper merge`: the weighted average of checkpoints of one model, trained on different scaffolds, say."""

from __future__ import annotations

import argparse
from typing import Any

from rl.launch.folders import add_new_folder, add_root

_HELP = """\
  temper merge run-a=0.6 run-b@40=0.4 --out merged        newest checkpoint of one run, step 40 of another
  temper merge path/to/policy=0.5 other/policy=0.5 --out merged
The result is a policy's folder: temper eval merged env=calc, or temper train ... model.path=merged.
"""

_UNLIKE = 0.5
"""A cosine of weights that runs from one start stay far above."""


def add_merge(commands: Any) -> None:
    """Adds `temper merge` to the commands."""
    command = commands.add_parser(
        "merge",
        help="average checkpoints: temper merge A=0.6 B=0.4 --out DIR",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "sources", nargs="+", metavar="CKPT|RUN=WEIGHT", help="what to average; weights add up to 1"
    )
    add_new_folder(command)
    add_root(command)
    command.set_defaults(action=_merge)


def _merge(parsed: argparse.Namespace, rest: list[str]) -> int:
    from model.merge import MergeError, Source, merge_checkpoints
    from rl.evals.target import find_target

    sources: list[Source] = []
    for word in parsed.sources:
        name, equals, weight = word.rpartition("=")
        try:
            value = float(weight)
        except ValueError:
            equals = ""
            value = 0.0
        if not equals or not name:
            raise MergeError(f"{word}: give each checkpoint with its weight, as in my-run=0.6")
        target = find_target(name, parsed.root)
        sources.append(Source(target.name, target.policy, value))
    merged = merge_checkpoints(sources, parsed.out.expanduser())
    print(f"averaged {merged.tensors} tensors of {', '.join(f'{s.name} ({s.weight:g})' for s in sources)}")
    for name, cosine in merged.likeness.items():
        print(f"likeness of {name} and {sources[0].name}: {cosine:.3f}")
        if cosine < _UNLIKE:
            print(
                f"warning: {name} and {sources[0].name} did not begin as one policy, and the average of such "
                "policies can do nothing: merge runs with one warm start (model.path)"
            )
    print(parsed.out)
    return 0
