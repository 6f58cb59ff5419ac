"""What a loss may see and what it must return, so that a loss is a pure function of one small record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before the exponential, so that a ratio cannot overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The tokens of a packed micro-batch; every tensor is [T], and position t speaks of token t itself.

    Attributes:
        logprobs: log pi_theta of the token; the only tensor with a gradient (beside `entropy`).
        sampler_logprobs: log-probability under the policy that sampled the token.
        old_logprobs: what the ratio is taken against: the sampler's, or the trainer's own before the update.
        advantages: advantage of the token.
        mask: bool, True where the token is trained: the policy sampled it. Other positions may hold anything.
        versions: policy version that sampled the token.
        segment_ids: int64, the sequence that the token belongs to, 0 <= id < `segments`.
        segments: number of sequences in the micro-batch; a sequence is never split over micro-batches.
        current_version: the version of the weights that are being trained.
        reference_logprobs: log-probability under the reference policy, when a KL term wants it.
        entropy: entropy of pi_theta at the token, in nats, when wanted.
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    versions: Tensor
    segment_ids: Tensor
    segments: int
    current_version: int
    reference_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.logprobs.shape
        if len(shape) != 1:
            raise ValueError(
                f"logprobs has shape {tuple(shape)}; a packed micro-batch is one row of tokens, [T]"
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, Tensor) and value.shape != shape:
                raise ValueError(
                    f"{entry.name} has shape {tuple(value.shape)}, logprobs {tuple(shape)}; both are [T]"
                )
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask has dtype {self.mask.dtype}; it must be bool")

    def masked(self, values: Tensor) -> Tensor:
        """`values` [T] where the mask holds, exact 0 elsewhere, whatever stood there (NaN included)."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def log_ratio(self) -> Tensor:
        """Log of pi_theta / pi_old, [T], 0 outside the mask, clamped to +-20."""
        return self.masked(self.logprobs - self.old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def mismatch(self) -> Tensor:
        """Log of pi_old / pi_sampler, [T], without gradient, 0 outside the mask, not clamped."""
        return self.masked(self.old_logprobs - self.sampler_logprobs).detach()

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sums `values` [T] over the masked tokens of each sequence: [segments]."""
        out = torch.zeros(self.segments, dtype=values.dtype, device=values.device)
        return out.index_add(0, self.segment_ids, self.masked(values))

    def segment_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` [T] over the masked tokens of each sequence: [segments]; 0 where there is none."""
        counts = self.segment_sum(torch.ones_like(values))
        return self.segment_sum(values) / counts.clamp(min=1)

    def spread(self, per_segment: Tensor) -> Tensor:
        """Gives every token the value of its sequence: [segments] -> [T]."""
        return per_segment[self.segment_ids]


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """A loss's value per token, [T], to be minimised, and metrics per token, [T], averaged over the mask."""

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
