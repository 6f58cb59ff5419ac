"""Columns of a record beside its JSON: text where a person may read it, bytes where a log must be quick."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from envs.types import Images, Packed, Replay

Json = Any


class Blob:
    """Bytes that follow a JSON text, which refers to them by their place."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> list[int]:
        """Appends bytes; returns where they begin and end."""
        begin, self.size = self.size, self.size + len(data)
        self.parts.append(data)
        return [begin, self.size]


def column_to_json(kind: str, values: Sequence[float], blob: Blob | None) -> Json:
    """Numbers as a list, or (with `blob`) as bytes of the `struct` type `kind`, or one that is repeated."""
    if blob is None or not values:
        return list(values)
    if kind == "i" and values and values[0] == values[-1] and values.count(values[0]) == len(values):
        return {"all": values[0], "count": len(values)}
    return {"kind": kind, "at": blob.add(struct.pack(f"<{len(values)}{kind}", *values))}


def column_from_json(data: Json, blob: memoryview | None) -> tuple[Any, ...]:
    """The numbers of `column_to_json`."""
    if isinstance(data, list):
        return tuple(data)
    if "all" in data:
        return (data["all"],) * data["count"]
    packed, size = _bytes(data["at"], blob), struct.calcsize(data["kind"])
    return struct.unpack(f"<{len(packed) // size}{data['kind']}", packed)


def replay_to_json(replay: Replay | None, blob: Blob | None, left_out: int = 0) -> Json:
    """What an engine chose, as JSON: arrays in base 64, or (with `blob`) as bytes beside it.

    Of experts and selections the last `left_out` rows are left out.
    """
    if replay is None:
        return None
    data = {
        "start": replay.start,
        "selections": {
            str(layer): _packed(keys, blob, left_out) for layer, keys in replay.selections.items()
        },
    }
    if replay.experts is not None:
        data["experts"] = _packed(replay.experts, blob, left_out)
    for name in ("kept_counts", "kept_ids", "states"):
        if (item := getattr(replay, name)) is not None:
            data[name] = _packed(item, blob)
    return data


def replay_from_json(data: Json, blob: memoryview | None) -> Replay | None:
    """The record of `replay_to_json`."""
    if data is None:
        return None
    return Replay(
        data["start"],
        _unpacked(data, "experts", blob),
        {int(layer): _array(keys, blob) for layer, keys in data["selections"].items()},
        *(_unpacked(data, name, blob) for name in ("kept_counts", "kept_ids", "states")),
    )


def images_to_json(images: Images, blob: Blob | None) -> Json:
    """The images of a prompt as JSON, as `replay_to_json`."""
    patches = [_packed(item, blob) for item in images.patches]
    return {
        "types": _packed(images.types, blob),
        "patches": patches,
        "grids": [list(grid) for grid in images.grids],
    }


def images_from_json(data: Json, blob: memoryview | None) -> Images | None:
    """The record of `images_to_json`; None for no data."""
    if data is None:
        return None
    patches = tuple(_array(item, blob) for item in data["patches"])
    return Images(_array(data["types"], blob), patches, tuple((h, w) for h, w in data["grids"]))


def _packed(item: Packed, blob: Blob | None, left_out: int = 0) -> Json:
    shape, data = list(item.shape), item.data
    if left_out:
        rows = shape[0] - left_out
        shape[0], data = rows, data[: len(data) // shape[0] * rows]
    return [item.kind, shape, base64.b64encode(data).decode() if blob is None else blob.add(data)]


def _unpacked(data: Mapping[str, Json], name: str, blob: memoryview | None) -> Packed | None:
    return _array(data[name], blob) if name in data else None


def _array(data: Json, blob: memoryview | None) -> Packed:
    kind, shape, where = data
    return Packed(
        kind, tuple(shape), base64.b64decode(where) if isinstance(where, str) else _bytes(where, blob)
    )


def _bytes(place: Sequence[int], blob: memoryview | None) -> bytes:
    assert blob is not None, "a record with bytes beside it was read without them"
    return bytes(blob[place[0] : place[1]])
