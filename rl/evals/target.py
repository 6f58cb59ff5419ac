"""What is evaluated: a run's checkpoint or any policy folder, found, identified and pinned.

A run that goes on training removes old checkpoints. The one that is evaluated is linked into the folder of
the result first, so that it stays what it is until the evaluation is done, also over an interruption.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from model.hf.folder import is_hf_folder
from rl.checkpoint import CheckpointStore
from rl.launch.compose import load_config
from rl.launch.config import RunConfig
from rl.launch.run import read_driver
from rl.launch.runs import find_run

_POLICY = "policy"
_CONFIG = "config.json"


class TargetError(ValueError):
    """What is to be evaluated is not there: what was looked for, and what to give."""


@dataclass(frozen=True, slots=True)
class Target:
    """A policy on disk; `step` is that of its checkpoint (0: it is none), `run` its run, if any."""

    name: str
    policy: Path
    step: int
    run: Path | None

    def config(self) -> RunConfig:
        """The configuration of its run; that of no experiment for a folder outside of one."""
        if self.run is None:
            return load_config(["policy=hf"] if is_hf_folder(self.policy) else [])
        file = self.run / "resolved.yaml"
        try:
            return RunConfig.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, ValidationError) as error:
            raise TargetError(
                f"{file} is no configuration that this version reads ({_why(error)}); give the policy's "
                "folder, copied out of the run, with all settings"
            ) from error


def _why(error: OSError | yaml.YAMLError | ValidationError) -> str:
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])


def digest_of(policy: Path) -> str:
    """First 16 hex digits of the SHA-256 over a policy's files but provenance: which weights these are."""
    total = hashlib.sha256()
    for path in sorted(policy.iterdir()):
        if path.is_file() and path.name != "merge.json":
            with path.open("rb") as file:
                total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def find_target(word: str, root: Path) -> Target:
    """Finds `RUN` (its newest checkpoint), `RUN@STEP`, a checkpoint's folder or a policy's folder.

    Raises:
        TargetError: There is nothing to evaluate.
        NoSuchRunError: There is no such folder and no such run.
        CheckpointError: All checkpoints of the run are damaged.
    """
    path = Path(word).expanduser()
    if (path / _CONFIG).is_file() or (path / _POLICY / _CONFIG).is_file():
        return _of_folder(path.resolve())
    name, at, step = word.partition("@")
    if at and not step.isdigit():
        raise TargetError(f"{word}: after @ stands the step of a checkpoint, as in {name}@40")
    if path.exists() and read_driver(path) is None and not at:
        raise TargetError(
            f"{word} is neither a run's folder nor one with {_CONFIG}; give a run, RUN@STEP, or the folder "
            "of a policy"
        )
    return _of_run(find_run(name, root).resolve(), int(step) if at else None)


def _of_folder(path: Path) -> Target:
    policy = path if (path / _CONFIG).is_file() else path / _POLICY
    checkpoint = policy.parent
    step = re.fullmatch(r"step-(\d+)", checkpoint.name)
    run = checkpoint.parent.parent if step and read_driver(checkpoint.parent.parent) is not None else None
    name = f"{run.name}@{step[1]}" if run is not None and step else path.name
    return Target(name, policy, int(step[1]) if step else 0, run)


def _of_run(run: Path, step: int | None) -> Target:
    store = CheckpointStore(run / "checkpoints")
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        there = f"it has steps {', '.join(map(str, steps))}" if steps else "it has no checkpoint yet"
        raise TargetError(
            f"run {run.name} has no checkpoint{'' if step is None else f' of step {step}'}; {there}"
        )
    checkpoint = store.latest(step)
    assert checkpoint is not None
    return Target(f"{run.name}@{checkpoint.step}", checkpoint.path / _POLICY, checkpoint.step, run)


def pin(target: Target, folder: Path) -> None:
    """Puts the files of `target` into `folder`: linked, or copied where links are not possible.

    Raises:
        TargetError: The checkpoint was removed meanwhile, or there is no room for a copy.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(target.policy, partial, copy_function=_link)
    except (FileNotFoundError, shutil.Error) as error:
        shutil.rmtree(partial, ignore_errors=True)
        if (target.policy / _CONFIG).is_file():
            raise TargetError(
                f"{target.name} cannot be copied into {folder.parent} ({error}); make room, or give an out= "
                "on the disk of the checkpoint, where it is linked"
            ) from error
        raise TargetError(
            f"{target.name} was removed while it was being linked ({error}); ask for it again: a run's "
            "newest "
            "checkpoint is taken, RUN@STEP needs checkpoint.keep or checkpoint.keep_every"
        ) from error
    partial.replace(folder)


def _link(source: str, destination: str) -> str:
    try:
        os.link(source, destination)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, destination)
    return destination
