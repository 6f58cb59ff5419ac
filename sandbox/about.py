"""What a node says of the sandboxes of an owner: JSON in the body of a reply, as there can be many."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.box import Box


def describe(boxes: Iterable[Box]) -> bytes:
    """Returns sandboxes as JSON objects: what they were asked to be, since when they are and until when."""
    return json.dumps([_about(box) for box in boxes]).encode()


def _about(box: Box) -> dict[str, Any]:
    return {
        "box": box.id,
        "backend": box.backend,
        "image": box.spec.image,
        "labels": dict(box.spec.labels),
        "limits": asdict(box.spec.limits),
        "snapshot": box.snapshot,
        "born_s": box.born_s,
        "left_s": box.left_s(),
        "paused": bool(box.held_at),
    }


def rename(body: bytes, name: Callable[[str], str]) -> bytes:
    """Returns a description with other names of its sandboxes and snapshots."""
    described: list[dict[str, Any]] = json.loads(body)
    for entry in described:
        for field in ("box", "snapshot"):
            entry[field] = name(entry[field]) if entry[field] else ""
    return json.dumps(described).encode()
