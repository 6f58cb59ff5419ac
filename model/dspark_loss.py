"""What the drafter is trained on: the backbone's own next-token distributions, at anchors drawn at random.

    loss = ce * -log q(x) + tv * sum |q - p| + confidence * BCE(c, 1 - 1/2 sum |q - p|)

per slot, weighted by exp(-slot / gamma): an early slot decides whether later ones count at all. 1 - 1/2 sum
|q - p| is the probability that speculative sampling accepts a slot, which is what its confidence is to say;
no gradient flows through it there. The token before each slot is the true one. Nothing flows into the
backbone, its embedding or its head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from model.balance import expert_load

if TYPE_CHECKING:
    from model.batch import PackedTokens
    from model.policy import Policy

_CHUNK_ELEMENTS = 1 << 23
"""Logits held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """Weights of the loss.

    Attributes:
        ce: of the cross-entropy with the token that came.
        tv: of the distance sum |q - p| to the backbone's distribution.
        confidence: of the confidence's binary cross-entropy.
        gamma: slots after which a slot's weight has fallen to 1/e.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0

    def __post_init__(self) -> None:
        if min(self.ce, self.tv, self.confidence) < 0 or not self.gamma > 0:
            raise ValueError(f"weights of the draft loss are at least 0 and gamma is above 0, not {self}")


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """The loss and what it is made of, means over slots by weight; all but `total` without a gradient."""

    total: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor
    accepted: Tensor
    """Drafts an anchor can expect to be accepted, had every draft its slots within the document."""
    expert_load: Tensor
    """[blocks, experts]."""


def draft_anchors(tokens: PackedTokens, supervised: Tensor) -> Tensor:
    """Where a draft can be trained: [N] indices of tokens that are supervised, as is the one after them.

    Args:
        tokens: the documents.
        supervised: [T] bool, true on what the policy is to say; a document's first token cannot be an anchor.
    """
    position = _positions(tokens)
    follows = torch.zeros_like(supervised)
    follows[:-1] = supervised[1:] & (position[1:] > 0)
    return (supervised & follows & (position > 0)).nonzero().squeeze(1)


def draft_loss(
    policy: Policy,
    tokens: PackedTokens,
    hidden: Tensor,
    features: Tensor,
    supervised: Tensor,
    anchors: Tensor,
    *,
    weights: DraftWeights,
    temperature: float = 1.0,
    limit: int = _CHUNK_ELEMENTS,
) -> DraftLoss:
    """The drafter's loss over drafts that follow `anchors`.

    Args:
        policy: drafter and frozen backbone.
        tokens: the documents.
        hidden: [T, d] the backbone's output, as its head takes it.
        features: [T, 3 d] what the drafter reads of it.
        supervised: [T] bool. A slot is left out when its token, or one before it in the draft, is not.
        anchors: [N] indices, as `draft_anchors` gives them; at least one.
        weights: of the loss.
        temperature: both distributions are those of logits / temperature.
        limit: elements of logits held at once; more anchors go through in chunks, which are run again for
            their gradients.
    """
    drafter = policy.mtp
    assert drafter is not None, "this policy has no drafter: its configuration lacks num_nextn_predict_layers"
    context = _Context(policy, tokens, hidden.detach(), supervised, weights, temperature)
    keys = drafter.window_keys(features.detach(), context.position, policy.fake_quant)
    step = max(1, limit // (policy.config.vocab_size * policy.config.dspark_block_size))
    parts = anchors.split(step)
    again = torch.is_grad_enabled() and len(parts) > 1
    sums = [
        checkpoint(context.sums, keys, part, use_reentrant=False) if again else context.sums(keys, part)
        for part in parts
    ]
    total = torch.stack([values for values, _ in sums]).sum(0)
    ce, tv, confidence = total[:3] / total[3]
    loss = weights.ce * ce + weights.tv * tv + weights.confidence * confidence
    accepted = total[4].detach() / anchors.shape[0]
    load = torch.stack([load for _, load in sums]).sum(0)
    return DraftLoss(loss, ce.detach(), tv.detach(), confidence.detach(), accepted, load)


class _Context:
    """What every chunk of anchors needs."""

    def __init__(
        self,
        policy: Policy,
        tokens: PackedTokens,
        hidden: Tensor,
        supervised: Tensor,
        weights: DraftWeights,
        temperature: float,
    ) -> None:
        self.policy, self.hidden, self.ids = policy, hidden, tokens.token_ids
        self.supervised, self.temperature = supervised, temperature
        self.position = _positions(tokens)
        self.slots = torch.arange(policy.config.dspark_block_size, device=hidden.device)
        self.decay = torch.exp(-self.slots / weights.gamma)

    def sums(self, keys: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted sums [5] over the slots of `anchors` (three losses, weight, accepted) and expert load."""
        policy, drafter = self.policy, self.policy.mtp
        assert drafter is not None
        window = torch.arange(policy.config.sliding_window, device=anchors.device)
        place = self.position[anchors]
        context = keys[:, (anchors[:, None] - 1 - window).clamp_min(0)]
        states = drafter.hidden(policy, context, window >= place[:, None], self.ids[anchors], place)
        at = (anchors[:, None] + self.slots).clamp_max(len(self.ids) - 2)
        bias, sure = drafter.given(states.hidden, self.ids[at])
        logits = (drafter.base_logits(policy, states.hidden) + bias) / self.temperature
        with torch.no_grad():
            target = (policy.logits(self.hidden[at]) / self.temperature).softmax(-1)
        log_draft = logits.log_softmax(-1)
        labels = self.ids[at + 1]
        ce = -log_draft.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        tv = (log_draft.exp() - target).abs().sum(-1)
        chance = 1 - 0.5 * tv.detach()
        confidence = F.binary_cross_entropy_with_logits(sure, chance, reduction="none")
        real = self._real(anchors, at)
        weight = self.decay * real
        losses = [(weight * value).sum() for value in (ce, tv, confidence)]
        accepted = (chance * real).cumprod(-1).sum()
        load = expert_load(states.routings, policy.config.dspark_n_routed_experts)
        return torch.stack([*losses, weight.sum(), accepted]), load

    def _real(self, anchors: Tensor, at: Tensor) -> Tensor:
        """[N, slots] 1 where a slot and all before it predict a supervised token of the anchor's document."""
        begins = (anchors - self.position[anchors])[:, None]
        same = (at == anchors[:, None] + self.slots) & (at + 1 - self.position[at + 1] == begins)
        inside = same & self.supervised[at + 1]
        return inside.to(self.decay.dtype).cumprod(-1)


def _positions(tokens: PackedTokens) -> Tensor:
    """[T] position of each token in its document."""
    starts, lengths = tokens.cu_seqlens[:-1], tokens.cu_seqlens.diff()
    index = torch.arange(tokens.token_ids.shape[0], device=tokens.token_ids.device)
    return index - torch.repeat_interleave(starts, lengths)
