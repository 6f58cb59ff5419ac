"""A repository without a past: one commit of what is tracked, and nothing that leads elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.layers.scan_git import environment, repositories
from sandbox.layers.tree import walk

_WHO = {
    "GIT_AUTHOR_NAME": "task", "GIT_AUTHOR_EMAIL": "task@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "task", "GIT_COMMITTER_EMAIL": "task@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}  # fmt: skip
_SAFE = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*"]


def clean(root: Path) -> list[Path]:
    """Gives every repository of a tree one commit and no other past; returns where they are.

    What is tracked stays as it is in the folder. The result is proven by `git fsck --unreachable`.

    Raises:
        LayerError: One is no plain repository with a work tree, or git fails.
    """
    for found in walk(root):
        if found.kind != "dir" and found.path.rpartition("/")[2] == ".git":
            raise LayerError(f"/{found.path} points to a repository elsewhere (a submodule?): remove it")
    cleaned = repositories(root)
    for repository in sorted(cleaned, key=lambda path: len(path.parts), reverse=True):
        if repository.name != ".git":
            raise LayerError(f"{repository.relative_to(root)} is a repository without files: remove it")
        _start_over(repository)
    return [path.parent for path in cleaned]


def _start_over(repository: Path) -> None:
    work = repository.parent
    tracked = _git(["--git-dir", str(repository), "--work-tree", str(work), "ls-files", "-z"])
    head = (repository / "HEAD").read_text(errors="replace").strip()
    branch = head.rpartition("refs/heads/")[2] if head.startswith("ref: refs/heads/") else "main"
    there = [name for name in tracked.split(b"\0") if name and _exists(work, name)]
    with tempfile.TemporaryDirectory(dir=work.parent) as scratch:
        fresh = Path(scratch) / "git"
        _git(["init", "--quiet", "--bare", "--template=", f"--initial-branch={branch}", str(fresh)])
        here = ["--git-dir", str(fresh), "--work-tree", str(work)]
        _git([*here, "config", "core.bare", "false"])
        _git([*here, "add", "--force", "--pathspec-from-file=-", "--pathspec-file-nul"], b"\0".join(there))
        _git([*here, "-c", "core.logAllRefUpdates=false", "commit", "--quiet", "--allow-empty", "-m", "Task"])
        (fresh / "index").unlink(missing_ok=True)  # it has times and inodes, which are no content
        _git([*here, "read-tree", "HEAD"])
        for name in ("COMMIT_EDITMSG", "ORIG_HEAD"):
            (fresh / name).unlink(missing_ok=True)
        prove(fresh)
        shutil.rmtree(repository)
        fresh.rename(repository)


def prove(repository: Path) -> None:
    """Returns when a repository has one commit and nothing else to tell.

    Raises:
        LayerError: It has; says what.
    """
    here = ["--git-dir", str(repository)]
    unreachable = _git([*here, "fsck", "--unreachable", "--no-reflogs", "--full"]).strip()
    commits = int(_git([*here, "rev-list", "--all", "--count"]))
    counts = dict(line.split(b": ") for line in _git([*here, "count-objects", "-v"]).splitlines())
    refs = _git([*here, "for-each-ref", "--format=%(refname)"]).split()
    remotes = _git([*here, "remote"]).strip()
    if unreachable or commits != 1 or int(counts[b"packs"]) or len(refs) != 1 or remotes:
        raise LayerError(f"{repository} still tells of another history: {commits} commits, refs {refs!r}")
    if any(path.is_file() for path in (repository / "logs").rglob("*")):
        raise LayerError(f"{repository} still has reflogs")


def _exists(work: Path, name: bytes) -> bool:
    path = work / name.decode(errors="surrogateescape")
    return path.is_symlink() or path.is_file()


def _git(words: list[str], given: bytes = b"") -> bytes:
    done = subprocess.run(
        ["git", *_SAFE, *words], input=given, capture_output=True, env={**environment(), **_WHO}, check=False
    )
    if done.returncode:
        raise LayerError(f"git {words[-1]!r} failed: {done.stderr.decode(errors='replace').strip()[:500]}")
    return done.stdout
