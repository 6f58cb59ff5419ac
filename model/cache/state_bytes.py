"""Cached state as bytes: pages of compressed keys, and what else a session needs to go on where it stopped.

A page's bytes are those the cache holds, so what comes back is bit for bit what went out. The rest, the tail
of a session, depends on where exactly the session stands: windows of all layers, open groups, the compressed
keys of the last page when it is not full, the ids the n-gram memory looks back to, and how far it has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import safetensors.torch
import torch
from torch import Tensor

from model.cache.main_kv import PackedGroupCache
from model.cache.policy_cache import PolicyCache
from model.cache.progress import Progress
from model.cache.transfer import by_slot

_PROGRESS = "progress"


def page_bytes(cache: PolicyCache) -> int:
    """Bytes of a page in all layers."""
    return sum(group.storage.shape[1] for group in _groups(cache))


def page_rows(cache: PolicyCache, pages: Sequence[int]) -> Tensor:
    """[pages, page bytes] the content of `pages`, on the CPU."""
    index = torch.tensor(pages, dtype=torch.int64, device=cache.device)
    parts = [group.storage.index_select(0, index) for group in _groups(cache)]
    return torch.cat(parts, dim=1).cpu()


def read_pages(cache: PolicyCache, pages: Sequence[int]) -> list[bytes]:
    """The content of `pages`."""
    return [row.tobytes() for row in page_rows(cache, pages).numpy()]


def write_pages(cache: PolicyCache, pages: Sequence[int], contents: Sequence[bytes]) -> None:
    """Make `pages` hold `contents`."""
    if not pages:
        return
    index = torch.tensor(pages, dtype=torch.int64, device=cache.device)
    rows = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).view(len(pages), -1)
    rows, begin = rows.to(cache.device), 0
    for group in _groups(cache):
        width = group.storage.shape[1]
        group.storage.index_copy_(0, index, rows[:, begin : begin + width])
        begin += width
    assert begin == rows.shape[1], f"a page has {begin} bytes, not {rows.shape[1]}"


def _groups(cache: PolicyCache) -> list[PackedGroupCache]:
    """The caches of main and index keys, in the order of a page's bytes."""
    groups: list[PackedGroupCache] = []
    for layer in sorted(cache.main):
        for group in (cache.main[layer], cache.index_keys[layer]):
            assert isinstance(group, PackedGroupCache), "pages are those of packed storage"
            groups.append(group)
    return groups


def pack_tail(state: dict[str, Tensor]) -> bytes:
    """Tensors by name as the bytes of a safetensors file."""
    return safetensors.torch.save({name: value.contiguous().cpu() for name, value in state.items()})


def unpack_tail(payload: bytes) -> dict[str, Tensor]:
    """The inverse of `pack_tail`."""
    return safetensors.torch.load(payload)


def tail_state(cache: PolicyCache, slot: int) -> dict[str, Tensor]:
    """All of `slot` but the compressed keys on its pages."""
    progress = torch.tensor(astuple(cache.progress(slot)))
    return places(cache, slot) | {_PROGRESS: progress}


def progress_of(state: dict[str, Tensor]) -> Progress:
    """How far the sequence of a tail has come."""
    return Progress(*state[_PROGRESS].tolist())


def fits(cache: PolicyCache, state: dict[str, Tensor]) -> bool:
    """Whether a tail comes from a cache with the same rings."""
    here = places(cache, 0)
    return here.keys() <= state.keys() and all(state[name].shape == here[name].shape for name in here)


def restore_tail(cache: PolicyCache, slot: int, state: dict[str, Tensor]) -> None:
    """Fill `slot`, which has the progress of `state`, with the rest of it."""
    for name, place in places(cache, slot).items():
        place.copy_(state[name])


def places(cache: PolicyCache, slot: int) -> dict[str, Tensor]:
    """Where a slot's windows, look-back ids and open groups lie."""
    return {name: buffer[slot] for name, buffer in by_slot(cache).items()}
