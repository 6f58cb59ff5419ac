"""Run checkpoints: everything at one frontier, written whole or not at all.

A checkpoint is a folder `step-<n>`: the policy in the published layout, the tensors of the trainer's state as
safetensors, and the rest (schedule, data cursor, queue, in-flight set, step axes) as JSON. It is written to a
temporary folder, every file is synced, a manifest of hashes is written last, and the folder is renamed. One
that cannot be written leaves those before it as they are. A folder that is damaged is passed over for the one
before it, and the caller is told.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model.durable import sync

_MANIFEST = "manifest.json"
_FORMAT = 1


class CheckpointError(RuntimeError):
    """No usable checkpoint, or one that cannot be written: what was found and what to do."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk. `skipped` names newer folders that were damaged, with the reason."""

    step: int
    path: Path
    skipped: tuple[str, ...] = ()

    def load_state(self) -> dict[str, Any]:
        """Returns the state that `CheckpointStore.save` was given, tensors included."""
        tensors = load_file(self.path / "state.safetensors")
        return _restore(json.loads((self.path / "state.json").read_text()), tensors)


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """The checkpoints of one run; `keep` newest ones stay, and every `keep_every`-th step (0: none)."""

    folder: Path
    keep: int = 2
    keep_every: int = 0

    def save(
        self, step: int, state: Mapping[str, Any], write_policy: Callable[[Path], None] | None = None
    ) -> Checkpoint:
        """Writes `state` (JSON values and tensors, nested) and what `write_policy` puts into `policy/`.

        Raises:
            CheckpointError: It cannot be written; those that there are stay as they were.
        """
        partial = self.folder / f".step-{step}.partial"
        try:
            self._clear()
            partial.mkdir()
            _write(partial, step, state, write_policy)
            final = self._move(partial, step)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder} ({error}): make room or "
                f"make the folder writable, then resume the run; {self._standing()}"
            ) from error
        self._prune(step)
        return Checkpoint(step, final)

    def _clear(self) -> None:
        """Makes the folder, durably; removes what a killed attempt had begun."""
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            sync(self.folder.parent)
        for stale in self.folder.glob(".step-*"):
            shutil.rmtree(stale)

    def _move(self, partial: Path, step: int) -> Path:
        """Gives a whole folder its name; an older one of this name stays until then."""
        final, old = self.folder / f"step-{step}", self.folder / f".step-{step}.old"
        if final.exists():
            final.rename(old)
        partial.rename(final)
        sync(self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def _standing(self) -> str:
        steps = self.steps()
        return f"the newest one is that of step {steps[-1]}" if steps else "there is none yet"

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; a folder may still turn out damaged."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def latest(self, at: int | None = None) -> Checkpoint | None:
        """Returns the newest complete checkpoint (or the one of step `at`), or None when there is no folder.

        Raises:
            CheckpointError: There are folders, and all of them are damaged.
        """
        skipped: list[str] = []
        for step in reversed(self.steps() if at is None else [at]):
            path = self.folder / f"step-{step}"
            if (problem := verify(path)) is None:
                return Checkpoint(step, path, tuple(skipped))
            skipped.append(f"{path.name}: {problem}")
        if skipped:
            raise CheckpointError(
                f"no usable checkpoint in {self.folder} ({'; '.join(skipped)}); "
                "start anew with run.clean=true or restore the folder from a copy"
            )
        return None

    def _prune(self, newest: int) -> None:
        steps = [step for step in self.steps() if step <= newest]
        for step in steps[: -self.keep]:
            if not (self.keep_every and step % self.keep_every == 0):
                shutil.rmtree(self.folder / f"step-{step}")


def verify(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint folder, or None when it is whole."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        files: dict[str, str] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"manifest unreadable ({type(error).__name__})"
    if manifest.get("format") != _FORMAT:
        return f"format {manifest.get('format')} is not {_FORMAT}, the one this version reads"
    for name, digest in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _digest(path / name) != digest:
            return f"{name} is damaged"
    return None


def _write(
    folder: Path, step: int, state: Mapping[str, Any], write_policy: Callable[[Path], None] | None
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    (folder / "state.json").write_text(json.dumps(_flatten(state, tensors, ""), allow_nan=True))
    save_file(tensors, folder / "state.safetensors")
    if write_policy is not None:
        write_policy(folder / "policy")
    _seal(folder, step)


def _seal(folder: Path, step: int) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sync(path)
    hashes = {str(path.relative_to(folder)): _digest(path) for path in files}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "step": step, "files": hashes}, indent=1))
    sync(folder / _MANIFEST)
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        sync(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flatten(value: Any, tensors: dict[str, torch.Tensor], path: str) -> Any:
    """Replaces tensors by references, so that the rest is JSON. Keys keep their type (int or str)."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().contiguous().cpu().clone()
        return {"$tensor": path}
    if isinstance(value, Mapping):
        items = [[key, _flatten(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        return {"$dict": items}
    if isinstance(value, (list, tuple)):
        return [_flatten(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a checkpoint holds JSON values and tensors, not {type(value).__name__} (at {path!r})")


def _restore(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return {key: _restore(item, tensors) for key, item in value["$dict"]}
    if isinstance(value, list):
        return [_restore(item, tensors) for item in value]
    return value
