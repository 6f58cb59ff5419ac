"""The commands `temper sandbox layer`: build, list, remove, collect, scan."""

from __future__ import annotations

import argparse
import contextlib
import tarfile
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

from sandbox.errors import LayerError
from sandbox.layers import build, clean_git
from sandbox.layers.answers import Answers
from sandbox.layers.build import Draft
from sandbox.layers.compose import LAYERS
from sandbox.layers.records import Kind, Layer, check_name
from sandbox.layers.scan import refuse, scan
from sandbox.layers.store import LayerStore


def build_layer(parsed: argparse.Namespace) -> int:
    """Builds and publishes a layer, and prints its digest."""
    store, kind = _store(parsed), Kind(parsed.kind)
    check_name(parsed.name)
    answers = _answers(parsed)
    with _draft(parsed, store, kind) as draft:
        if parsed.clean_git:
            for folder in clean_git.clean(draft.tree):
                print(f"one commit is left in /{folder.relative_to(draft.tree)}")
        if answers is not None:
            refuse(scan(draft.tree, answers))
        layer = store.publish(draft.tree, kind, draft.config, draft.over, parsed.name)
    print(f"{kind} {parsed.name} {_size(layer)}\n{layer.digest}")
    return 0


def list_layers(parsed: argparse.Namespace) -> int:
    """Prints the layers, with names and without."""
    store = _store(parsed)
    names = store.names()
    for digest in store.digests():
        named = [
            f"{kind} {name}" for kind, held in names.items() for name, of in held.items() if of == digest
        ]
        try:
            layer = store.get(digest)
            line = f"{layer.kind:<9} {_size(layer):>10}  {'erofs' if layer.image else 'folder':<6}"
        except LayerError:
            line = "damaged" + " " * 21
        print(f"{digest[7:19]}  {line}  {', '.join(named) or '-'}")
    return 0


def remove_layer(parsed: argparse.Namespace) -> int:
    """Takes names away."""
    kind = Kind(parsed.kind) if parsed.kind else None
    gone = _store(parsed).remove(parsed.layer, kind)
    print(f"{', '.join(gone) or parsed.layer}: `temper sandbox layer gc` deletes what nothing else leads to")
    return 0


def collect_layers(parsed: argparse.Namespace) -> int:
    """Deletes layers without a name that no sandbox uses."""
    removed = _store(parsed).collect()
    for digest in removed:
        print(digest)
    print(f"{len(removed)} layers deleted")
    return 0


def scan_layer(parsed: argparse.Namespace) -> int:
    """Prints what a folder or a layer gives away; 1 if it does."""
    answers = _answers(parsed)
    assert answers is not None
    with contextlib.ExitStack() as stack:
        folder = Path(parsed.what_to_scan)
        if not folder.is_dir():
            store = _store(parsed)
            folder = stack.enter_context(store.opened(store.get(parsed.what_to_scan)))
        findings = scan(folder, answers)
    for finding in findings:
        print(finding)
    print(f"{len(findings)} findings")
    return 1 if findings else 0


@contextlib.contextmanager
def _draft(parsed: argparse.Namespace, store: LayerStore, kind: Kind) -> Generator[Draft]:
    source: Path = parsed.source
    with contextlib.ExitStack() as stack:
        if source.is_dir():
            draft = build.from_folder(store, source, kind, parsed.at)
        elif not source.is_file():
            raise LayerError(
                f"there is no {source}: give a folder, a Dockerfile or a tar of docker save/export"
            )
        elif tarfile.is_tarfile(source):
            draft = build.from_archive(store, source)
        else:
            draft = build.from_dockerfile(
                store, source, kind, context=parsed.context, arguments=_pairs(parsed.build_arg),
                network=parsed.network, room=build.free_room(store.folder), say=print,
            )  # fmt: skip
        yield stack.enter_context(draft)


def _answers(parsed: argparse.Namespace) -> Answers | None:
    if parsed.scan is None:
        if parsed.waive:
            raise LayerError("--waive says what of a scan is accepted: give --scan ANSWERS too")
        return None
    answers = Answers.read(parsed.scan)
    return replace(answers, waive=[*answers.waive, *parsed.waive])


def _pairs(words: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not (name and sign):
            raise LayerError(f"--build-arg is NAME=value, not {word!r}")
        pairs[name] = value
    return pairs


def _store(parsed: argparse.Namespace) -> LayerStore:
    return LayerStore(parsed.state.expanduser().absolute() / LAYERS)


def _size(layer: Layer) -> str:
    return f"{layer.size / 1e6:.1f} MB"
