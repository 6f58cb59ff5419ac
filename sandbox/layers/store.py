"""The store of layers in a node's state folder: by content, published whole, collected by reference.

    layers/<hex of the digest>/{layer.json, used, image.erofs | tree/}
    layers/names.json      the names of each kind
    layers/drafts/         what is being built, each held by a lock of its builder
    layers/lock            held while names change or layers come and go

A node (or a build) that uses a layer holds a shared lock on its `used`, which the kernel drops when the
process dies; collecting takes only what no name leads to and nobody holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.layers import erofs
from sandbox.layers.mounts import mounts_below, unmount
from sandbox.layers.records import Config, Kind, Layer, check_name, is_digest
from sandbox.layers.tree import digest_of, settle, totals

RECORD, IMAGE, TREE, USED = "layer.json", "image.erofs", "tree", "used"
_libc = ctypes.CDLL(None, use_errno=True)


class LayerStore:
    """The layers of one state folder."""

    def __init__(self, folder: Path, *, images: bool | None = None):
        """Opens a store, which need not be there yet.

        Args:
            folder: Where it is.
            images: Whether layers are kept as EROFS images; by default where this machine can.
        """
        self.folder, self._images = folder, images

    # Layers by name

    def names(self) -> dict[str, dict[str, str]]:
        """Returns the digests by kind and name."""
        try:
            return json.loads((self.folder / "names.json").read_text())
        except FileNotFoundError:
            return {}

    def find(self, reference: str, kind: Kind | None = None) -> Layer | None:
        """Returns the layer of a name or digest, if there is one.

        Raises:
            LayerError: It is of another kind than asked for, or its record is damaged.
        """
        digest = reference
        if not is_digest(reference):
            kinds = [kind] if kind else list(Kind)
            found = [names[reference] for k in kinds if reference in (names := self.names().get(k, {}))]
            if not found:
                return None
            if len(set(found)) > 1:
                raise LayerError(f"{reference} names layers of several kinds: give a digest")
            digest = found[0]
        path = self.place(digest) / RECORD
        try:
            layer = Layer.from_json(json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise LayerError(
                f"the record of layer {digest} is damaged: remove it, and build it again"
            ) from error
        if kind is not None and layer.kind is not kind:
            raise LayerError(f"{reference} is a {layer.kind} layer, and a {kind} layer was asked for")
        return layer

    def get(self, reference: str, kind: Kind | None = None) -> Layer:
        """Returns the layer of a name or digest.

        Raises:
            LayerError: There is none, or it is of another kind.
        """
        if (layer := self.find(reference, kind)) is not None:
            return layer
        what = f"{kind} layer" if kind else "layer"
        near = sorted(name for k, names in self.names().items() if kind in (None, k) for name in names)
        known = f"there are {', '.join(near[:10])}" if near else "there is none"
        raise LayerError(
            f"there is no {what} {reference!r} in {self.folder}; {known} (`temper sandbox layer`)"
        )

    def digests(self) -> list[str]:
        """Returns the digests of all layers, with a name or without, whole or damaged."""
        return [f"sha256:{place.name}" for place in self._places()]

    def _places(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*") if is_digest(f"sha256:{path.name}"))

    def place(self, digest: str) -> Path:
        """Returns the folder of a layer."""
        return self.folder / digest.removeprefix("sha256:")

    # Coming and going

    @contextlib.contextmanager
    def draft(self) -> Generator[Path]:
        """Gives a folder to build in, which goes when the block ends."""
        drafts = self.folder / "drafts"
        path = drafts / secrets.token_hex(6)
        with contextlib.ExitStack() as stack:
            with self._locked():
                drafts.mkdir(mode=0o700, exist_ok=True)
                self._sweep_drafts()
                lock = stack.enter_context((drafts / f"{path.name}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                path.mkdir()
            try:
                yield path
            finally:
                _discard(path)
                Path(lock.name).unlink(missing_ok=True)

    def publish(self, tree: Path, kind: Kind, config: Config, over: str = "", name: str = "") -> Layer:
        """Makes a layer of a draft's tree, all or nothing, and gives it a name.

        Args:
            tree: A folder, which may be used up.
            kind: What it is.
            config: What it wants of its sandboxes.
            over: The digest of the base that it was built over, if any.
            name: `name:tag`; one that is in use moves to the new layer.

        Raises:
            LayerError: It cannot be a layer.
        """
        if name:
            check_name(name)
        settle(tree, kind)
        digest = digest_of(tree, kind, config, over)
        with self.draft() as scratch:
            return self._publish(
                tree, Layer(digest, kind, config, over, *totals(tree)), name, scratch / "ready"
            )

    def _publish(self, tree: Path, wanted: Layer, name: str, ready: Path) -> Layer:
        digest, kind, layer = wanted.digest, wanted.kind, self._intact(wanted.digest)
        if layer is None:
            ready.mkdir(mode=0o700)
            layer = self._lay_down(wanted, tree, ready)
        with self._locked():
            if ready.exists():
                if self.place(digest).exists():  # another builder's, or damaged: either way this one is whole
                    self._put_away(self.place(digest))
                ready.rename(self.place(digest))
                _sync(self.folder)
            if name:
                self._write_names({**(names := self.names()), kind: {**names.get(kind, {}), name: digest}})
        return layer

    def _intact(self, digest: str) -> Layer | None:
        try:
            if (layer := self.find(digest)) is not None:
                self.verify(layer)
        except LayerError:
            return None
        return layer

    def _put_away(self, place: Path) -> None:
        place.rename(self.folder / "drafts" / f"gone-{place.name}-{secrets.token_hex(4)}")

    def _lay_down(self, layer: Layer, tree: Path, ready: Path) -> Layer:
        images = erofs.available() if self._images is None else self._images
        if images:
            erofs.make_image(tree, ready / IMAGE)
            _sync(ready / IMAGE)
            layer = replace(layer, image=file_hash(ready / IMAGE))
        else:
            _move(tree, ready / TREE)
            fd = os.open(ready, os.O_RDONLY)
            _libc.syncfs(fd)
            os.close(fd)
        (ready / USED).touch()
        (ready / RECORD).write_text(json.dumps(layer.to_json()))
        _sync(ready / RECORD)
        _sync(ready)
        return layer

    def remove(self, reference: str, kind: Kind | None = None) -> list[str]:
        """Takes names away, of the layer (a digest) or one; `collect` deletes what has none left.

        Raises:
            LayerError: There is none.
        """
        with self._locked():
            names = self.names()
            gone = [
                (k, name)
                for k, held in names.items()
                for name, digest in held.items()
                if reference in (digest, name) and kind in (None, k)
            ]
            if not gone and not (is_digest(reference) and self.place(reference).exists()):
                self.get(reference, kind)
            for k, name in gone:
                del names[k][name]
            self._write_names(names)
        return [name for _, name in gone]

    def collect(self) -> list[str]:
        """Deletes layers that no name leads to, also by what they were built over, and nobody uses."""
        removed: list[str] = []
        if not self.folder.exists():
            return removed
        with self._locked():
            kept = {digest for names in self.names().values() for digest in names.values()}
            for digest in list(kept):
                with contextlib.suppress(LayerError):  # a damaged record leads nowhere
                    if (layer := self.find(digest)) is not None and layer.over:
                        kept.add(layer.over)
            (self.folder / "drafts").mkdir(mode=0o700, exist_ok=True)
            for place in self._places():
                digest = f"sha256:{place.name}"
                if digest not in kept and self._unused(place):
                    self._put_away(place)
                    removed.append(digest)
            self._sweep_drafts()
        return removed

    def _unused(self, place: Path) -> bool:
        with (place / USED).open("a") as used:
            try:
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def _sweep_drafts(self) -> None:
        for path in (self.folder / "drafts").glob("*"):
            if path.suffix == ".lock":
                if not path.with_suffix("").exists():
                    path.unlink(missing_ok=True)
                continue
            lock = path.with_suffix(".lock")
            with contextlib.ExitStack() as stack:
                if lock.exists():
                    file = stack.enter_context(lock.open())
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                _discard(path)
                lock.unlink(missing_ok=True)

    # Using

    def hold(self, layer: Layer) -> int:
        """Returns a descriptor that keeps a layer from being collected until it is closed.

        Raises:
            LayerError: It is gone.
        """
        place = self.place(layer.digest)
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(place / USED, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(place / USED).st_ino == os.fstat(fd).st_ino:
                    return fd
            os.close(fd)
        raise LayerError(f"layer {layer.digest} was removed: build it again")

    def verify(self, layer: Layer) -> None:
        """Returns when what is on disk is what was published.

        Raises:
            LayerError: It is damaged; names it.
        """
        place = self.place(layer.digest)
        try:
            if layer.image:
                whole = file_hash(place / IMAGE) == layer.image
            else:
                whole = digest_of(place / TREE, layer.kind, layer.config, layer.over) == layer.digest
        except OSError as error:
            raise LayerError(f"layer {layer.digest} cannot be read: {error}") from error
        if not whole:
            raise LayerError(
                f"{layer.kind} layer {layer.digest} is damaged on disk ({place}): "
                "remove it (`temper sandbox layer rm`, `gc`) and build it again"
            )

    @contextlib.contextmanager
    def opened(self, layer: Layer) -> Generator[Path]:
        """Gives the tree of a layer, verified, for reading.

        Raises:
            LayerError: It is gone or damaged, or its image cannot be mounted here.
        """
        held = self.hold(layer)
        try:
            self.verify(layer)
            if not layer.image:
                yield self.place(layer.digest) / TREE
                return
            with self.draft() as draft:
                at = draft / "mounted"
                at.mkdir()
                self.mount(layer, at)
                yield at
        finally:
            os.close(held)

    def mount(self, layer: Layer, at: Path) -> None:
        """Mounts the image of a layer.

        Raises:
            LayerError: The kernel does not.
        """
        try:
            erofs.mount_image(self.place(layer.digest) / IMAGE, at)
        except OSError as error:
            raise LayerError(
                f"the image of layer {layer.digest} cannot be mounted ({error}): "
                "be root on a kernel with EROFS, or build it again here"
            ) from error

    def _write_names(self, names: dict[str, dict[str, str]]) -> None:
        draft = self.folder / "names.draft"
        draft.write_text(json.dumps(names, indent=1, sort_keys=True))
        _sync(draft)
        draft.replace(self.folder / "names.json")
        _sync(self.folder)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _move(tree: Path, to: Path) -> None:
    try:
        tree.rename(to)
        return
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EBUSY):
            raise
    done = subprocess.run(["cp", "-a", "--", str(tree), str(to)], capture_output=True, check=False)
    if done.returncode:
        raise LayerError(f"a layer could not be copied: {done.stderr.decode(errors='replace').strip()}")


def _discard(path: Path) -> None:
    for mounted in mounts_below(path):
        with contextlib.suppress(OSError):
            unmount(mounted)
    shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
