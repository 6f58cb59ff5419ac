"""The command `temper`. It reads the command line; everything else is done by the modules beside it.

Exit codes: 0 done, 1 it failed, 2 what was asked for makes no sense (with the reason, and no traceback), 130
interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rl.launch.eval_cli import add_eval
from rl.launch.export_cli import add_export
from rl.launch.folders import add_root
from rl.launch.merge_cli import add_merge
from rl.launch.roots import check_roots
from rl.launch.sandbox_cli import add_sandbox
from rl.launch.serve_cli import add_serve

_WELCOME = """\
First steps:
  temper doctor                              what this machine offers, and what is missing
  temper train experiment=calc               train a small agent to use a calculator (minutes, no GPU)
  temper train experiment=calc --dry-run     what that would do
  temper eval RUN effort=[1,50,100]          how good a checkpoint is, and what that costs
  temper run list                            your runs
  temper serve RUN                           its policy, for OpenAI's clients
  temper env init my-task                    a new environment of your own, as one file
"""
_TRAIN = """\
Every setting is key=value. Groups of settings are chosen by name, as in model=nano or sandbox=docker.
  temper train experiment=calc trainer.steps=300 run.name=long
  temper train run.name=long resume=true     continue it
  temper train experiment=calc --print-config  all keys with their values
