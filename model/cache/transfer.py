"""A cached sequence as tensors, to be kept elsewhere or moved to another cache and go on with the same bits.

Names carry the version of the layout. A cache takes only what fits it exactly: same widths, storage, ring
sizes and dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.cache.progress import Progress

if TYPE_CHECKING:
    from model.cache.main_kv import GroupStorage
    from model.cache.policy_cache import PolicyCache

VERSION = "v1"
_PROGRESS = f"{VERSION}.progress"


def export_slot(cache: PolicyCache, slot: int) -> dict[str, Tensor]:
    """Copies of all that `slot` holds, by name."""
    progress = cache.progress(slot)
    state = {_PROGRESS: torch.tensor(astuple(progress))}
    state |= {name: buffer[slot] for name, buffer in by_slot(cache).items()}
    for name, (store, ratio) in _by_group(cache).items():
        state[name] = store.read_slot(slot, progress.length // ratio)
    return {name: value.clone() for name, value in state.items()}


def import_slot(cache: PolicyCache, state: Mapping[str, Tensor]) -> int:
    """A new slot with what `export_slot` gave.

    Raises:
        CacheFull: no slot or too few pages are free, or the sequence is too long; nothing has changed.
        ValueError: the state is of another layout version, or of a cache of another shape.
    """
    progress = check_slot(cache, state)
    slot = cache.take_over(progress)
    for name, buffer in by_slot(cache).items():
        buffer[slot] = state[name].to(cache.device)
    for name, (store, _) in _by_group(cache).items():
        store.write_slot(slot, state[name].to(cache.device))
    return slot


def by_slot(cache: PolicyCache) -> dict[str, Tensor]:
    """Buffers with one row a slot."""
    windows = {f"{VERSION}.window": cache.windows.storage.transpose(0, 1), f"{VERSION}.tail": cache.tail}
    if cache.draft is not None:
        draft = {"keys": cache.draft.storage.transpose(0, 1), "first": cache.draft.first}
        draft["next"] = cache.draft.next
        windows |= {f"{VERSION}.draft.{name}": buffer for name, buffer in draft.items()}
    return windows | {f"{VERSION}.pending.{layer}": rows for layer, rows in cache.pending.items()}


def _by_group(cache: PolicyCache) -> dict[str, tuple[GroupStorage, int]]:
    """Compressed keys, with how many tokens a key stands for."""
    kinds = (("main", cache.main), ("index", cache.index_keys))
    return {
        f"{VERSION}.{kind}.{layer}": (store, cache.ratios[layer])
        for kind, stores in kinds
        for layer, store in stores.items()
    }


def check_slot(cache: PolicyCache, state: Mapping[str, Tensor]) -> Progress:
    """How far an exported sequence has come. Raises ValueError when it does not fit the cache."""
    names = {_PROGRESS, *by_slot(cache), *_by_group(cache)}
    if names != set(state):
        raise ValueError(
            f"this is not the state of a slot of such a cache (layout {VERSION}): missing "
            f"{sorted(names - set(state))}, unexpected {sorted(set(state) - names)}; export it anew with the "
            "same version and configuration"
        )
    _fit(_PROGRESS, state[_PROGRESS], (len(fields(Progress)),), torch.int64)
    progress = Progress(*state[_PROGRESS].tolist())
    if not 0 <= progress.encoded <= progress.length <= progress.peak or progress.decoded > progress.length:
        raise ValueError(f"the state of a slot contradicts itself: {progress}; export it anew")
    for name, buffer in by_slot(cache).items():
        _fit(name, state[name], tuple(buffer.shape[1:]), buffer.dtype)
    for name, (store, ratio) in _by_group(cache).items():
        _fit(name, state[name], store.slot_shape(progress.length // ratio), store.storage.dtype)
    return progress


def _fit(name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(value.shape) != shape or value.dtype is not dtype:
        raise ValueError(
            f"{name} is {list(value.shape)} {value.dtype} and this cache holds {list(shape)} {dtype}: import "
            "it into a cache of the same configuration, storage, dtype and slack"
        )
