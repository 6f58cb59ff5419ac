"""One call's tokens: packed for the token-wise layers, as rows for attention, with what both need."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.layers.rope import Rotation
from model.rows import CacheTarget, Rows

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


@dataclass(slots=True)
class NewTokens:
    """Asks `Policy.extend` for what it knows of every new token: packed rows, 0 where no decoder ran.

    Attributes:
        hidden: [T, d] the head's input.
        features: [T, 3 d] what a drafter reads.
    """

    hidden: Tensor | None = None
    features: Tensor | None = None


class Trace:
    """Keeps intermediate results by name, for comparison with a reference."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def record(self, name: str, value: Tensor) -> None:
        """Keep `value` under `name`."""
        self.values[name] = value.detach()


class Batch:
    """Tokens of one forward pass. `rows` partition the sequences into rectangles of similar length."""

    def __init__(self, rows: list[Rows], order: Tensor | None, trace: Trace | None = None) -> None:
        self.rows, self._order, self.trace = rows, order, trace
        position = self.merge([row.unpad(row.position) for row in rows])
        self.position = position
        self.image: Tensor | None = None
        """[T] bool, true on tokens of image spans; None: text only."""
        self.keep_features = False
        self.features: Tensor | None = None
        """[T, 3 d] what the drafter reads, once the layers have run; kept when asked for or traced."""
        self._rotations: dict[int, tuple[Rotation, Rotation]] = {}

    def record(self, name: str, value: Tensor) -> None:
        """Keep `value` when this pass is traced."""
        if self.trace is not None:
            self.trace.record(name, value)

    def mark_images(self, images: ImageTokens | None) -> None:
        """Tell the layers which tokens belong to images."""
        self.image = None if images is None else images.types >= 0

    def merge(self, parts: list[Tensor]) -> Tensor:
        """Put together what each of `rows` computed for its tokens, in the order of the packed tokens."""
        if len(parts) == 1 and self._order is None:
            return parts[0]
        joined = torch.cat(parts)
        return joined if self._order is None else joined.index_select(0, self._order)

    def rotations(self, ratio: int, frequencies: Tensor) -> tuple[Rotation, Rotation]:
        """The tokens' rotations ([T, r / 2], [T, 1, r / 2]) with the frequencies of a layer of `ratio`."""
        kind = min(ratio, 1)
        if kind not in self._rotations:
            rotation = Rotation.at(self.position, frequencies)
            self._rotations[kind] = (rotation, rotation.per_head())
        return self._rotations[kind]

    @staticmethod
    def of_documents(tokens: PackedTokens, window: int, trace: Trace | None = None) -> Batch:
        """Documents for training. Raises ValueError when `cu_seqlens` does not cover the tokens."""
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
        rows = [
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
        order = None
        if len(rows) > 1:
            joined = torch.cat([row.padded.flatten()[row.kept] for row in rows])
            order = joined.argsort()
        return Batch(rows, order, trace)

    @staticmethod
    def of_cached(
        cache: PolicyCache, slots: Tensor, lengths: list[int], window: int, trace: Trace | None
    ) -> Batch:
        """New tokens of cached sequences, packed row after row."""
        starts = [cache.length(slot) for slot in slots.tolist()]
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        target = CacheTarget(slots, cache.max_tokens)
        rows = Rows(starts, lengths, offsets[:-1], offsets[-1], window, slots.device, target)
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
