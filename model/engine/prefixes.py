"""How an engine uses a prefix store: requests begin where their history is known, turns leave theirs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from model.cache.page_keys import ImageMark
from model.cache.policy_cache import CacheFull, PolicyCache
from model.cache.prefix import PrefixStore


class LooksBack(Protocol):
    """What is asked of a policy."""

    def look_back_ids(self, token_ids: Tensor, image: Tensor | None = None) -> Tensor:
        """Returns what n-grams see of the tokens before a sequence is resumed."""
        ...


@dataclass(frozen=True, slots=True)
class Begun:
    """A place in the cache, and what of a history it holds already."""

    slot: int
    cached: int
    """The next token to compute. Tokens from here to `known` only get their windows anew."""
    known: int
    """Tokens whose compressed keys are there."""
    replay_starts: tuple[int, ...]
    """Positions at which the encoder's windows began anew, this replay included."""


class Prefixes:
    """A store in the hands of one engine.

    Args:
        store: The store; its page size, replay and version are those of the engine.
        policy: The engine's policy.
    """

    def __init__(self, store: PrefixStore, policy: LooksBack) -> None:
        self.store = store
        self._policy = policy

    def begin(
        self,
        cache: PolicyCache,
        token_ids: np.ndarray,
        images: Sequence[ImageMark] = (),
        image: np.ndarray | None = None,
    ) -> Begun:
        """Returns a slot with as much of a history as is known, which may be nothing.

        Args:
            cache: The engine's cache.
            token_ids: The history [n].
            images: The images in it.
            image: Which of its tokens belong to images, bool [n]; None: none.

        Raises:
            CacheFull: No slot is free.
        """

        def look_back(end: int) -> Tensor:
            begin = max(0, end - cache.reach)
            types = None if image is None else torch.from_numpy(image[begin:end])
            return self._policy.look_back_ids(torch.from_numpy(token_ids[begin:end].astype(np.int64)), types)

        hit = self.store.lookup(token_ids, images, cache=cache)
        try:
            loaded = self.store.load(cache, hit, look_back) if hit else None
        except CacheFull:
            # Pages are short: what was found does not fit now, and page by page it may.
            loaded = None
        if loaded is None:
            return Begun(cache.allocate(), 0, 0, ())
        cached = loaded.global_tokens - loaded.replay
        starts = loaded.replay_starts if not loaded.replay else (*loaded.replay_starts, cached)
        return Begun(loaded.slot, cached, loaded.global_tokens, tuple(sorted({*starts} - {0})))

    def keep(
        self,
        cache: PolicyCache,
        slot: int,
        token_ids: np.ndarray,
        images: Sequence[ImageMark] = (),
        replay_starts: Sequence[int] = (),
    ) -> None:
        """Keeps what `slot` holds of a history, whole or not.

        Args:
            cache: The engine's cache.
            slot: Where.
            token_ids: The history, at least as long as what the slot holds.
            images: The images in it.
            replay_starts: As `Begun.replay_starts` says.
        """
        length = cache.length(slot)
        begun = [mark for mark in images if mark.position < length]
        self.store.save(cache, slot, token_ids[:length], begun, replay_starts=replay_starts)

    def update(self, cache: PolicyCache, version: int) -> None:
        """Goes over to new weights: sequences begun before are served on, and never kept."""
        cache.generation = version
        self.store.set_version(version)
