"""What the sampler chose over a branch, from the records of its turns: for the trainer to choose the same.

Each turn records its own part. Where several say something of a token, the first counts: it is what the
tokens after it were sampled from, whatever a later version would have chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from envs.types import Packed, Turn
from model.choices import FREE, Choices, SamplingMask

ReplayChoices = Literal["off", "experts", "selections"]
"""No recorded choice, expert ids, or expert ids and the keys that attention selected."""


def branch_choices(branch: Sequence[Turn], replay: ReplayChoices) -> Choices | None:
    """The choices over the tokens of a branch, `FREE` where none is recorded; None without any.

    Raises:
        ValueError: A turn's record reaches past the branch, or turns recorded different shapes.
    """
    if replay == "off":
        return None
    size = sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in branch)
    experts = _filled(size, _recorded(branch, None))
    if replay == "experts":
        return None if experts is None else Choices(experts)
    layers = sorted({layer for turn in branch if turn.replay for layer in turn.replay.selections})
    selections = {layer: _filled(size, _recorded(branch, layer)) for layer in layers}
    known = {layer: keys for layer, keys in selections.items() if keys is not None}
    return None if experts is None and not known else Choices(experts, known or None)


def branch_mask(branch: Sequence[Turn]) -> SamplingMask | None:
    """What each token of a branch could have been; None when nothing was cut off.

    Raises:
        ValueError: A turn's mask is not over its sampled tokens.
    """
    if not any(turn.replay and turn.replay.kept_counts for turn in branch):
        return None
    return SamplingMask.join(
        [mask for turn in branch for mask in (SamplingMask.none(len(turn.prompt_ids)), _mask(turn))]
    )


def _mask(turn: Turn) -> SamplingMask:
    sampled, replay = len(turn.completion_ids), turn.replay
    if replay is None or replay.kept_counts is None or replay.kept_ids is None:
        return SamplingMask.none(sampled)
    counts, ids = _array(replay.kept_counts), _array(replay.kept_ids)
    if len(counts) != sampled:
        raise ValueError(
            f"a turn of {sampled} sampled tokens records what {len(counts)} of them were drawn from; the "
            "engine must record all of a turn's tokens"
        )
    offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return SamplingMask(torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(offsets))


def _recorded(branch: Sequence[Turn], layer: int | None) -> Iterator[tuple[int, np.ndarray]]:
    """Where each turn's record of experts (or of a layer's selections) begins, and the record."""
    for turn in branch:
        if turn.replay is not None:
            packed = turn.replay.experts if layer is None else turn.replay.selections.get(layer)
            if packed is not None:
                yield turn.replay.start, _array(packed)


def _filled(size: int, parts: Iterator[tuple[int, np.ndarray]]) -> Tensor | None:
    """Parts [m, ..., k] that begin at their places, over `size` tokens; narrower ones end with `FREE`."""
    known = list(parts)
    if not known:
        return None
    widest = max(part.shape[-1] for _, part in known)
    whole = np.full((size, *known[0][1].shape[1:-1], widest), FREE, np.int64)
    for start, part in known:
        target = whole[start : start + len(part), ..., : part.shape[-1]]
        if target.shape != part.shape:
            raise ValueError(
                f"recorded choices of shape {part.shape} from token {start} on do not fit a branch of {size} "
                f"tokens with {whole.shape[1:]} choices a token; record all turns with one model"
            )
        np.copyto(target, part, where=(target == FREE).all(-1, keepdims=True))
    return torch.from_numpy(whole)


def _array(packed: Packed) -> np.ndarray:
    return np.frombuffer(packed.data, f"<{packed.kind}").reshape(packed.shape)