"""


_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a disk answers when the fault is the machine's and not ours."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors name the nearest right word."""

    def error(self, message: str) -> NoReturn:
        """Ends with code 2 and one line that says what to do."""
        found = re.match(r"argument .*: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if found:
            names = [name.strip(" '") for name in found[2].split(",")]
            near = difflib.get_close_matches(found[1], names, n=1, cutoff=0.4)
            hint = f"did you mean `{near[0]}`? " if near else ""
            message = f"{self.prog} {found[1]}: there is no such command; {hint}There are {', '.join(names)}"
        self.exit(2, f"{message}\n`{self.prog} --help` explains\n")


def parser() -> Parser:
    """Returns the parser of the whole command."""
    top = Parser(
        prog="temper",
        description="Post-trains agentic language models: imitate, then reinforce with tools in sandboxes.",
        epilog=_WELCOME,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"temper {_version()}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    _add_train(commands)
    add_eval(commands)
    add_merge(commands)
    add_export(commands)
    _add_run(commands)
    _add_env(commands)
    add_sandbox(commands, Parser)
    add_serve(commands)
    doctor = commands.add_parser(
        "doctor", help="look at this machine: what is there, what is missing, how to get it"
    )
    doctor.set_defaults(action=_doctor)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        parser().print_help()
        return 0
    parsed, rest = parse(words)
    try:
        check_roots()
        return parsed.action(parsed, rest)
    except (ValueError, ImportError, ConnectionError, EOFError) as error:
        print(error or "the input ended", file=sys.stderr)
        return 2
    except RuntimeError as raised:
        error = getattr(raised, "cause", raised)  # one of an actor carries what was raised there
        if not type(error).__module__.startswith(("sandbox.", "rl.")):
            raise
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"{where}{error.strerror}; make room, or give a place that can be written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads a command line; settings (of `train`, say) may stand before and after the options."""
    top = parser()
    parsed, rest = top.parse_known_args(words)
    wrong = [
        word for word in rest if word.startswith("-") or parsed.command not in ("train", "eval", "serve")
    ]
    if wrong:
        top.error(f"temper {parsed.command}: {' '.join(wrong)} is not understood")
    return parsed, rest


def _add_train(commands: argparse._SubParsersAction[Parser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a policy: temper train experiment=calc",
        epilog=_TRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings; experiment=NAME chooses many at once"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="say what would be done, load one task, start nothing"
    )
    train.add_argument("--print-config", action="store_true", help="print every key with its value")
    train.set_defaults(action=_train)


def _add_run(commands: argparse._SubParsersAction[Parser]) -> None:
    run = commands.add_parser("run", help="look at runs").add_subparsers(
        dest="what", metavar="COMMAND", required=True, parser_class=Parser
    )
    listing = run.add_parser("list", help="all runs, the newest first")
    listing.set_defaults(action=lambda p, _: _print(_runs().list_runs(p.root)))
    show = run.add_parser("show", help="how a run stands; with --step or --failed, its samples")
    show.add_argument("name", help="a run's name or folder")
    show.add_argument("--samples", action="store_true", help="the samples of the last step")
    show.add_argument("--step", type=int, help="the samples of this training step")
    show.add_argument("--failed", action="store_true", help="the samples that failed, with their errors")
    show.add_argument(
        "--sort", choices=("group", "reward", "length"), default="group", help="order of samples"
    )
    show.add_argument("--limit", type=int, default=10, help="how many samples (default 10)")
    show.set_defaults(action=_show)
    for command in (listing, show):
        add_root(command)


def _add_env(commands: argparse._SubParsersAction[Parser]) -> None:
    env = commands.add_parser("env", help="look at environments, check, make and play them").add_subparsers(
        dest="what", metavar="COMMAND", required=True, parser_class=Parser
    )
    listing = env.add_parser("list", help="all environments")
    listing.set_defaults(action=lambda p, _: _print(_env().list_lines()))
    check = env.add_parser("check", help="prove that an environment is sound: gold scores 1, garbage 0, ...")
    check.add_argument("name", help="an environment's name, or path/to/file.py")
    check.add_argument("--tasks", type=int, default=50, help="tasks of each split to look at (default 50)")
    check.set_defaults(action=lambda p, _: _env().check(p.name, p.tasks))
    init = env.add_parser("init", help="write a new environment as one file")
    init.add_argument("name", help="its name, as in my-task or team/my-task")
    init.add_argument("--folder", type=Path, default=Path(), help="where to write it (default here)")
    init.set_defaults(action=_init)
    play = env.add_parser("play", help="play one episode yourself, in place of a policy")
    play.add_argument("name", help="an environment's name, or path/to/file.py")
    play.add_argument("--split", default="train", help="default train")
    play.add_argument("--task", type=int, default=0, help="number of the task, from 0")
    play.add_argument("--demonstration", action="store_true", help="let a demonstration speak instead of you")
    play.add_argument(
        "--sandbox",
        choices=("auto", "docker", "bubblewrap", "gvisor", "function"),
        default="auto",
        help="default auto",
    )
    play.set_defaults(action=_play)


def _train(parsed: argparse.Namespace, rest: list[str]) -> int:
    from rl.launch.train import train

    return train([*parsed.settings, *rest], dry_run=parsed.dry_run, print_config=parsed.print_config)


def _show(parsed: argparse.Namespace, rest: list[str]) -> int:
    runs = _runs()
    path = runs.find_run(parsed.name, parsed.root)
    if not (parsed.samples or parsed.failed or parsed.step is not None):
        return _print(runs.show_run(path))
    runs.show_samples(path, parsed.step, failed=parsed.failed, order=parsed.sort, limit=parsed.limit)
    return 0


def _init(parsed: argparse.Namespace, rest: list[str]) -> int:
    path = _env().init(parsed.name, parsed.folder)
    return _print([f"wrote {path}", f"next: temper env check {path}", f"then: temper train env.name={path}"])


def _play(parsed: argparse.Namespace, rest: list[str]) -> int:
    _env().play_once(
        parsed.name,
        split=parsed.split,
        number=parsed.task,
        demonstration=parsed.demonstration,
        backend=parsed.sandbox,
    )
    return 0


def _doctor(parsed: argparse.Namespace, rest: list[str]) -> int:
    from rl.launch.doctor import examine, report

    findings = examine()
    _print(list(report(findings)))
    return 0 if all(finding.ok or not finding.needed for finding in findings) else 1


def _runs():
    from rl.launch import runs

    return runs


def _env():
    from rl.launch import env_tools

    return env_tools


def _print(lines: Sequence[str]) -> int:
    print("\n".join(lines))
    return 0


def _version() -> str:
    try:
        return importlib.metadata.version("tempering")
    except importlib.metadata.PackageNotFoundError:
        return "from source"


if __name__ == "__main__":
    sys.exit(main())
