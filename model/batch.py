"""One call's tokens: packed for the token-wise layers, as rows for attention, with what both need.

The decoder may run fewer tokens than the encoder, or see other windows; it then has a batch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.cache.progress import Span
from model.choices import FREE, Capture, Choices
from model.layers.exact import fill
from model.layers.rope import Rotation
from model.rows import Rows

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache
    from model.vision import ImageTokens

_SAME_BUCKET_FACTOR = 2
_SAME_BUCKET_SLACK = 32


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Documents laid end to end: `token_ids` [T] int64, `cu_seqlens` [N + 1] int64 (0 first, T last)."""

    token_ids: Tensor
    cu_seqlens: Tensor
    images: ImageTokens | None = None
    choices: Choices | None = None
    """What to choose in place of the pass's own choices."""
    window_floors: Tensor | None = None
    """[T, 2] int64: first position of its document whose window keys a token sees, in the encoder and in the
    decoder (`floors_from_starts`). None: all of its window."""


def floors_from_starts(length: int, starts: Sequence[tuple[int, int]]) -> Tensor:
    """[length, 2] window floors of a document whose sampler started its windows anew at some positions.

    Args:
        length: tokens of the document.
        starts: (encoder, decoder) positions, in any order; a position beyond the document does nothing.

    Returns:
        For each token the largest start at or before it, or 0.
    """
    floors = torch.zeros(length, 2, dtype=torch.int64)
    for half in range(2):
        for start in sorted({pair[half] for pair in starts}):
            if start < 0:
                raise ValueError(f"a replay starts at position {start}: positions count from 0")
            floors[start:, half] = start
    return floors


@dataclass(slots=True)
class NewTokens:
    """Asks `Policy.extend` for what it knows of each new token that the decoder ran, packed row after row.

    Attributes:
        hidden: [T, d] the head's input; None when the decoder ran none.
        features: [T, 3 d] what a drafter reads; None as well when there is no drafter.
        counts: [B] int64, how many of each row's last tokens these are.
    """

    hidden: Tensor | None = None
    features: Tensor | None = None
    counts: Tensor | None = None


class Trace:
    """Keeps intermediate results by name, for comparison with a reference.

    With `steps` those of a decode step, where a pass is one; otherwise a decoded token goes the way of a
    prompt, whose results have the names of the reference.
    """

    def __init__(self, *, steps: bool = False) -> None:
        self.values: dict[str, Tensor] = {}
        self.steps = steps

    def record(self, name: str, value: Tensor) -> None:
        """Keep `value` under `name`."""
        self.values[name] = value.detach()

    def record_layer(self, layer: int, **values: Tensor) -> None:
        """Keep results of a layer under their names."""
        for name, value in values.items():
            self.record(f"layers.{layer}.{name}", value)


