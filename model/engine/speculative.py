"""Speculative decoding: the drafter proposes a few tokens, the policy checks them all in one pass.

How many drafts are checked is decided before they are drawn: a rule that looked at a draft to decide whether
to check it would no longer leave the distribution as it is. The number of drafts of the whole batch therefore
follows from the confidences of the step before; how they are shared out among the requests may follow the
present ones, since a slot's chance to survive is known before the slot's token is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch
from torch import Tensor

from model.batch import NewTokens
from model.dspark import Draft
from model.engine.acceptance import Attempt, Rule, Verified
from model.engine.sampler import SamplingColumns
from model.engine.verification import Costs, admit, choose_budget

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


class Speculator:
    """Drafts and checks for the sequences of one cache."""

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

    def attach(self, cache: PolicyCache) -> None:
        """Goes over to a cache."""
        assert cache.draft is not None
        self._cache, self._window = cache, cache.draft
        self._survival = np.ones((cache.max_sequences, self.slots))

    def observe(self, slots: Tensor, starts: Tensor, lengths: Tensor, new: NewTokens) -> None:
        """Takes in what the policy computed of `lengths` [B] new tokens of each row, from `starts` [B]."""
        assert new.features is not None
        columns = torch.arange(int(lengths.max()), device=lengths.device)
        first = lengths.cumsum(0) - lengths
        index = first[:, None] + torch.minimum(columns, lengths[:, None] - 1)
        self._window.begin(slots, starts)
        self._take(slots, new.features[index], lengths)
        self._survival[slots.cpu().numpy()] = 1.0

    def decode(
        self,
        slots: np.ndarray,
        anchors: np.ndarray,
        starts: np.ndarray,
        room: np.ndarray,
        columns: SamplingColumns,
    ) -> Verified:
        """Draws one or more tokens for each of R sequences; `settle` must follow.

        Args:
            slots: int64 [R] of the cache.
            anchors: int64 [R] last token of each, which the cache does not hold yet.
            starts: int64 [R] position of the token to draw.
            room: int64 [R] how many tokens each may still get, at least 1.
            columns: how to sample.
        """
        self._steps += 1
        attempt = Attempt(self.slots, starts, columns, self._options.rule)
        on_device = self._to_device(slots)
        lengths, draft = np.zeros(len(slots), np.int64), None
        budget = self._budget(slots, room)
        if budget:
            draft = self._draft(on_device, anchors, attempt)
            lengths = self._lengths(slots, draft, budget, room)
        ids = np.zeros((len(slots), int(lengths.max()) + 1), np.int64)
        ids[:, 0] = anchors
        if draft is not None:
            ids[:, 1:] = draft.token_ids[:, : ids.shape[1] - 1].cpu().numpy()
        self._new = NewTokens()
        counts = self._to_device(lengths + 1)
        self._policy.extend(self._cache, on_device, self._to_device(ids), counts, new=self._new)
        assert self._new.hidden is not None
        verified = attempt.verify(self._policy.logits(self._new.hidden), ids[:, 1:], lengths)
        self._pending = (on_device, lengths)
        self.counters.rows += len(slots)
        self.counters.checked += int(lengths.sum())
        return verified

    def settle(self, kept: np.ndarray) -> None:
        """Keeps the anchor and the first `kept` [R] drafts of the last `decode`, and takes the rest back."""
        slots, lengths = self._pending
        assert self._new.features is not None
        first = np.cumsum(lengths + 1) - (lengths + 1)
        index = first[:, None] + np.minimum(np.arange(int(kept.max()) + 1), kept[:, None])
        self._take(slots, self._new.features[self._to_device(index)], self._to_device(kept + 1))
        for slot, excess in zip(slots.tolist(), (lengths - kept).tolist(), strict=True):
            if excess:
                self._cache.truncate(slot, self._cache.length(slot) - excess)
        self.counters.accepted += int(kept.sum())

    def _take(self, slots: Tensor, features: Tensor, lengths: Tensor) -> None:
        fake_quant = self._policy.fake_quant
        self._drafter.observe(self._window, features, fake_quant, rows=slots, lengths=lengths)

    def _draft(self, slots: Tensor, anchors: np.ndarray, attempt: Attempt) -> Draft:
        draft = self._drafter.draft(
            self._policy, self._window, self._to_device(anchors), rows=slots, choose=attempt.choose
        )
        return draft

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


def _within(survival: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Survival with 0 for slots that would draw more tokens than there is room for."""
    return np.where(np.arange(survival.shape[1]) < room[:, None] - 1, survival, 0.0)
