"""What the engine recorded of a turn, between its forms: the engine's, the log's, and `envs.types`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from envs.types import Packed, Replay
from model.choices import FREE, SamplingMask
from model.engine.columns import ExpertIds, Selections
from rl.engines.base import Completion

Kept = tuple[np.ndarray, np.ndarray]
"""How many ids each of n tokens was drawn from (0: all), and these ids, token after token."""


def replay_of(completion: Completion) -> Replay | None:
    """The record of what the engine chose, or None where it recorded nothing."""
    experts, selections = completion.expert_ids, completion.selections
    kept = kept_of(completion.sampling_mask)
    states = np.array(completion.states, np.uint8)
    if experts is None and selections is None and kept is None and not states.size:
        return None
    chosen = {} if selections is None else selections.keys
    start = experts.start if experts is not None else selections.start if selections is not None else 0
    return Replay(
        start,
        None if experts is None else pack(experts.ids, "i2"),
        {layer: pack(keys, "i4") for layer, keys in chosen.items()},
        None if kept is None else pack(kept[0], "u4"),
        None if kept is None else pack(kept[1], "i4"),
        pack(states, "u1") if states.size else None,
    )


def pack(array: np.ndarray, kind: str) -> Packed:
    """An array as bytes."""
    return Packed(kind, array.shape, np.ascontiguousarray(array, f"<{kind}").tobytes())


def unpack(packed: Packed) -> np.ndarray:
    """The array of `pack`, read-only."""
    return np.frombuffer(packed.data, f"<{packed.kind}").reshape(packed.shape)


def kept_of(mask: SamplingMask | None) -> Kept | None:
    """A mask as the log's columns; None where it cuts nothing off."""
    if mask is None or not len(mask.ids):
        return None
    return np.diff(mask.offsets.numpy()), mask.ids.numpy()


def mask_of(kept: Kept | None) -> SamplingMask | None:
    """The mask of `kept_of`."""
    if kept is None:
        return None
    offsets = np.concatenate([[0], np.cumsum(kept[0], dtype=np.int64)])
    return SamplingMask(torch.from_numpy(kept[1].astype(np.int64)), torch.from_numpy(offsets))


def experts_after(experts: np.ndarray | None, history: int, *, unfinished: bool) -> ExpertIds | None:
    """Logged experts of the inputs of a turn's tokens, which follow `history` tokens of the branch.

    Of an unfinished turn the tokens before are said to be unknown, so that the engine, which computes them
    again, reports them too.
    """
    if experts is None or not len(experts):
        return None
    if not unfinished:
        return ExpertIds(history - 1, experts)
    return ExpertIds(0, _after(experts, history))


def selections_after(
    selections: Mapping[int, np.ndarray] | None, history: int, *, unfinished: bool
) -> Selections | None:
    """Logged selections, as `experts_after`."""
    if not selections:
        return None
    if not unfinished:
        return Selections(history - 1, dict(selections))
    return Selections(0, {layer: _after(keys, history) for layer, keys in selections.items()})


def _after(rows: np.ndarray, history: int) -> np.ndarray:
    return np.concatenate([np.full((history - 1, *rows.shape[1:]), FREE, rows.dtype), rows])