class Batch:
    """Tokens of one forward pass. `rows` partition the sequences into rectangles of similar length."""

    def __init__(self, rows: list[Rows], order: Tensor | None, trace: Trace | None = None) -> None:
        self.rows, self._order, self.trace = rows, order, trace
        self.position = self._joined([row.unpad(row.position) for row in rows])
        self.total = self.position.shape[0]
        self.image: Tensor | None = None
        """[T] bool, true on tokens of image spans; None: text only."""
        self.keep_features = False
        self.features: Tensor | None = None
        """[T, 3 d] what the drafter reads, once the layers have run; kept when asked for or traced."""
        self.choices: Choices | None = None
        self.capture: Capture | None = None
        self._encoder: Batch | None = None
        self.decoder: Batch | None = self
        """What the decoder runs; None: nothing."""
        self.decoder_tokens: Tensor | None = None
        """[T'] which of the tokens these are; None: all."""
        self.decoder_rows: Tensor | None = None
        """[B'] which of the rows these are; None: all."""
        self._rotations: dict[int, tuple[Rotation, Rotation]] = {}

    def record(self, name: str, value: Tensor) -> None:
        """Keep `value` when this pass is traced."""
        if self.trace is not None:
            self.trace.record(name, value[: self.total])

    def record_layer(self, layer: int, **values: Tensor) -> None:
        """Keep results of a layer when this pass is traced."""
        if self.trace is not None:
            self.trace.record_layer(layer, **{name: value[: self.total] for name, value in values.items()})

    def mark_images(self, images: ImageTokens | None) -> None:
        """Tell the layers which tokens belong to images."""
        self.image = None if images is None else images.types >= 0
        if self.image is not None and self.decoder is not None and self.decoder is not self:
            image, tokens = self.image, self.decoder_tokens
            self.decoder.image = image if tokens is None else image.index_select(0, tokens)

    @property
    def image_rows(self) -> Tensor | None:
        """`image` for the rows that token-wise layers compute: in exact mode filled up to whole blocks."""
        return None if self.image is None else fill(self.image)

    def replay(self, choices: Choices | None, capture: Capture | None) -> None:
        """Tell the layers what to choose, and where to keep what is chosen."""
        self.choices, self.capture = choices, capture
        if self.decoder is not None and self.decoder is not self:
            tokens = self.decoder_tokens
            self.decoder.choices = choices if choices is None or tokens is None else choices.take(tokens)
            self.decoder.capture, self.decoder._encoder = capture, self

    def among_all(self, chosen: Tensor) -> Tensor:
        """[T', k] choices for the decoder's tokens to [T, k], free where it did not run a token."""
        chosen = chosen[: self.total]
        if self._encoder is None or self._encoder.decoder_tokens is None:
            return chosen
        every = chosen.new_full((self._encoder.total, chosen.shape[1]), FREE)
        return every.index_copy_(0, self._encoder.decoder_tokens, chosen)

    def forced_experts(self, layer: int) -> Tensor | None:
        """[T, k] experts of `layer` to go to; None: free."""
        forced = None if self.choices is None else self.choices.experts_of(layer)
        return None if forced is None else fill(forced)

    def forced_selection(self, layer: int, rows: Rows) -> Tensor | None:
        """[B, L, K] main keys that the tokens of `rows` select in `layer`; None: free."""
        forced = None if self.choices is None else self.choices.selection_of(layer)
        return None if forced is None else rows.pad(forced)

    def merge(self, parts: list[Tensor]) -> Tensor:
        """Put together what each of `rows` computed for its tokens, in the order of the packed tokens.

        In exact mode they are filled up to whole blocks, as all token-wise values are.
        """
        return fill(self._joined(parts))

    def merge_plain(self, parts: list[Tensor]) -> Tensor:
        """`merge` without filling up."""
        return self._joined(parts)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1 and self._order is None:
            return parts[0]
        joined = torch.cat(parts)
        return joined if self._order is None else joined.index_select(0, self._order)

    def rotations(self, ratio: int, frequencies: Tensor) -> tuple[Rotation, Rotation]:
        """The tokens' rotations ([T, r / 2], [T, 1, r / 2]) with the frequencies of a layer of `ratio`."""
        kind = min(ratio, 1)
        if kind not in self._rotations:
            rotation = Rotation.at(fill(self.position), frequencies)
            self._rotations[kind] = (rotation, rotation.per_head())
        return self._rotations[kind]

    @staticmethod
    def of_documents(tokens: PackedTokens, window: int, trace: Trace | None = None) -> Batch:
        """Documents for training. Raises ValueError when `cu_seqlens` or floors do not fit the tokens."""
        bounds = tokens.cu_seqlens.tolist()
        total = tokens.token_ids.shape[0]
        lengths = [stop - start for start, stop in pairwise(bounds)]
        if not lengths or bounds[0] != 0 or bounds[-1] != total or min(lengths) < 1:
            raise ValueError(
                f"cu_seqlens must rise from 0 to {total} (the number of tokens) with no empty document; it "
                f"goes from {bounds[0]} to {bounds[-1]} in {len(lengths)} steps: pack the documents anew"
            )
        buckets = _buckets(lengths)
        device = tokens.token_ids.device

        def laid_out() -> list[Rows]:
            return [
                Rows(
                    [0] * len(bucket),
                    [lengths[i] for i in bucket],
                    [bounds[i] for i in bucket],
                    total,
                    window,
                    device,
                )
                for bucket in buckets
            ]

        rows = laid_out()
        order = None
        if len(rows) > 1:
            joined = torch.cat([row.padded.flatten()[row.kept] for row in rows])
            order = joined.argsort()
        batch = Batch(rows, order, trace)
        if tokens.window_floors is not None:
            batch.decoder = Batch(laid_out(), order, trace)
            batch._set_floors(tokens.window_floors)
        return batch

    def _set_floors(self, floors: Tensor) -> None:
        total = self.position.shape[0]
        if floors.shape != (total, 2) or bool(((floors < 0) | (floors > self.position[:, None])).any()):
            raise ValueError(
                f"window_floors are [{total}, 2] positions, none beyond its token: got {list(floors.shape)}; "
                "make them with floors_from_starts for each document"
            )
        assert self.decoder is not None
        for half, batch in enumerate((self, self.decoder)):
            for row in batch.rows:
                row.floors = row.pad(floors[:, half])

    @staticmethod
    def of_cached(
        cache: PolicyCache, slots: Tensor, spans: list[Span], window: int, trace: Trace | None
    ) -> Batch:
        """New tokens of cached sequences, packed row after row."""
        lengths, floors = [span.length for span in spans], [span.floor for span in spans]
        starts, counted = [span.start for span in spans], [span.counted for span in spans]
        batch = _cached(cache, slots, (starts, lengths, floors, counted), window, trace)
        if all(span.decoder_start == span.start and _see_alike(span, window) for span in spans):
            return batch
        decoded = [row for row, span in enumerate(spans) if span.decoded]
        if not decoded:
            batch.decoder = None
            return batch
        chosen = [spans[row] for row in decoded]
        starts, lengths = [span.decoder_start for span in chosen], [span.decoded for span in chosen]
        rows = torch.tensor(decoded, device=slots.device)
        layout = (starts, lengths, [span.decoder_floor for span in chosen], [0] * len(chosen))
        batch.decoder = _cached(cache, slots.index_select(0, rows), layout, window, trace)
        ends = list(accumulate(span.length for span in spans))
        tokens = [torch.arange(ends[row] - spans[row].decoded, ends[row]) for row in decoded]
        batch.decoder_tokens, batch.decoder_rows = torch.cat(tokens).to(slots.device), rows
        return batch


