"""Layers in containers: the root as an image, imported once, and `/workspace` as an overlay of ours.

The engine cannot take layers of others, so what lies outside `/workspace` becomes an image, one for each
combination of layers; as most workspaces have nothing there, that is one for each base. Containers have their
root read-only, so only `/workspace` is written to, within the limits of a tmpfs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors

from sandbox.backends.base import COMMAND_UID
from sandbox.errors import InfrastructureError, PolicyError
from sandbox.images import AGENT_FOLDER
from sandbox.layers.built_in import Control, ensure_control
from sandbox.layers.compose import NO_PRELOAD, Composed, Composer
from sandbox.layers.mounts import NO_DEV, NO_SUID, mount, unmount
from sandbox.layers.records import Kind
from sandbox.layers.tree import walk
from sandbox.layers.writable import Writable, overlay, tmpfs
from sandbox.types import Limits, SandboxSpec

REPOSITORY, LABEL = "tempering-layers", "tempering.layers"
_WORKSPACE, _PLACE = "workspace", "container-"
_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True, slots=True)
class Layered:
    """What a container of layers is made of: its image, mounts, interpreter and environment."""

    image: str
    volumes: dict[str, dict[str, str]]
    interpreter: list[str]
    env: dict[str, str]
    writable: Writable | None
    spec: SandboxSpec
    release: Callable[[], None]


class ContainerRoots:
    """Makes what the containers of one node need of its layers. Its methods block."""

    def __init__(self, composer: Composer, toolkit: Path):
        self._composer, self._toolkit = composer, toolkit
        self._importing = threading.Lock()

    def wanted(self, spec: SandboxSpec) -> bool:
        """Whether a specification asks for layers, and not just for an image of the engine."""
        if spec.workspace or spec.toolkit:
            return True
        return bool(spec.image) and self._composer.store.find(spec.image, Kind.BASE) is not None

    def prepare(self, client: Any, box_id: str, spec: SandboxSpec, built_in: str) -> Layered:
        """Returns what a container needs; `release` takes it back when the container is gone.

        Args:
            client: Of the engine.
            box_id: Of the sandbox.
            spec: What is asked for.
            built_in: The built-in image, for a workspace that was built over no base.

        Raises:
            PolicyError: An image of the engine and layers with files outside `/workspace` do not go together.
            LayerError: A layer is not there or damaged.
            InfrastructureError: The engine or the kernel does not take it.
        """
        spec = self._composer.pinned(spec)  # a name that is none is told at once
        control = ensure_control(self._toolkit, _PYTHON)
        layered = bool(spec.image) and self._composer.store.find(spec.image) is not None
        composed = self._composer.acquire(spec, base=layered)
        place = self._place(box_id)

        def release() -> None:
            self.unmount(box_id)
            self._composer.release(composed.layers)

        try:
            image = self._image(client, composed) if layered else spec.image or built_in
            if not layered and any(_outside(tree) for tree in composed.trees[:-1]):
                raise PolicyError(
                    f"a layer has files outside /workspace, and {image!r} is no base layer: "
                    "build it as one (temper sandbox layer build --kind base, FROM the image)"
                )
            writable = self._workspace(place, composed, spec.limits)
        except BaseException:
            release()
            raise
        volumes = _volumes(control, self._composer.mounts / NO_PRELOAD)
        if writable is not None:
            volumes[str(place / "root")] = {"bind": f"/{_WORKSPACE}", "mode": "rw"}
        command = control.command(AGENT_FOLDER)
        return Layered(image, volumes, command, composed.env, writable, spec, release)

    def places(self) -> list[str]:
        """Returns the sandboxes for which a workspace is mounted."""
        return [path.name.removeprefix(_PLACE) for path in self._composer.mounts.glob(f"{_PLACE}*")]

    def unmount(self, box_id: str) -> None:
        """Takes the workspace of a container away."""
        place = self._place(box_id)
        for mounted in (place / "root", place):
            with contextlib.suppress(OSError):
                unmount(mounted)
        with contextlib.suppress(OSError):
            place.rmdir()

    def _place(self, box_id: str) -> Path:
        return self._composer.mounts / f"{_PLACE}{box_id}"

    def _workspace(self, place: Path, composed: Composed, limits: Limits) -> Writable | None:
        trees = tuple(tree / _WORKSPACE for tree in composed.trees if _filled(tree / _WORKSPACE))
        if not trees:
            return None
        try:
            place.mkdir(mode=0o700, parents=True)
            mount(b"tmpfs", os.fsencode(place), b"tmpfs", NO_SUID | NO_DEV, tmpfs(limits, 0o755))
            for name in ("upper", "work", "root"):
                (place / name).mkdir()
            (place / "upper").chmod(0o1777)
            os.chown(place / "upper", COMMAND_UID, COMMAND_UID)
            overlay(trees, place)
        except OSError as error:
            raise InfrastructureError(f"the workspace of a container was not mounted: {error}") from error
        return Writable(place / "upper", trees, _WORKSPACE)

    def _image(self, client: Any, composed: Composed) -> str:
        """Returns the image of what layers have outside `/workspace`; imports it when it is not there."""
        layers = zip(composed.layers, composed.trees[-2::-1], strict=True)
        parts = [(layer, tree) for layer, tree in layers if layer.kind is Kind.BASE or _outside(tree)]
        digests = ",".join(layer.digest for layer, _ in parts)
        tag = f"{self._owner()}-{hashlib.sha256(digests.encode()).hexdigest()[:24]}"
        with self._importing:
            try:
                client.images.get(f"{REPOSITORY}:{tag}")
            except docker.errors.ImageNotFound:
                trees = (*(tree for _, tree in reversed(parts)), composed.trees[-1])
                self._import(client, trees, tag, digests)
        return f"{REPOSITORY}:{tag}"

    def _import(self, client: Any, trees: tuple[Path, ...], tag: str, digests: str) -> None:
        with self._composer.store.draft() as scratch:
            (scratch / "root").mkdir()
            options = "lowerdir=" + ":".join(map(str, trees))
            mount(b"overlay", os.fsencode(scratch / "root"), b"overlay", NO_SUID | NO_DEV, options.encode())
            command = ["tar", "--numeric-owner", "-C", scratch / "root", "-cf", scratch / "tar", "."]
            done = subprocess.run(command, capture_output=True, check=False)
            if done.returncode:
                raise InfrastructureError(f"tar failed: {done.stderr.decode(errors='replace').strip()[:500]}")
            client.api.import_image_from_file(
                str(scratch / "tar"), repository=REPOSITORY, tag=tag, changes=[f"LABEL {LABEL}={digests}"]
            )

    def reclaim(self, client: Any) -> list[str]:
        """Removes the images of this node's folder whose layers are gone, and returns their names."""
        removed: list[str] = []
        for image in client.images.list(name=REPOSITORY):
            digests = str(image.labels.get(LABEL, "")).split(",")
            if all(self._composer.store.place(digest).exists() for digest in digests):
                continue
            for name in [name for name in image.tags if name.startswith(f"{REPOSITORY}:{self._owner()}-")]:
                with contextlib.suppress(docker.errors.APIError):  # a container of another node has it
                    client.images.remove(name)
                    removed.append(name)
        return removed

    def _owner(self) -> str:
        return hashlib.sha256(str(self._composer.mounts).encode()).hexdigest()[:8]


def _volumes(control: Control, preload: Path) -> dict[str, dict[str, str]]:
    library = f"{AGENT_FOLDER}/lib/{control.library.name}"
    return {
        str(control.folder): {"bind": AGENT_FOLDER, "mode": "ro"},
        str(control.library): {"bind": library, "mode": "ro"},
        str(preload): {"bind": "/etc/ld.so.preload", "mode": "ro"},
    }


def _filled(folder: Path) -> bool:
    return not folder.is_symlink() and folder.is_dir() and any(folder.iterdir())


def _outside(tree: Path) -> bool:
    """Whether a layer has more than folders outside `/workspace`."""
    return any(
        found.kind != "dir" or found.opaque
        for found in walk(tree)
        if not found.path.startswith(f"{_WORKSPACE}/")
    )
