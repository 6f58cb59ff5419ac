"""What is known of a layer: its kind, its content's digest, what it wants of the sandboxes that have it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from sandbox.errors import LayerError

FORMAT = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9]+(?:[._/-][a-z0-9]+)*:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class Kind(StrEnum):
    """What a layer is: a whole root, what a task adds to one, or tools that lie over both."""

    BASE = "base"
    WORKSPACE = "workspace"
    TOOLKIT = "toolkit"


@dataclass(frozen=True, slots=True)
class Config:
    """What a Dockerfile said of its container. `env` reaches commands; the others hold while it is built."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/"
    user: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """A published layer.

    Attributes:
        digest: `sha256:...` of its kind, configuration, `over` and every path with its content.
        kind: What it is.
        config: What it wants of the sandboxes that have it.
        over: The digest of the base that it was built over; empty for a base, or when it stands alone.
        size: The bytes of its files.
        entries: How many files, folders and links it has.
        image: The SHA-256 of its EROFS image; empty where it is kept as a folder.
    """

    digest: str
    kind: Kind
    config: Config
    over: str
    size: int
    entries: int
    image: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layer:
        """Returns the layer that `to_json` described.

        Raises:
            LayerError: It is of another format.
        """
        fields: dict[str, Any] = dict(data)
        if (version := fields.pop("format", None)) != FORMAT:
            raise LayerError(f"a layer of format {version!r}, where {FORMAT} is known: build it again")
        fields["kind"], fields["config"] = Kind(fields["kind"]), Config(**fields["config"])
        return cls(**fields)


def is_digest(reference: str) -> bool:
    """Whether a reference is a digest rather than a name."""
    return _DIGEST.fullmatch(reference) is not None


def check_name(name: str) -> str:
    """Returns a name of the form `name:tag`.

    Raises:
        LayerError: It has another form.
    """
    if not _NAME.fullmatch(name):
        raise LayerError(
            f"{name!r} is no name of a layer: use name:tag in lower case, as in django-4711:2, or a digest"
        )
    return name
