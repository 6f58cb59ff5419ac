"""Roots composed of layers, for the sandboxes of one node: toolkit over workspace over base.

A layer is verified and mounted once for all sandboxes of the node, and kept so while one uses it. What a
node that was killed left mounted is taken away by the next one (`reclaim`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox.errors import LayerError, PolicyError
from sandbox.layers.built_in import ensure_base
from sandbox.layers.mounts import mounts_below, unmount
from sandbox.layers.records import Kind, Layer
from sandbox.layers.store import IMAGE, TREE, LayerStore
from sandbox.types import SandboxSpec

MOUNTS, LAYERS = "mounts", "layers"
NO_PRELOAD = "skeleton/etc/ld.so.preload"
"""Below the folder of mounts: an empty file."""


@dataclass(slots=True)
class _Held:
    """A layer that sandboxes use: where its tree is, and the lock that keeps it."""

    tree: Path
    lock: int
    users: int = 0


@dataclass(frozen=True, slots=True)
class Composed:
    """The layers of one sandbox: their trees, the uppermost first, and the environment that they give."""

    layers: tuple[Layer, ...]
    trees: tuple[Path, ...]
    env: dict[str, str] = field(default_factory=dict[str, str])


def lacking() -> str:
    """Returns in one line why this machine composes no roots; empty when it does."""
    if os.geteuid() != 0:
        return "layers are composed by root alone (mounts): run the node as root"
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        return "this kernel has no overlay file system: modprobe overlay"
    return ""


def pinned(state_dir: Path, spec: SandboxSpec) -> SandboxSpec:
    """Returns a specification in which names of layers are digests, for the node of a state folder.

    Raises:
        LayerError: A layer is not there.
    """
    asked = spec.image or spec.workspace or spec.toolkit
    return Composer(state_dir).pinned(spec) if asked else spec


class Composer:
    """Holds the layers of a node's sandboxes. Its methods block; call them from a thread."""

    def __init__(self, state_dir: Path):
        self.store, self.mounts = LayerStore(state_dir / LAYERS), state_dir / MOUNTS
        self._held: dict[str, _Held] = {}
        self._verified: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def missing(self) -> str:
        """Returns in one line why no root can be composed here; empty when it can."""
        return lacking()

    def pinned(self, spec: SandboxSpec) -> SandboxSpec:
        """Returns a specification in which names of layers are digests, so that it stays what it is.

        Raises:
            LayerError: A layer is not there. (An image that is no layer may be one of the backend's.)
        """
        image = self.store.find(spec.image, Kind.BASE) if spec.image else None
        workspace = self.store.get(spec.workspace, Kind.WORKSPACE) if spec.workspace else None
        toolkit = self.store.get(spec.toolkit, Kind.TOOLKIT) if spec.toolkit else None
        return replace(
            spec,
            image=image.digest if image else spec.image or (workspace.over if workspace else ""),
            workspace=workspace.digest if workspace else "",
            toolkit=toolkit.digest if toolkit else "",
        )

    def acquire(self, spec: SandboxSpec, *, base: bool = True) -> Composed:
        """Returns the layers of a sandbox, verified and mounted; `release` gives them back.

        Args:
            spec: What is asked for.
            base: Whether a base is among them: that of the image, or the built-in one.

        Raises:
            PolicyError: This machine cannot compose.
            LayerError: A layer is not there or damaged; names it.
        """
        if problem := self.missing():
            raise PolicyError(problem)
        spec = self.pinned(spec)
        wanted: list[Layer] = []
        if base:
            wanted.append(self.store.get(spec.image, Kind.BASE) if spec.image else ensure_base(self.store))
        wanted += [self.store.get(digest) for digest in (spec.workspace, spec.toolkit) if digest]
        trees: list[Path] = []
        env: dict[str, str] = {}
        try:
            for layer in wanted:
                trees.insert(0, self._acquire(layer))
                env |= layer.config.env
        except BaseException:
            self.release(wanted[: len(trees)])
            raise
        return Composed(tuple(wanted), (*trees, self._skeleton()), env)

    def release(self, layers: list[Layer] | tuple[Layer, ...]) -> None:
        """Gives layers back; what nobody uses any more is unmounted and may be collected."""
        with self._lock:
            for layer in layers:
                held = self._held[layer.digest]
                held.users -= 1
                if not held.users:
                    self._drop(layer.digest)

    def _acquire(self, layer: Layer) -> Path:
        with self._lock:
            if (held := self._held.get(layer.digest)) is None:
                held = self._held[layer.digest] = self._open(layer)
            held.users += 1
            return held.tree

    def _open(self, layer: Layer) -> _Held:
        lock = self.store.hold(layer)
        try:
            place = self.store.place(layer.digest)
            info = (place / (IMAGE if layer.image else TREE)).stat()
            seen = (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
            if self._verified.get(layer.digest) != seen:
                self.store.verify(layer)
                self._verified[layer.digest] = seen
            if not layer.image:
                return _Held(place / TREE, lock)
            at = self.mounts / layer.digest.removeprefix("sha256:")[:24]
            at.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.store.mount(layer, at)
        except FileNotFoundError as error:
            os.close(lock)
            raise LayerError(f"layer {layer.digest} is damaged: {error}; build it again") from error
        except BaseException:
            os.close(lock)
            raise
        return _Held(at, lock)

    def _drop(self, digest: str) -> None:
        held = self._held.pop(digest)
        if self.mounts in held.tree.parents:
            with contextlib.suppress(OSError):
                unmount(held.tree)
                held.tree.rmdir()
        os.close(held.lock)

    def _skeleton(self) -> Path:
        """Returns the lowest folder of every root: where a sandbox mounts something, there is a place."""
        skeleton = self.mounts / "skeleton"
        if not skeleton.exists():
            draft = self.mounts / f"skeleton.{os.getpid()}.{threading.get_ident()}"
            for name, mode in _SKELETON:
                (draft / name).mkdir(parents=True)
                (draft / name).chmod(mode)
            (draft / "etc/ld.so.preload").touch()
            (draft / "etc/ld.so.preload").chmod(0o644)
            draft.chmod(0o755)
            with contextlib.suppress(OSError):  # another thread was faster
                draft.rename(skeleton)
            shutil.rmtree(draft, ignore_errors=True)
        return skeleton

    @contextlib.contextmanager
    def held(self, spec: SandboxSpec) -> Generator[Composed]:
        """Gives the layers of a sandbox for a block of code."""
        composed = self.acquire(spec)
        try:
            yield composed
        finally:
            self.release(composed.layers)

    def leave(self) -> None:
        """Unmounts all; there are no sandboxes any more."""
        with self._lock:
            for digest in list(self._held):
                self._drop(digest)
        self.reclaim()

    def reclaim(self) -> list[str]:
        """Unmounts and removes what a node of this folder left, which does not live; returns names."""
        left: list[str] = []
        for path in mounts_below(self.mounts):
            with contextlib.suppress(OSError):
                unmount(path)
                left.append(f"mount {path.name}")
        shutil.rmtree(self.mounts, ignore_errors=True)
        return left


_SKELETON = (
    ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("etc", 0o755), ("run", 0o755), ("run/tempering", 0o755),
    ("tmp", 0o1777), ("workspace", 0o1777),
)  # fmt: skip
