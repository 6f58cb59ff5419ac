"""Speculative decoding: the drafter proposes a few tokens, the policy checks them all in one pass.

How many drafts are checked is decided before they are drawn: a rule that looked at a draft to decide whether
to check it would no longer leave the distribution as it is. The number of drafts of the whole batch therefore
follows from the confidences of the step before; how they are shared out among the requests may follow the
present ones, since a slot's chance to survive is known before the slot's token is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from torch import Tensor

from model.batch import NewTokens
from model.choices import Capture
from model.dspark import Draft
from model.engine.acceptance import Attempt, Rule
from model.engine.rows import Rows
from model.engine.sampler import Sampled
from model.engine.verification import Costs, admit, choose_budget, profile
from model.layers.exact import exact_mode

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache
    from model.policy import Policy

_PROBE_STEPS = 64
"""Where drafting does not pay, it is tried again after so many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How to speculate.

    Attributes:
        rule: which drafts are accepted.
        length: drafts checked for each request and step, at most the drafter's block; None lets measured
            costs and the drafter's confidence choose, so that the batch as a whole is fastest.
    """

    rule: Rule = "rejection"
    length: int | None = None

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule is {' or '.join(get_args(Rule))}, not {self.rule!r}")
        if self.length is not None and self.length < 1:
            raise ValueError(
                f"length is the drafts checked a step, at least 1, not {self.length}; to switch speculation "
                "off, leave it out"
            )


@dataclass(slots=True)
class SpeculationCounters:
    """Steps of single requests (`rows`), drafts checked, and drafts that became tokens."""

    rows: int = 0
    checked: int = 0
    accepted: int = 0

    def summary(self) -> dict[str, float]:
        """The counters by name, for a report."""
        return {
            "drafts.steps": float(self.rows),
            "drafts.checked": float(self.checked),
            "drafts.accepted": float(self.accepted),
        }

    def add(self, rows: int, checked: int, accepted: int) -> None:
        """Counts a step."""
        self.rows += rows
        self.checked += checked
        self.accepted += accepted


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn for each of `rows` int64 [n], of whose caches `advance` more tokens are computed."""

    rows: np.ndarray
    drawn: Sampled
    advance: int = 0


