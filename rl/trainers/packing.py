"""Packing: whole samples laid end to end in micro-batches of nearly equal size, none beyond a budget."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.batch import floors_from_starts
from model.choices import Choices, SamplingMask
from model.images import PreparedImage
from model.vision import TokenType
from rl.trainers.data import Sample
from rl.trainers.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples as one row of T tokens.

    Attributes:
        token_ids: int64 [T].
        cu_seqlens: int64 [N + 1], where each sample starts, and T.
        loss_mask: bool [T].
        logprobs: float32 [T], the sampler's.
        advantages: float32 [T].
        versions: int64 [T].
        segment_ids: int64 [T], which of the N samples a token belongs to.
        indices: which samples of the batch these are, [N].
        choices: what to choose for the T tokens; None: all is free.
        sampling_mask: what the T tokens could have been; None: anything.
        image_types: int64 [T], `TokenType`s; None: text only.
        images: those among the tokens, in their order.
        idle: it only keeps this rank in step with others that have one more: nothing of it counts.
        window_floors: int64 [T, 2], positions of its sample before which a token sees no window keys, in the
            encoder and the decoder; None: no sampler lost a window.
    """

    token_ids: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    logprobs: Tensor
    advantages: Tensor
    versions: Tensor
    segment_ids: Tensor
    indices: tuple[int, ...]
    choices: Choices | None = None
    sampling_mask: SamplingMask | None = None
    window_floors: Tensor | None = None
    image_types: Tensor | None = None
    images: tuple[PreparedImage, ...] = ()
    idle: bool = False


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partitions the indices of `lengths` into bins of at most `budget` tokens, few and evenly filled.

    First-fit-decreasing finds how many bins do; then the longest goes to the emptiest bin in turn, which
    evens them out. Where that overflows a bin, the first-fit bins stay.

    Raises:
        ValueError: One length alone exceeds the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if order and lengths[order[0]] > budget:
        raise ValueError(
            f"a sample has {lengths[order[0]]} tokens, the micro-batch budget is {budget}; "
            "raise trainer.token_budget, or lower trainer.max_tokens to cut samples"
        )
    first_fit = _first_fit(order, lengths, budget)
    even = _even(order, lengths, len(first_fit))
    fits = all(sum(lengths[i] for i in group) <= budget for group in even)
    return [sorted(group) for group in (even if fits else first_fit) if group]


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    free: list[int] = []
    for i in order:
        slot = next((b for b, room in enumerate(free) if room >= lengths[i]), None)
        if slot is None:
            bins.append([])
            free.append(budget)
            slot = len(bins) - 1
        bins[slot].append(i)
        free[slot] -= lengths[i]
    return bins


def _even(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, b) for b in range(count)]
    for i in order:
        load, members, b = heapq.heappop(heap)
        bins[b].append(i)
        heapq.heappush(heap, (load + lengths[i], members + 1, b))
    return bins


def deal(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Bins of `pack` for each of several ranks: equally many, and of like size at each turn.

    Ranks wait for each other in every micro-batch, so those they run at the same time should be equally long.
    Where there are fewer samples than bins, the last ones are empty.
    """
    bins = pack(lengths, budget)
    count = -(-len(bins) // ranks) * ranks
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    even = _even(order, lengths, count)
    if any(sum(lengths[i] for i in group) > budget for group in even):
        even = bins + [[] for _ in range(count - len(bins))]
    even.sort(key=lambda group: -sum(lengths[i] for i in group))
    return [[sorted(group) for group in even[rank::ranks]] for rank in range(ranks)]


def micro_batches(
    samples: Sequence[Sample], budget: int, device: torch.device, ranks: Ranks = ALONE
) -> Iterator[MicroBatch]:
    """Yields this rank's micro-batches of a batch; every sample is in exactly one of one rank.

    All ranks get equally many; what one lacks is an idle one.
    """
    lengths = [len(sample) for sample in samples]
    for group in pack(lengths, budget) if ranks.alone else deal(lengths, budget, ranks.size)[ranks.rank]:
        if group:
            yield _collate([samples[i] for i in group], tuple(group), device)
        else:
            shortest = lengths.index(min(lengths))
            silent = replace(samples[shortest], loss_mask=np.zeros(lengths[shortest], dtype=bool))
            yield replace(_collate([silent], (shortest,), device), idle=True)


def _collate(samples: Sequence[Sample], indices: tuple[int, ...], device: torch.device) -> MicroBatch:
    lengths = np.array([len(sample) for sample in samples])

    def column(name: str, dtype: torch.dtype) -> Tensor:
        joined = np.concatenate([getattr(sample, name) for sample in samples])
        return torch.from_numpy(joined).to(device=device, dtype=dtype)

    choices = Choices.join([sample.choices for sample in samples], lengths.tolist())
    mask, floors = _sampling_mask(samples), _window_floors(samples)
    return MicroBatch(
        token_ids=column("token_ids", torch.int64),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], lengths.cumsum()])).to(device),
        loss_mask=column("loss_mask", torch.bool),
        logprobs=column("logprobs", torch.float32),
        advantages=column("advantages", torch.float32),
        versions=column("policy_version", torch.int64),
        segment_ids=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)).to(device),
        indices=indices,
        choices=None if choices is None else choices.to(device),
        sampling_mask=None if mask is None else mask.to(device),
        window_floors=None if floors is None else floors.to(device),
        **_images(samples, device),
    )


def _images(samples: Sequence[Sample], device: torch.device) -> dict[str, Any]:
    if all(sample.images is None for sample in samples):
        return {}
    types = [
        np.full(len(sample), TokenType.TEXT, np.int64) if sample.images is None else sample.images.types
        for sample in samples
    ]
    return {
        "image_types": torch.from_numpy(np.concatenate(types)).to(device=device, dtype=torch.int64),
        "images": tuple(image for s in samples if s.images is not None for image in s.images.images),
    }


def _sampling_mask(samples: Sequence[Sample]) -> SamplingMask | None:
    if all(sample.sampling_mask is None for sample in samples):
        return None
    return SamplingMask.join([sample.sampling_mask or SamplingMask.none(len(sample)) for sample in samples])


def _window_floors(samples: Sequence[Sample]) -> Tensor | None:
    if all(start == (0, 0) for sample in samples for start in sample.replay_starts):
        return None
    return torch.cat([floors_from_starts(len(sample), sample.replay_starts) for sample in samples])
