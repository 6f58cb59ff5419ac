"""A repository without a past: what an agent gets must not hold the commit that solves its task.

Fixes have been found in later commits, in tags and packs, in the log of references and in objects that
nothing refers to. So nothing of the old repository is kept: a new one is made of the files.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from sandbox.errors import BackendMissingError, InfrastructureError

_WHO = {
    name: value
    for role in ("AUTHOR", "COMMITTER")
    for name, value in (
        (f"GIT_{role}_NAME", "task"), (f"GIT_{role}_EMAIL", "task@localhost"),
        (f"GIT_{role}_DATE", "2000-01-01T00:00:00Z"),
    )
}  # fmt: skip


def seal(folder: Path) -> None:
    """Replaces the repository of a local folder, and those of its submodules, by one with one commit.

    Raises:
        BackendMissingError: There is no git on this machine.
        InfrastructureError: git failed, or something of a past is left.
    """
    if shutil.which("git") is None:
        raise BackendMissingError("sealing a repository needs git (apt-get install git)")
    for path in [*folder.rglob(".git")]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    _git(folder, "init", "-q", "--template=", "-b", "main")
    _git(folder, "add", "-A", "-f")
    _git(folder, "commit", "-q", "--allow-empty", "--no-verify", "-m", "task")
    shutil.rmtree(folder / ".git/logs", ignore_errors=True)
    if past := history(folder):
        raise InfrastructureError(f"{folder} still has a past: {past[0]}")


def history(folder: Path) -> list[str]:
    """Returns what a repository holds beyond one commit: commits, tags, remotes, logs, unreachable objects.

    Raises:
        InfrastructureError: git failed.
    """
    found = [f"object {line}" for line in _git(folder, "fsck", "--unreachable", "--no-reflogs", "--full")]
    commits = _git(folder, "rev-list", "--all")
    found += [f"commit {line}" for line in commits[1:]]
    found += [f"reference {line}" for line in _git(folder, "for-each-ref", "--format=%(refname)")[1:]]
    found += [f"remote {line}" for line in _git(folder, "remote")]
    found += [f"log {path}" for path in (folder / ".git/logs").rglob("*") if path.is_file()]
    found += [f"file {name}" for name in ("ORIG_HEAD", "FETCH_HEAD") if (folder / ".git" / name).exists()]
    return found


def _git(folder: Path, *words: str) -> list[str]:
    env = {"PATH": os.environ.get("PATH", ""), "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **_WHO}
    options = ["-c", f"safe.directory={folder}", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0"]
    done = subprocess.run(
        ["git", *options, *words], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise InfrastructureError(f"git {words[0]} in {folder} failed: {done.stderr.strip()[:300]}")
    return done.stdout.splitlines()
