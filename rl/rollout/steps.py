"""Decode steps in the token log: one record a step, column after column, read back for all steps at once.

A step's payload is a head, its selections' layout, and columns over its n tokens: slot, turn, place in the
turn, id, log-probability; then, where the engine recorded them, the context's state, the expert ids of the
token's input, the ids it was drawn from (counts, then all ids), and its selections. Every column begins at a
multiple of 4 bytes. Reading never builds a Python object per token.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.rollout.extras import Extras
from rl.rollout.frames import Buffer, Data, Kind, Scan, Sealed, sealed

HEAD = np.dtype(
    [
        ("version", "<i4"),
        ("rows", "<u4"),
        ("layers", "<u2"),
        ("experts", "<u2"),
        ("kept", "<u4"),
        ("kept_bytes", "u1"),
        ("states", "u1"),
        ("sources", "<u2"),
        ("selected", "<u4"),
    ]
)
"""Policy version; tokens; layers and experts a token (0: none); all kept ids and the bytes of one (0: no
masks); whether there are states; selecting layers, and the keys that they select together for a token."""

_HEAD = struct.Struct("<iIHHIBBHI")
"""`HEAD` for one step, which is written many times faster so."""
assert _HEAD.size == HEAD.itemsize

_U1, _I2, _U4 = np.dtype("u1"), np.dtype("<i2"), np.dtype("<u4")
I4, F4 = np.dtype("<i4"), np.dtype("<f4")
_COLUMNS, _LONG = 5, 256
_OLD_ROW = np.dtype(
    [("slot", "<u4"), ("turn", "<u4"), ("index", "<u4"), ("token", "<i4"), ("logprob", "<f4")]
)
"""A token in a step of format 1, whose payload is the policy version and rows."""


def step_record(version: int, columns: Sequence[np.ndarray], extras: Extras) -> Sealed:
    """Returns a step's record; `columns` are slots, turns, places, ids and log-probabilities.

    They are contiguous, of 4 bytes a number, and may come as arrays of several columns [c, n]; they and the
    states are copied, as all of them are a few bytes a token. Experts, kept ids and selections are not where
    they are in the log's types already: none of them may change before it is written.
    """
    rows = columns[0].shape[-1]
    states, layers, experts, kept, kept_bytes, sources, selected, layout = 0, 0, 0, 0, 0, 0, 0, b""
    front: list[Buffer] = [column.data for column in columns]
    rest: list[Buffer] = []
    size = _HEAD.size + 4 * _COLUMNS * rows
    if extras.states is not None:
        states = 1
        size += _add(front, plain(extras.states, _U1))
    if extras.experts is not None:
        _, layers, experts = extras.experts.shape
        size += _add(rest, plain(extras.experts, _I2))
    if extras.kept is not None:
        counts, ids = extras.kept
        kind = "<u2" if not ids.size or int(ids.max()) <= 0xFFFF else "<u4"
        kept, kept_bytes = ids.size, np.dtype(kind).itemsize
        size += _add(rest, np.ascontiguousarray(counts, _U4)) + _add(rest, np.ascontiguousarray(ids, kind))
    if extras.selections:
        layout = np.array(
            [[layer, keys.shape[1]] for layer, keys in extras.selections.items()], "<u4"
        ).tobytes()
        joined = np.concatenate([np.asarray(keys, "<i4") for keys in extras.selections.values()], axis=1)
        sources, selected = len(extras.selections), joined.shape[1]
        size += _add(rest, joined)
    head = _HEAD.pack(version, rows, layers, experts, kept, kept_bytes, states, sources, selected)
    return sealed(Kind.STEP, [head, layout, *front], rest, size + len(layout))


def plain(array: np.ndarray, kind: np.dtype) -> np.ndarray:
    """The array itself where it is contiguous and of this type, as it mostly is, else a copy that is."""
    if array.dtype is kind and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, kind)


def _add(parts: list[Buffer], array: np.ndarray) -> int:
    """Appends a column and fills up to a multiple of 4 bytes; returns their number."""
    parts.append(array.data)
    size = array.nbytes
    if rest := -size % 4:
        parts.append(bytes(rest))
    return size + rest


@dataclass(frozen=True, slots=True)
class Steps:
    """The tokens of a segment as columns [N] in the order they were logged; extras are fetched by `extras`.

    `row` is a token's place in its step, `frame` the number of its step; `heads` and `places` are of steps.
    `kept_at` and `kept_count` say where in `data` a token's kept ids lie; None where no step has any.
    """

    data: Data
    places: Places
    heads: np.ndarray
    frame: np.ndarray
    row: np.ndarray
    slot: np.ndarray
    turn: np.ndarray
    index: np.ndarray
    token: np.ndarray
    logprob: np.ndarray
    state: np.ndarray | None = None
    kept_at: np.ndarray | None = None
    kept_count: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def counts(self) -> np.ndarray:
        """Tokens of each step."""
        return self.heads["rows"].astype(np.int64)

    def versions(self, rows: np.ndarray) -> np.ndarray:
        """Policy versions int32 of some tokens."""
        return self.heads["version"][self.frame[rows]].astype(np.int32)

    @classmethod
    def read(cls, data: Data, found: Scan) -> Steps:
        """Reads all steps that a scan found."""
        starts = np.array(found.starts, np.int64)
        return _read_old(data, found, starts) if found.format == 1 else _read(data, starts)

    def extras(self, rows: np.ndarray) -> Extras:
        """What the log holds of some tokens beside ids and log-probabilities, -1 where a token has none."""
        states = None if self.state is None else self.state[rows]
        return Extras(states, self._experts(rows), self._kept(rows), self._selections(rows))

    def _experts(self, rows: np.ndarray) -> np.ndarray | None:
        """[m, layers, k]; tokens of another shape than the last one's have none."""
        if not self.places.has_experts:
            return None
        frames = self.frame[rows]
        heads = self.heads[frames]
        known = np.flatnonzero(heads["layers"])
        if not known.size:
            return None
        shape = int(heads["layers"][known[-1]]), int(heads["experts"][known[-1]])
        width = 2 * shape[0] * shape[1]
        same = np.flatnonzero((heads["layers"] == shape[0]) & (heads["experts"] == shape[1]))
        at = self.places.experts[frames[same]] + self.row[rows[same]].astype(np.int64) * width
        found = _fetch(self.data, at, f"V{width}").view("<i2").reshape(-1, *shape)
        if len(same) == len(rows):
            return found
        whole = np.full((len(rows), *shape), -1, np.int16)
        whole[same] = found
        return whole

    def _kept(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        if self.kept_at is None or self.kept_count is None:
            return None
        counts, at = self.kept_count[rows], self.kept_at[rows]
        sizes = np.repeat(self.heads["kept_bytes"][self.frame[rows]].astype(np.int64), counts)
        first = np.cumsum(counts) - counts
        places = np.repeat(at, counts) + sizes * (np.arange(counts.sum()) - np.repeat(first, counts))
        ids = np.zeros(len(places), np.int32)
        for size in (2, 4):
            some = np.flatnonzero(sizes == size)
            ids[some] = _fetch(self.data, places[some], f"<u{size}")
        return counts, ids

    def _selections(self, rows: np.ndarray) -> dict[int, np.ndarray] | None:
        """By layer [m, K], K of the widest step."""
        if not self.places.has_selections:
            return None
        frames = self.frame[rows]
        layouts = {frame: self._layout(frame) for frame in np.unique(frames).tolist()}
        widest: dict[int, int] = {}
        for layer, keys in (pair for layout in layouts.values() for pair in layout):
            widest[layer] = max(widest.get(layer, 0), keys)
        whole = {layer: np.full((len(rows), keys), -1, np.int32) for layer, keys in sorted(widest.items())}
        for layout in set(layouts.values()):
            alike = [frame for frame, own in layouts.items() if own == layout]
            members = np.flatnonzero(np.isin(frames, alike))
            width, begin = sum(keys for _, keys in layout), 0
            at = (
                self.places.selections[frames[members]] + self.row[rows[members]].astype(np.int64) * 4 * width
            )
            for layer, keys in layout:
                found = _fetch(self.data, at + 4 * begin, f"V{4 * keys}").view("<i4").reshape(-1, keys)
                whole[layer][members, :keys] = found
                begin += keys
        return whole

    def _layout(self, frame: int) -> tuple[tuple[int, int], ...]:
        """Layers and keys a token of a step's selections."""
        count, at = int(self.heads["sources"][frame]), int(self.places.layout[frame])
        pairs = np.frombuffer(self.data, "<u4", 2 * count, at).reshape(-1, 2).tolist()
        return tuple((layer, keys) for layer, keys in pairs)


@dataclass(frozen=True, slots=True)
class Places:
    """Where in a segment the columns of its steps begin, int64 [F] each.

    `has_experts` and `has_selections`: whether any step has them.
    """

    layout: np.ndarray
    columns: np.ndarray
    states: np.ndarray
    experts: np.ndarray
    kept: np.ndarray
    selections: np.ndarray
    has_experts: bool
    has_selections: bool

    @classmethod
    def of(cls, starts: np.ndarray, heads: np.ndarray) -> Places:
        """Those of steps with these heads, whose payloads begin at `starts`."""
        sizes = {name: heads[name].astype(np.int64) for name in HEAD.names or ()}
        rows = sizes["rows"]
        layout = starts + HEAD.itemsize
        columns = layout + 8 * sizes["sources"]
        states = columns + 4 * _COLUMNS * rows
        experts = states + _padded(rows * sizes["states"])
        kept = experts + _padded(2 * rows * sizes["layers"] * sizes["experts"])
        counts = 4 * rows * (sizes["kept_bytes"] > 0)
        selections = kept + counts + _padded(sizes["kept"] * sizes["kept_bytes"])
        has = bool(sizes["layers"].any()), bool(sizes["sources"].any())
        return cls(layout, columns, states, experts, kept, selections, *has)


def _padded(sizes: np.ndarray) -> np.ndarray:
    return (sizes + 3) & ~3


def _fetch(data: Data, places: np.ndarray, kind: str) -> np.ndarray:
    """The items of type `kind` at byte `places`, which need no alignment."""
    item = np.dtype(kind)
    if not len(places):
        return np.zeros(0, item)
    view = np.ndarray((len(data) - item.itemsize + 1,), item, buffer=data, strides=(1,))
    return view[places]


def _column(data: Data, places: np.ndarray, counts: np.ndarray, kind: str) -> np.ndarray:
    """The runs of `counts` items that begin at `places`, end to end: copied whole where they are long."""
    item = np.dtype(kind)
    if counts.sum() < _LONG * len(counts):
        row = _rows_of(counts)[1]
        return _fetch(data, np.repeat(places, counts) + item.itemsize * row.astype(np.int64), kind)
    with memoryview(data) as view:
        ends = places + item.itemsize * counts
        parts = [view[a:b] for a, b in zip(places.tolist(), ends.tolist(), strict=True)]
        return np.frombuffer(b"".join(parts), item)


def _rows_of(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each token of steps with `counts` tokens: the step's number and the place in it, int32."""
    frame = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    first = (np.cumsum(counts) - counts).astype(np.int32)
    return frame, np.arange(len(frame), dtype=np.int32) - np.repeat(first, counts)


def _read(data: Data, starts: np.ndarray) -> Steps:
    heads = _fetch(data, starts, f"V{HEAD.itemsize}").view(HEAD)
    counts, places = heads["rows"].astype(np.int64), Places.of(starts, heads)
    frame, row = _rows_of(counts)

    def column(number: int, kind: str) -> np.ndarray:
        return _column(data, places.columns + 4 * number * counts, counts, kind)

    state = kept_at = kept_count = None
    if len(heads) and heads["states"].all():
        state = _column(data, places.states, counts, "u1")
    if heads["kept_bytes"].any():
        kept_at, kept_count = _kept_places(data, heads, places, frame, row)
    return Steps(
        data,
        places,
        heads,
        frame,
        row,
        slot=column(0, "<u4"),
        turn=column(1, "<u4"),
        index=column(2, "<u4"),
        token=column(3, "<i4"),
        logprob=column(4, "<f4"),
        state=state,
        kept_at=kept_at,
        kept_count=kept_count,
    )


def _kept_places(
    data: Data, heads: np.ndarray, places: Places, frame: np.ndarray, row: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    width = heads["kept_bytes"].astype(np.int64)[frame]
    masked = np.flatnonzero(width)
    count = np.zeros(len(frame), np.int64)
    count[masked] = _fetch(data, places.kept[frame[masked]] + 4 * row[masked], "<u4")
    before = np.cumsum(count) - count
    before -= before[np.maximum(np.arange(len(frame)) - row, 0)]
    return places.kept[frame] + 4 * heads["rows"].astype(np.int64)[frame] + before * width, count


def _read_old(data: Data, found: Scan, starts: np.ndarray) -> Steps:
    heads = np.zeros(len(starts), HEAD)
    heads["version"] = _fetch(data, starts, "<i4")
    heads["rows"] = (np.array(found.ends, np.int64) - starts - 4) // _OLD_ROW.itemsize
    frame, row = _rows_of(heads["rows"].astype(np.int64))
    rows = _fetch(data, starts[frame] + 4 + row * _OLD_ROW.itemsize, f"V{_OLD_ROW.itemsize}").view(_OLD_ROW)
    columns = {name: np.ascontiguousarray(rows[name]) for name in _OLD_ROW.names or ()}
    return Steps(data, Places.of(starts, heads), heads, frame, row, **columns)