def _see_alike(span: Span, window: int) -> bool:
    """Whether the floors of the two halves hide the same keys from the tokens of a span."""
    reach = span.start - window + 1
    return max(span.floor, reach) == max(span.decoder_floor, reach)


def _cached(
    cache: PolicyCache, slots: Tensor, layout: tuple[list[int], ...], window: int, trace: Trace | None
) -> Batch:
    """Rows of `layout`: starts, lengths, floors and how many tokens are counted already."""
    starts, lengths, floors, counted = layout
    offsets = [0, *accumulate(lengths)]
    target = cache.target(slots)
    rows = Rows(starts, lengths, offsets[:-1], offsets[-1], window, slots.device, target, counted)
    if any(floor > start - window + 1 and floor > 0 for floor, start in zip(floors, starts, strict=True)):
        rows.floors = torch.tensor(floors, device=slots.device)[:, None]
    return Batch([rows], None, trace)


def _buckets(lengths: list[int]) -> list[list[int]]:
    """Document numbers by similar length, each bucket in the order of the documents."""
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    buckets: list[list[int]] = []
    limit = -1
    for document in by_length:
        if lengths[document] > limit:
            buckets.append([])
            limit = _SAME_BUCKET_FACTOR * lengths[document] + _SAME_BUCKET_SLACK
        buckets[-1].append(document)
    return [sorted(bucket) for bucket in buckets]
