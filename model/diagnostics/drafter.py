"""How much of a drafter's proposals the policy would accept, and whether its confidence can be believed.

Each position of a document is drafted from: the policy's features up to it and the document's next token go
in, a block of proposals comes out. A slot is reached when all earlier proposals equal the document, so that
the policy's own distribution at that place is known from one forward pass. On documents that the policy wrote
greedily nothing else can be accepted, and the rates of greedy verification are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import PackedTokens, Trace
from model.policy import Policy

_BINS = 10


@dataclass(frozen=True, slots=True)
class SlotAcceptance:
    """One slot of the draft, over the drafts in which it was reached."""

    slot: int
    reached: int
    greedy: float
    """Share of proposals that are the policy's most likely token."""
    expected: float
    """Mean probability that rejection sampling accepts at temperature 1: sum over tokens of min(p, q)."""
    confidence: float
    """Mean of what the drafter said."""


@dataclass(frozen=True, slots=True)
class CalibrationBin:
    """Reached slots whose confidence lies in `low` .. `high`."""

    low: float
    high: float
    count: int
    confidence: float
    accepted: float
    """Mean of the probability of acceptance."""


@dataclass(frozen=True, slots=True)
class DraftAcceptance:
    """Acceptance over many drafts."""

    drafts: int
    slots: tuple[SlotAcceptance, ...]
    bins: tuple[CalibrationBin, ...]
    """Only bins that hold anything."""

    @property
    def accepted_greedy(self) -> float:
        """Accepted drafts a step under greedy verification: sum over slots of the product of the rates."""
        return _accepted([slot.greedy for slot in self.slots])

    @property
    def accepted_sampling(self) -> float:
        """The same under rejection sampling, with the mean rates of the slots."""
        return _accepted([slot.expected for slot in self.slots])

    @property
    def calibration_error(self) -> float:
        """Mean distance of confidence and acceptance over bins, weighted by their counts."""
        total = sum(part.count for part in self.bins)
        return sum(part.count * abs(part.confidence - part.accepted) for part in self.bins) / max(total, 1)


def _accepted(rates: list[float]) -> float:
    total, survival = 0.0, 1.0
    for rate in rates:
        survival *= rate
        total += survival
    return total


@dataclass(frozen=True, slots=True)
class _Slots:
    """[n, slots] each, over all drafts."""

    reached: Tensor
    greedy: Tensor
    expected: Tensor
    confidence: Tensor


@torch.no_grad()
def draft_acceptance(policy: Policy, token_ids: Tensor, *, stride: int = 1) -> DraftAcceptance:
    """Drafts from every `stride`-th position of documents [B, L] of equal length.

    Raises:
        ValueError: the policy has no drafter, or the documents are shorter than a draft and its anchor.
    """
    slots, length = policy.config.dspark_block_size, token_ids.shape[1]
    if policy.mtp is None:
        raise ValueError("this policy has no drafter: its configuration has num_nextn_predict_layers 0")
    if length < slots + 2:
        raise ValueError(f"documents of {length} tokens have no room for a draft of {slots}: use longer ones")
    trace = Trace()
    tokens = PackedTokens(token_ids.flatten(), torch.arange(token_ids.shape[0] + 1) * length)
    hidden = policy(tokens, trace=trace).hidden.unflatten(0, token_ids.shape)
    features = trace.values["main_hidden"].unflatten(0, token_ids.shape)
    window, parts, seen = policy.mtp.new_window(token_ids.shape[0]), [], 0
    for position in range(0, length - slots - 1, stride):
        policy.mtp.observe(window, features[:, seen : position + 1], policy.fake_quant)
        seen = position + 1
        draft = policy.mtp.draft(policy, window, token_ids[:, position + 1])
        target = policy.logits(hidden[:, position + 1 : position + 1 + slots])
        follows = token_ids[:, position + 2 : position + 2 + slots]
        equal = (draft.token_ids == follows).long()
        shared = torch.minimum(draft.logits.softmax(-1), target.softmax(-1)).sum(-1)
        reached = _before(equal) > 0
        greedy = draft.token_ids == target.argmax(-1)
        parts.append((reached, greedy, shared, draft.confidence.sigmoid()))
    return _summary(_Slots(*(torch.cat(column) for column in zip(*parts, strict=True))))


def _before(equal: Tensor) -> Tensor:
    """[B, slots] product of all earlier entries of a row."""
    return torch.cat([torch.ones_like(equal[:, :1]), equal.cumprod(1)[:, :-1]], dim=1)


def _summary(drafts: _Slots) -> DraftAcceptance:
    slots = []
    for slot in range(drafts.reached.shape[1]):
        chosen = drafts.reached[:, slot]
        columns = (drafts.greedy, drafts.expected, drafts.confidence)
        means = (_mean(column[chosen, slot]) for column in columns)
        slots.append(SlotAcceptance(slot, int(chosen.sum()), *means))
    confidence, accepted = drafts.confidence[drafts.reached], drafts.expected[drafts.reached]
    number = (confidence * _BINS).long().clamp_max(_BINS - 1)
    bins = []
    for place in range(_BINS):
        inside = number == place
        if bool(inside.any()):
            means = (_mean(confidence[inside]), _mean(accepted[inside]))
            bins.append(CalibrationBin(place / _BINS, (place + 1) / _BINS, int(inside.sum()), *means))
    return DraftAcceptance(len(drafts.reached), tuple(slots), tuple(bins))


def _mean(values: Tensor) -> float:
    """Mean; 0 of nothing: a slot that is never reached accepts nothing."""
    return float(values.double().mean()) if values.numel() else 0.0
