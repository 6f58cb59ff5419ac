"""Building layers: from a folder, from a Dockerfile, from an archive of a root; no registry anywhere.

A Dockerfile is built in a root of its own: the layer of its FROM with a writable upper on a file of limited
size. A base keeps the whole root; a workspace or toolkit keeps what was added, and knows over which base.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sandbox.errors import LayerError, SandboxError
from sandbox.layers import steps
from sandbox.layers.built_in import NAME, ensure_base, ensure_control
from sandbox.layers.context import LIMITS, Context
from sandbox.layers.docker_image import export_image
from sandbox.layers.dockerfile import Step, pairs_of, parse, words_of
from sandbox.layers.inside import inside
from sandbox.layers.mounts import NO_DEV, NO_SUID, mount, unmount
from sandbox.layers.records import Config, Kind, Layer
from sandbox.layers.store import LayerStore
from sandbox.layers.tars import unpack
from sandbox.layers.tree import write
from sandbox.layers.writable import disk, overlay
from sandbox.trees import read_tree
from sandbox.types import Limits

_AT = {Kind.BASE: "/", Kind.WORKSPACE: "/workspace", Kind.TOOLKIT: "/"}
ROOM = 4 << 30
_INODES, _BYTES_AN_INODE = 500_000, 8192


@dataclass(frozen=True, slots=True)
class Draft:
    """What was built, before it is published: a tree with its configuration, and what it was built over."""

    tree: Path
    config: Config
    over: str = ""


@contextlib.contextmanager
def from_folder(store: LayerStore, folder: Path, kind: Kind, at: str = "") -> Generator[Draft]:
    """Gives a draft of a folder's files, at the root for a base and at `/workspace` for a workspace.

    Raises:
        LayerError: There is no such folder, or it has what no layer has.
    """
    if not folder.is_dir():
        raise LayerError(f"{folder} is no folder")
    with store.draft() as scratch:
        place = inside(scratch, at or _AT[kind])
        (scratch / "tree" / place).mkdir(parents=True)
        skip = ("dev", "proc", "sys") if not place else ()
        items = read_tree(folder, LIMITS, links_out=True, skip=skip)
        try:
            write(items, scratch / "tree" / place)
        except (SandboxError, OSError) as error:
            raise LayerError(f"{folder} cannot become a layer: {error}") from error
        yield Draft(scratch / "tree", Config())


@contextlib.contextmanager
def from_archive(store: LayerStore, archive: Path) -> Generator[Draft]:
    """Gives a draft of what `docker export` or `docker save` wrote.

    Raises:
        LayerError: It is not that, or leads out of its place.
    """
    with store.draft() as scratch, archive.open("rb") as file:
        (scratch / "tree").mkdir()
        yield Draft(scratch / "tree", unpack(file, scratch / "tree"))


@contextlib.contextmanager
def from_dockerfile(
    store: LayerStore,
    dockerfile: Path,
    kind: Kind,
    *,
    context: Path | None = None,
    arguments: Mapping[str, str] | None = None,
    network: bool = False,
    room: int = ROOM,
    say: Callable[[str], None] = lambda text: None,
) -> Generator[Draft]:
    """Gives a draft of what a Dockerfile makes.

    Args:
        store: Where base layers are found, and the draft lies.
        dockerfile: The file.
        kind: What is wanted: all of the root, or what was added to it.
        context: The folder that COPY and ADD read; by default the file's.
        arguments: Values of its ARGs.
        network: Whether RUN has this machine's network.
        room: How many bytes it may write.
        say: Hears of each step.

    Raises:
        LayerError: An instruction is not offered or fails; names its line.
    """
    found = parse(dockerfile.read_text())
    mounts = any(step.name == "RUN" or (step.name == "FROM" and step.rest != "scratch") for step in found)
    if mounts and os.geteuid() != 0:
        raise LayerError("RUN, and FROM anything but scratch, need root (mounts): run the build as root")
    building = _Building(store, Context(context or dockerfile.parent), dict(arguments or {}), network, say)
    for step in found[: _index(found)]:
        building.argument(step)
    base = building.base(found[_index(found)])
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(store.draft())
        place = stack.enter_context(_root(store, scratch, base, room))
        building.begin(base, place)
        for step in found[_index(found) + 1 :]:
            say(f"line {step.line}: {step.name} {step.rest}"[:200])
            building.perform(step)
        config = Config(building.env, building.workdir, building.user)
        if kind is Kind.BASE or base is None:
            yield Draft(place / "root", config)
        else:
            with contextlib.suppress(OSError):
                unmount(place / "root")
            yield Draft(place / "upper", config, base.digest)


def _index(found: list[Step]) -> int:
    return next(index for index, step in enumerate(found) if step.name == "FROM")


@contextlib.contextmanager
def _root(store: LayerStore, scratch: Path, base: Layer | None, room: int) -> Generator[Path]:
    """Gives a folder with `root`: empty, or the base with an `upper` over it; of limited size for root."""
    place = scratch / "place"
    place.mkdir()
    with contextlib.ExitStack() as stack:
        if os.geteuid() == 0:
            limits = Limits(disk_bytes=room, tmpfs_inodes=min(_INODES, room // _BYTES_AN_INODE))
            device = stack.enter_context(disk(scratch, limits))
            mount(device.encode(), os.fsencode(place), b"ext4", NO_SUID | NO_DEV)
            stack.callback(unmount, place)
        for name in ("root", "upper", "work"):
            (place / name).mkdir()
            (place / name).chmod(0o755)
        if base is not None:
            overlay((stack.enter_context(store.opened(base)),), place)
            stack.callback(_unmount_if, place / "root")
        yield place


def _unmount_if(path: Path) -> None:
    with contextlib.suppress(OSError):
        unmount(path)


@dataclass(slots=True)
class _Building:
    """A build under way: where it is, and what its instructions have set so far."""

    store: LayerStore
    context: Context
    given: dict[str, str]
    network: bool
    say: Callable[[str], None]
    root: Path = Path()
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    env: dict[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str = ""

    @property
    def values(self) -> dict[str, str]:
        return {"PATH": steps.PATH, **self.arguments, **self.env}

    def argument(self, step: Step) -> None:
        name, sign, value = step.rest.partition("=")
        words = words_of(replace(step, rest=value), self.values) if sign else []
        self.arguments[name] = self.given.get(name, words[0] if words else "")

    def base(self, step: Step) -> Layer | None:
        words = words_of(step, self.values)
        if len(words) != 1:
            raise step.error("stages (AS) are not supported: FROM scratch, a base layer or a local image")
        if words[0] == "scratch":
            return None
        if words[0] == NAME:
            return ensure_base(self.store)
        if (layer := self.store.find(words[0], Kind.BASE)) is not None:
            return layer
        with self.store.draft() as scratch:
            archive = scratch / "image.tar"
            try:
                config = export_image(words[0], archive)
            except LayerError as error:
                raise step.error(str(error)) from error
            (scratch / "tree").mkdir()
            with archive.open("rb") as file:
                unpack(file, scratch / "tree")
            archive.unlink()
            return self.store.publish(scratch / "tree", Kind.BASE, config)

    def begin(self, base: Layer | None, place: Path) -> None:
        self.root = place / "root"
        self.arguments = {}  # those before FROM end with it
        if base is not None:
            self.env, self.workdir = dict(base.config.env), base.config.workdir
            self.user = base.config.user

    def perform(self, step: Step) -> None:
        if step.name in ("COPY", "ADD"):
            self.context.copy(step, words_of(step, self.values), self.root, self.workdir)
        elif step.name == "RUN":
            self._run(step)
        elif step.name == "ENV":
            self.env |= pairs_of(step, self.values)
        elif step.name == "ARG":
            self.argument(step)
        elif step.name == "USER":
            self.user = " ".join(words_of(step, self.values))
        else:
            self.workdir = os.path.normpath(os.path.join(self.workdir, " ".join(words_of(step, self.values))))
            (self.root / inside(self.root, self.workdir)).mkdir(parents=True, exist_ok=True)

    def _run(self, step: Step) -> None:
        argv = list(step.words) if step.words is not None else ["/bin/sh", "-c", step.rest]
        control = ensure_control(self.store.folder / "control", "/usr/bin/python3")
        try:
            said = steps.run(
                self.root,
                argv,
                control,
                env=self.values,
                cwd=self.workdir,
                user=self.user,
                network=self.network,
            )
        except LayerError as error:
            raise step.error(str(error)) from error
        if said:
            self.say(said)


def free_room(folder: Path) -> int:
    """Returns how many bytes a build may write by default: at most 4 GiB and half of what is free."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return min(ROOM, shutil.disk_usage(folder).free // 2)
