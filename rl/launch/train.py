"""`temper train`: from overrides to a finished run, its closing line and its picture."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil
import yaml

from rl.launch.compose import config_groups, load_config
from rl.launch.config import RunConfig
from rl.launch.resume import check_changes, with_stored_overrides
from rl.launch.run import RunFolder, RunState, as_plain, open_run

INTERRUPTED = 130


def train(overrides: Sequence[str], *, dry_run: bool = False, print_config: bool = False) -> int:
    """Runs the command and returns its exit code.

    Raises:
        ValueError: The configuration or the run's name cannot be used; the message says what to do.
    """
    if not overrides:
        names = ", ".join(config_groups()["experiment"])
        raise ValueError(f"say what to train: temper train experiment=NAME; there are: {names}")
    given = with_stored_overrides(overrides)
    config = load_config(given)
    if print_config:
        print(yaml.safe_dump(as_plain(config), sort_keys=False), end="")
        return 0
    if dry_run:
        from rl.launch.dry_run import plan

        print("\n".join(plan(config)))
        return 0
    return _run(given, config)


def _run(overrides: Sequence[str], config: RunConfig) -> int:
    from rl.launch.dry_run import first_tasks

    changes = check_changes(config)
    list(first_tasks(config))
    folder = open_run(config)
    folder.write_config(list(overrides), config)
    try:
        with terminate_as_interrupt():
            _drive(config, folder, changes)
    except KeyboardInterrupt:
        folder.close(RunState.INTERRUPTED)
        print(f"interrupted; continue with: temper train {_resume_words(config, folder)}")
        return INTERRUPTED
    except BaseException:
        folder.close(RunState.FAILED)
        print(f"failed; logs in {folder.logs}; continue with: temper train {_resume_words(config, folder)}")
        raise
    folder.close(RunState.FINISHED)
    return 0


def _drive(config: RunConfig, folder: RunFolder, changes: Sequence[str]) -> None:
    from rl.driver import drive
    from rl.watch.plot import draw
    from rl.watch.watch import open_watch

    with open_watch(folder, config) as watch:
        found = [f"found {folder.found}"] if folder.found else []
        for text in [*found, *changes, str(config.exactness)]:
            watch.note(text)
        outcome = asyncio.run(drive(config, folder, watch))
        watch.phase("draw the curves")
        picture = draw(folder.path)
    before, after = outcome.before["sampled"], outcome.after["sampled"]
    seconds = time.time() - psutil.Process().create_time()
    print(
        f"{config.env.title}: sft {before.score:.3f} sampled {after.score:.3f} "
        f"greedy {outcome.after['greedy'].score:.3f} tool_use {after.tool_use:.3f} steps {outcome.steps} "
        f"seconds {seconds:.0f}"
    )
    print(picture)
    print(folder.path)


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM, and SIGHUP when the terminal closes, end a run as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = [number for number, handler in before.items() if handler != signal.SIG_IGN]  # as under nohup
    for number in taken:
        signal.signal(number, interrupt)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script's `&`: SIGTERM would have no effect
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _resume_words(config: RunConfig, folder: RunFolder) -> str:
    root = "" if config.run.root == "runs" else f" run.root={config.run.root}"
    return f"run.name={folder.name}{root} resume=true"
