"""Tar archives of roots: what `docker export` and `docker save` write. Whiteouts hide what came before."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from sandbox.errors import LayerError, UnsafeTreeError
from sandbox.layers.records import Config
from sandbox.layers.tree import write
from sandbox.trees import Checker, Entry, Item, TreeLimits, pieces

LIMITS = TreeLimits(64 << 30, 2_000_000)
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_UNUSED = ("dev", "proc", "sys")


def unpack(file: IO[bytes], root: Path) -> Config:
    """Makes the root of an archive, which `docker export` or `docker save` wrote; returns its configuration.

    Raises:
        LayerError: It is not one, or leads out of its place.
    """
    try:
        with tarfile.open(fileobj=file, mode="r:*") as tar:
            names = tar.getnames()
            if "manifest.json" not in names:
                _apply(tar, root)
                return Config()
            manifest = json.loads(_content(tar, "manifest.json").read())
            if len(manifest) != 1:
                raise LayerError(f"the archive has {len(manifest)} images: save one")
            for name in manifest[0]["Layers"]:
                with tarfile.open(fileobj=_content(tar, name), mode="r:*") as layer:
                    _apply(layer, root)
            return config_of(json.loads(_content(tar, manifest[0]["Config"]).read())["config"])
    except (tarfile.TarError, UnsafeTreeError, KeyError, TypeError, ValueError, EOFError) as error:
        raise LayerError(f"the archive is no root or image: {error}") from error


def config_of(data: dict[str, Any]) -> Config:
    """Returns what the configuration of an image says."""
    env = dict(str(pair).split("=", 1) for pair in data.get("Env") or ())
    return Config(env, data.get("WorkingDir") or "/", data.get("User") or "")


def _content(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    content = tar.extractfile(name)
    if content is None:
        raise LayerError(f"the archive has no {name}")
    return content


def _apply(tar: tarfile.TarFile, root: Path) -> None:
    for member in tar:  # what a layer hides is hidden before it brings its own
        name = _name(member)
        base = name.rpartition("/")[2]
        if base.startswith(_WHITEOUT):
            _hide(root, name, base)
    write(_items(tar), root)
    hard = [member for member in tar.getmembers() if member.islnk() and not _skipped(_name(member))]
    for member in hard:
        source = root / _checked(member.linkname.removeprefix("./"))
        target = root / _checked(_name(member))
        if any(path.is_symlink() for path in (source, *source.parents) if root in path.parents):
            raise LayerError(f"{member.name!r} is a hard link through a link")
        if (
            source.is_file()
            and not target.exists()
            and target.parent.resolve().is_relative_to(root.resolve())
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
        else:
            raise LayerError(f"{member.name!r} is a hard link to {member.linkname!r}, which is not there")


def _hide(root: Path, name: str, base: str) -> None:
    folder = root / _checked(name.rpartition("/")[0] or ".")
    if any(path.is_symlink() for path in (folder, *folder.parents) if path != root and root in path.parents):
        raise LayerError(f"{name!r} lies behind a link")
    hidden = list(folder.iterdir()) if base == _OPAQUE and folder.is_dir() else []
    if base != _OPAQUE:
        hidden = [folder / base.removeprefix(_WHITEOUT)]
    for path in hidden:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _items(tar: tarfile.TarFile) -> Iterator[Item]:
    checker = Checker(LIMITS, links_out=True)
    for member in tar.getmembers():
        name = _name(member)
        if member.islnk() or _skipped(name) or name.rpartition("/")[2].startswith(_WHITEOUT):
            continue
        kind = (
            "file" if member.isreg() else "dir" if member.isdir() else "link" if member.issym() else "special"
        )
        target = member.linkname if kind == "link" else ""
        entry = Entry(name, kind, member.mode, max(int(member.mtime), 0) * 10**9, target=target)
        if kind == "file":
            content = tar.extractfile(member)
            assert content is not None
            yield from pieces(content, entry, checker)
        else:
            yield checker.check(entry), b""


def _name(member: tarfile.TarInfo) -> str:
    return member.name.removeprefix("./").rstrip("/") or "."


def _skipped(name: str) -> bool:
    return name.split("/")[0] in _UNUSED or name == ".dockerenv"


def _checked(name: str) -> str:
    return Checker(LIMITS).check(Entry(name, "dir")).path
