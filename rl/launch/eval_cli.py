"""`temper eval`: any checkpoint on any environment, effort and scaffold; `--compare` pairs two results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.launch.folders import add_root

_HELP = """\
Settings are key=value; what is not given is as the run was trained.
  temper eval my-run                                      its newest checkpoint, as it was trained
  temper eval my-run@40 env=[calc,sort] n=400 k=4         another checkpoint, several environments
  temper eval path/to/policy env=probe effort=[1,50,100] scaffold=[tools,chat] prices=prices.yaml
  temper eval path/to/hf-model engine=vllm env=calc       a model of transformers, with vLLM
  temper eval runs/my-run/evals/step-40-1a2b3c            go on with an interrupted one, or report it anew
  temper eval --compare FIRST SECOND                      two results, paired by task
"""
_INTERRUPTED = 130


class UsageError(ValueError):
    """A command line of `temper eval` that makes no sense: what to write."""


def add_eval(commands: Any) -> None:
    """Adds `temper eval` to the commands."""
    command = commands.add_parser(
        "eval",
        help="evaluate a checkpoint: temper eval RUN n=400 effort=[1,50,100]",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "target", nargs="?", metavar="CKPT|RUN", help="a run, RUN@STEP, or the folder of a policy"
    )
    command.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="n, k, env, effort, scaffold, ...")
    command.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare two results on the tasks they share",
    )
    command.add_argument("--force", action="store_true", help="compare also results of different samples")
    add_root(command)
    command.add_argument(
        "--console",
        choices=("auto", "rich", "plain"),
        default="auto",
        help="how progress is shown (default auto)",
    )
    command.set_defaults(action=_eval)


def _eval(parsed: argparse.Namespace, rest: list[str]) -> int:
    if parsed.compare is not None:
        if parsed.target is not None:
            raise UsageError(f"--compare takes two results and nothing else, not also {parsed.target}")
        from rl.evals.compare import compare

        print("\n".join(compare(*parsed.compare, force=parsed.force)))
        return 0
    if parsed.force:
        raise UsageError("--force belongs to --compare A B")
    if parsed.target is None:
        raise UsageError("say what to evaluate: temper eval RUN, or temper eval path/to/policy env=NAME")
    return _run(parsed.target, [*parsed.settings, *rest], parsed.root, parsed.console)


def _run(word: str, words: Sequence[str], root: Path, console: str) -> int:
    from rl.evals.run import begin, go_on, is_evaluation
    from rl.evals.settings import read_settings
    from rl.evals.target import find_target
    from rl.launch.train import terminate_as_interrupt
    from rl.watch.console import open_screen

    folder = Path(word).expanduser()
    if is_evaluation(folder):
        evaluation = go_on(folder, words)
    else:
        target = find_target(word, root)
        evaluation = begin(read_settings(words, target.config()), target)
    identity = evaluation.plan.cells[0].identity
    screen = open_screen(
        console, f"evaluation of {identity.model} (weights {identity.digest}) in {evaluation.folder}"
    )
    try:
        report = evaluation.run(screen, terminate_as_interrupt)
    except KeyboardInterrupt:
        report = None
    finally:
        screen.close()
    if report is None:
        print(f"interrupted; what had finished is kept. Continue with: temper eval {evaluation.folder}")
        return _INTERRUPTED
    print("\n".join(report.lines()))
    print(evaluation.folder)
    return 0 if report.complete and all(result.n_valid for result in report.results) else 1
