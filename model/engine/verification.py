"""How many drafts to check: as many as make the whole batch fastest.

A draft survives when it and all before it are accepted. Checking one more costs time for everyone in the
batch and gives a token with the chance of its survival, so the best drafts of all requests go first, as long
as tokens per second rise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from model.dspark import Drafter

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache
    from model.policy import Policy

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds: of a draft for so many requests, of a pass over so many tokens; both rise by size.

    Between measured sizes cost is linear, beyond the last it is the last.
    """

    draft_sizes: tuple[int, ...]
    draft_seconds: tuple[float, ...]
    pass_sizes: tuple[int, ...]
    pass_seconds: tuple[float, ...]

    def draft(self, requests: int) -> float:
        """Seconds to draft for `requests`."""
        return float(np.interp(requests, self.draft_sizes, self.draft_seconds))

    def run(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of a pass over `tokens`."""
        return np.interp(tokens, self.pass_sizes, self.pass_seconds)


def choose_budget(survival: np.ndarray, costs: Costs) -> int:
    """The number of drafts of the batch for which tokens per second are expected to be most.

    B drafts give (requests + the sum of the B best survivals) tokens in the seconds of a draft and of a pass
    over requests + B tokens. 0 drafts need no drafting at all. Of equals the smaller number is taken.

    Args:
        survival: float64 [R, K], falling along a row; 0 where a slot may not be used.
        costs: measured.
    """
    requests = survival.shape[0]
    best = np.sort(survival[survival > 0])[::-1]
    counts = np.arange(best.size + 1)
    seconds = costs.run(requests + counts) + np.where(counts > 0, costs.draft(requests), 0.0)
    expected = requests + np.concatenate(([0.0], best.cumsum()))
    return int(np.argmax(expected / seconds))


def admit(survival: np.ndarray, budget: int) -> np.ndarray:
    """Shares out `budget` drafts: those most likely to survive, int64 [R] for each request.

    Survival falls along a row, so what is taken of a row is its beginning; of equals the earlier slot goes
    first, then the earlier row.
    """
    slot, row = np.meshgrid(np.arange(survival.shape[1]), np.arange(survival.shape[0]))
    order = np.lexsort((row.ravel(), slot.ravel(), -survival.ravel()))[:budget]
    taken = order[survival.ravel()[order] > 0]
    return np.bincount(row.ravel()[taken], minlength=survival.shape[0])


def profile(policy: Policy, cache: PolicyCache, requests: int) -> Costs:
    """Measures what drafts and passes cost on this machine, for 1, 2, 4 ... `requests` sequences.

    Takes slots of `cache` for the while; the best of a few repeats counts.
    """
    drafter = policy.mtp
    assert drafter is not None and cache.draft is not None
    requests = min(requests, cache.free_slots)
    if cache.pages is not None:
        requests = min(requests, cache.pages.free_pages)
    slots = [cache.allocate() for _ in range(requests)]
    width = min(policy.config.dspark_block_size + 1, cache.max_tokens)
    drafts: dict[int, float] = {}
    passes: dict[int, float] = {}
    try:
        for count in _sizes(requests):
            some = torch.tensor(slots[:count], device=policy.device)
            drafts[count] = _best(lambda some=some: _draft(policy, drafter, cache, some))
            for length in (1, width):
                seconds = _best(lambda some=some, length=length: _extend(policy, cache, some, length))
                passes[count * length] = min(seconds, passes.get(count * length, seconds))
    finally:
        for slot in slots:
            cache.free(slot)
    return Costs(*_rising(drafts), *_rising(passes))


def _sizes(most: int) -> list[int]:
    sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [*sizes, most]


def _draft(policy: Policy, drafter: Drafter, cache: PolicyCache, slots: torch.Tensor) -> None:
    assert cache.draft is not None
    drafter.draft(policy, cache.draft, torch.zeros_like(slots), rows=slots)


def _extend(policy: Policy, cache: PolicyCache, slots: torch.Tensor, length: int) -> None:
    token_ids = torch.zeros(len(slots), length, dtype=torch.int64, device=policy.device)
    policy.extend(cache, slots, token_ids, torch.full_like(slots, length))
    for slot in slots.tolist():
        cache.truncate(slot, 0)


def _best(action: Callable[[], None]) -> float:
    action()
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _rising(measured: dict[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Sizes in order; a larger size never costs less than a smaller one, whatever the clock said."""
    sizes = tuple(sorted(measured))
    return sizes, tuple(np.maximum.accumulate([measured[size] for size in sizes]).tolist())