class Speculator:
    """Drafts and checks for the sequences of one cache.

    The drafter's window of a sequence holds what the policy computed of all its cached tokens: `extend`, in
    place of the policy's, sees to that in a prefill, and `step` when it decodes.
    """

    def __init__(self, policy: Policy, cache: PolicyCache, options: Speculation, costs: Costs | None) -> None:
        """Set up; `costs` are needed where `options.length` is None.

        Raises:
            ValueError: The policy has no drafter, or `options` do not fit it.
        """
        if policy.mtp is None:
            raise ValueError(
                "this policy has no drafter (num_nextn_predict_layers is 0): leave speculation out, or take "
                "a model that has one, such as the preset nano_draft"
            )
        self.slots = policy.config.dspark_block_size
        if options.length is not None and options.length > self.slots:
            raise ValueError(f"length {options.length} is more than the drafter's block of {self.slots}")
        assert options.length is not None or costs is not None
        self.counters = SpeculationCounters()
        self._policy, self._drafter, self._options, self._costs = policy, policy.mtp, options, costs
        self._steps = 0
        self.attach(cache)

    @classmethod
    def open(cls, policy: Any, cache: Any, options: Speculation, requests: int) -> Speculator:
        """One for up to `requests` sequences at a time; measures costs where `options` ask for it."""
        costs = None
        if policy.config.num_nextn_predict_layers and options.length is None:
            with torch.inference_mode(), exact_mode(policy.exact):
                costs = profile(policy, cache, requests)
        return cls(policy, cache, options, costs)

    def attach(self, cache: Any) -> None:
        """Goes over to an empty cache."""
        self._cache: PolicyCache = cache
        assert self._cache.draft is not None
        self._window = self._cache.draft
        self._survival = np.ones((self._cache.max_sequences, self.slots))

    def extend(self, cache: Any, slots: Tensor, token_ids: Tensor, lengths: Tensor, **options: Any) -> Tensor:
        """`Policy.extend`, after which the drafter knows the new tokens too."""
        assert cache is self._cache
        new = NewTokens()
        hidden = self._policy.extend(cache, slots, token_ids, lengths, new=new, **options)
        assert new.counts is not None
        if new.hidden is not None:
            ends = [self._cache.decoded(slot) for slot in slots.tolist()]
            self._window.begin(slots, torch.tensor(ends, device=slots.device) - new.counts)
            with exact_mode(self._policy.exact):
                self._observe(slots, new, new.counts.cumsum(0) - new.counts, new.counts)
        self._survival[slots.cpu().numpy()] = 1.0
        return hidden

    def step(self, table: Rows, rows: np.ndarray, most: int, capture: bool) -> tuple[list[Drawn], bool]:
        """Draws one or more tokens for each of `rows`.

        Args:
            table: the sequences; their experts are noted when `capture` says so, all else is the caller's.
            rows: int64 [n], which of them.
            most: drafts a row that there is room for in the caches.
            capture: whether experts are captured.

        Returns:
            The tokens, first those of all rows, then the second ones and so on; and False where the caches
            may hold what is not a number.
        """
        with exact_mode(self._policy.exact):
            return self._step(table, rows, most, capture)

    def _step(self, table: Rows, rows: np.ndarray, most: int, capture: bool) -> tuple[list[Drawn], bool]:
        self._steps += 1
        slots, starts = table.slot[rows], table.length[rows]
        room = np.minimum(table.limit[rows] - starts, most + 1)
        anchors, on_device = table.token_ids[rows, starts - 1].astype(np.int64), self._to_device(slots)
        attempt = Attempt(self.slots, starts, table.sampling.take(rows), self._options.rule)
        self._window.begin(on_device, self._to_device(starts - 1))
        drafts, lengths = self._draft(attempt, slots, anchors, room)
        new, counts = NewTokens(), lengths + 1
        chosen = Capture(selections_too=bool(table.selections)) if capture else None
        ids = self._to_device(np.concatenate((anchors[:, None], drafts), axis=1))
        device_counts = self._to_device(counts)
        self._policy.extend(self._cache, on_device, ids, device_counts, new=new, capture=chosen)
        assert new.hidden is not None
        verified = attempt.verify(self._policy.logits(new.hidden), drafts, lengths)
        ends = table.is_stop(rows, verified.token_ids) | ~verified.finite
        kept = _until(ends, verified.accepted)
        first = np.cumsum(counts) - counts
        self._observe(on_device, new, self._to_device(first), self._to_device(kept + 1))
        self._take_back(slots, lengths - kept)
        if chosen is not None:
            table.capture(rows, kept + 1, chosen, _first(counts, kept + 1))
        self.counters.add(len(rows), int(lengths.sum()), int(kept.sum()))
        parts = []
        for place in range(int(kept.max()) + 1):
            some = np.flatnonzero(kept >= place)
            parts.append(Drawn(rows[some], verified.place(some, place), 1))
        return parts, verified.clean

    def _take_back(self, slots: np.ndarray, excess: np.ndarray) -> None:
        for slot, count in zip(slots.tolist(), excess.tolist(), strict=True):
            if count:
                self._cache.truncate(slot, self._cache.length(slot) - count)

    def _observe(self, slots: Tensor, new: NewTokens, first: Tensor, lengths: Tensor) -> None:
        """Writes features of the next `lengths` [B] tokens, which begin at `first` [B] of the packed ones."""
        assert new.features is not None
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        index = first[:, None] + torch.minimum(columns, (lengths[:, None] - 1).clamp_min(0))
        features = new.features[index.clamp_max(len(new.features) - 1)]
        fake_quant = self._policy.fake_quant
        self._drafter.observe(self._window, features, fake_quant, rows=slots, lengths=lengths)

    def _draft(
        self, attempt: Attempt, slots: np.ndarray, anchors: np.ndarray, room: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Drafts [R, K] and how many of them are to be checked [R]."""
        budget = self._budget(slots, room)
        if not budget:
            return np.zeros((len(slots), 0), np.int64), np.zeros(len(slots), np.int64)
        draft = self._drafter.draft(
            self._policy,
            self._window,
            self._to_device(anchors),
            rows=self._to_device(slots),
            choose=attempt.choose,
        )
        lengths = self._lengths(slots, draft, budget, room)
        return draft.token_ids[:, : int(lengths.max())].cpu().numpy(), lengths

    def _budget(self, slots: np.ndarray, room: np.ndarray) -> int:
        """How many drafts the whole batch checks: known before they are drawn."""
        if self._options.length is not None:
            return int(np.minimum(self._options.length, room - 1).sum())
        assert self._costs is not None
        budget = choose_budget(_within(self._survival[slots], room), self._costs)
        if not budget and self._steps % _PROBE_STEPS == 0:
            return int(np.minimum(1, room - 1).sum())
        return budget

    def _lengths(self, slots: np.ndarray, draft: Draft, budget: int, room: np.ndarray) -> np.ndarray:
        survival = draft.confidence.double().sigmoid().cumprod(1).cpu().numpy()
        survival = np.where(np.isfinite(survival), survival, 0.0)
        finite = draft.logits.isfinite().all(-1).cumprod(1).cpu().numpy().astype(bool)
        survival = np.where(finite, survival, 0.0)
        self._survival[slots] = survival
        if self._options.length is not None:
            wanted = np.minimum(self._options.length, room - 1)
            return np.minimum(wanted, finite.sum(1))
        return admit(_within(survival, room), budget)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._policy.device)


def _until(ends: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """How many drafts [R] stay when nothing follows the first place where `ends` [R, K + 1] is set."""
    first = np.where(ends.any(axis=1), ends.argmax(axis=1), ends.shape[1])
    return np.minimum(accepted, first)


def _first(counts: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Packed indices of the first `kept` [R] of each row's `counts` [R] tokens."""
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.flatnonzero(place < np.repeat(kept, counts))


def _within(survival: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Survival with 0 for slots that would draw more tokens than there is room for."""
    return np.where(np.arange(survival.shape[1]) < room[:, None] - 1, survival, 0.0)
