"""Limits of memory and processes by control groups (version 1), where this process may make them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandbox.types import Limits

_ROOT = Path("/sys/fs/cgroup")
_PARENT = "tempering"


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The control groups of one sandbox, by controller. Empty where the machine does not let us."""

    folders: dict[str, Path]

    @classmethod
    def create(cls, name: str, limits: Limits) -> Cgroup:
        """Makes groups with the limits of `limits`; a controller that is not writable is left out."""
        settings = {
            "memory": {
                "memory.limit_in_bytes": limits.memory_bytes,
                "memory.memsw.limit_in_bytes": limits.memory_bytes,
            },
            "pids": {"pids.max": limits.pids},
            "cpu": {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": int(limits.cpus * 100_000)},
        }
        folders: dict[str, Path] = {}
        for controller, values in settings.items():
            folder = _ROOT / controller / _PARENT / name
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            for file, value in values.items():
                if (folder / file).exists():
                    (folder / file).write_text(str(value))
            folders[controller] = folder
        return cls(folders)

    def wrap(self, argv: Iterable[str]) -> list[str]:
        """Returns a command that enters the groups and becomes `argv`, so that nothing runs outside them."""
        enter = "".join(f"echo $$ > {folder}/cgroup.procs; " for folder in self.folders.values())
        return ["/bin/sh", "-c", enter + 'exec "$@"', "sh", *argv]

    def oom_kills(self) -> int:
        """Returns how many processes the kernel killed for memory."""
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        with contextlib.suppress(OSError):
            for line in (folder / "memory.oom_control").read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Removes the groups; one that still holds a dying process stays for `sweep`."""
        for folder in self.folders.values():
            with contextlib.suppress(OSError):
                folder.rmdir()


def sweep() -> None:
    """Removes groups without processes that earlier nodes left."""
    for folder in _ROOT.glob(f"*/{_PARENT}/*"):
        if folder.is_dir() and not (folder / "cgroup.procs").read_text().strip():
            with contextlib.suppress(OSError):
                os.rmdir(folder)
