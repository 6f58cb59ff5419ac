"""How an engine uses a prefix store: requests begin where their history is known, turns leave theirs.

What comes from a store was computed with windows of its own. A tail brings them: the row goes on with the
floors the tail was computed with. Keys alone were computed with windows that are lost: the row fills its
windows by a replay and, unless that is exact, what follows is flagged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model.cache.page_keys import ImageMark
from model.cache.policy_cache import CacheFull
from model.cache.prefix import Loaded, PrefixStore
from model.engine.policy import Policy
from model.engine.replay import Bound, Floor, ReplayRule
from model.vision import ImageTokens, TokenType


@dataclass(frozen=True, slots=True)
class Wanted:
    """A row that needs caches."""

    token_ids: np.ndarray
    images: ImageTokens | None
    floor: Floor
    bound: Bound


@dataclass(frozen=True, slots=True)
class Begun:
    """A place in the cache with a part of a row's history."""

    slot: int
    cached: int
    """The next token to compute. Where windows were lost, compressed keys go further than that."""
    floor: Floor
    replayed: bool
    """Whether windows had to be replayed that were there when the history was sampled."""


class Prefixes:
    """A store in the hands of one engine.

    Args:
        store: The store.
        policy: The engine's policy.
        rule: The engine's rule for floors.

    Raises:
        ValueError: The store is for another configuration or replay, or the policy does not round its keys.
    """

    def __init__(self, store: PrefixStore, policy: Policy, rule: ReplayRule) -> None:
        if store.config != policy.config or store.replay != rule.mode or not policy.fake_quant:
            raise ValueError(
                f"a prefix store for replay={store.replay!r}, rounded keys and a configuration does not "
                f"fit this engine (replay={rule.mode!r}, fake_quant={policy.fake_quant}): make it with "
                "the config and replay of the engine"
            )
        self.store = store
        self._policy, self._rule = policy, rule

    def begin(self, cache: Any, wanted: Wanted) -> Begun | None:
        """Returns a place with what is known of a row's history; None when that is nothing of use."""
        end = self._rule.length(wanted.floor, wanted.token_ids.size)
        marks = image_marks(wanted.images)
        hit = self.store.lookup(wanted.token_ids, marks, cache=cache, end=end)
        if not hit or (wanted.bound is Bound.TURN and not hit.window and self._rule.mode != "exact"):
            return None
        try:
            loaded = self.store.load(cache, hit, lambda at: self._look_back(wanted, at))
        except CacheFull:
            return None
        if loaded is None:
            return None
        begun = self._judge(cache, wanted, loaded)
        if begun is None:
            cache.free(loaded.slot)
        return begun

    def keep(self, cache: Any, slot: int, token_ids: np.ndarray, images: ImageTokens | None) -> None:
        """Keeps what `slot` holds, which are the first tokens of `token_ids`, all of the store's version."""
        length = cache.length(slot)
        marks = [mark for mark in image_marks(images) if mark.position < length]
        self.store.save(cache, slot, token_ids[:length], marks)

    def _judge(self, cache: Any, wanted: Wanted, loaded: Loaded) -> Begun | None:
        """What a row may do with what was loaded; None when it would not go on as it should."""
        rule, slot, size = self._rule, loaded.slot, wanted.token_ids.size
        known, resume = loaded.global_tokens, loaded.global_tokens - loaded.replay
        encoder, decoder = cache.floors(slot)
        if rule.mode == "exact":
            floor = wanted.floor if loaded.replay else rule.floor((0, decoder), known, size)
            return Begun(slot, resume, floor, False)
        if loaded.replay:
            if wanted.bound is Bound.TURN:
                return None
            return Begun(slot, resume, (resume, max(resume, wanted.floor[1])), True)
        floor = rule.floor((encoder, decoder), known, size)
        if wanted.bound is not Bound.NOTHING and floor != wanted.floor:
            return None
        return Begun(slot, known, floor, encoder > 0 or len(loaded.replay_starts) > 0)

    def _look_back(self, wanted: Wanted, end: int) -> Tensor:
        begin = max(0, end - self._policy.config.engram_max_ngram_size)
        ids = torch.from_numpy(wanted.token_ids[begin:end].astype(np.int64))
        image = None if wanted.images is None else _types(wanted.images, begin, end) >= 0
        return self._policy.look_back_ids(ids, image)


def image_marks(images: ImageTokens | None) -> list[ImageMark]:
    """Where the images of a history begin, with a digest of what the policy sees of each."""
    if images is None:
        return []
    starts = (images.types == TokenType.START).nonzero().flatten().tolist()
    marks, row = [], 0
    for begin, end in zip(starts, [*starts[1:], images.types.shape[0]], strict=True):
        types = images.types[begin:end]
        count = int((types == TokenType.IMAGE).sum())
        pixels = images.rows[row : row + count].float().cpu().contiguous().numpy().tobytes()
        grid = types[types >= 0].to(torch.int8).numpy().tobytes()
        marks.append(ImageMark(begin, grid + pixels))
        row += count
    return marks


def _types(images: ImageTokens, begin: int, end: int) -> Tensor:
    """Types of the tokens [begin, end) of a history; text where the images say nothing."""
    held = images.types[begin:end]
    return torch.nn.functional.pad(held, (0, end - begin - held.shape[0]), value=int(TokenType.TEXT))
