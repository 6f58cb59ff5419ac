"""One forward pass of a micro-batch, down to the log-probabilities of its trained tokens.

The head is applied only where a token is trained, in chunks when the logits would be large, and by a kernel
on a card: no [T, V] tensor is kept, and a token that is not trained has no logits at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import PackedTokens
from model.choices import SamplingMask, entropy_of, tempered, truncated_logprobs
from model.layers.indexer_loss import Variant
from model.policies import AnyPolicy
from model.policy import Policy, PolicyAux
from model.vision import ImageTokens
from rl.algorithms.linear import CHUNK_ELEMENTS, fuses, linear_logprobs
from rl.trainers.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the policy says about the tokens of a micro-batch; 0 where the token is not trained.

    Attributes:
        logprobs: [T] float32, log-probability of the token at the sampling temperature.
        entropy: [T] float32, entropy of the distribution it was drawn from, in nats.
        correct: [T] bool, whether it is the most likely token.
        aux: expert load and auxiliary losses.
        hidden: [T, d] the head's input.
        features: [T, 3 d] what a drafter reads; None unless asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    correct: Tensor
    aux: PolicyAux
    hidden: Tensor
    features: Tensor | None


def token_outputs(
    policy: AnyPolicy,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    indexer_loss: bool | Variant = False,
    features: bool = False,
    logits_limit: int = CHUNK_ELEMENTS,
) -> TokenOutputs:
    """Runs the policy over a micro-batch."""
    output = policy(packed_tokens(policy, batch), indexer_loss=indexer_loss, features=features)
    positions = batch.loss_mask.nonzero()[:, 0]
    labels = batch.token_ids[positions]
    mask = None if batch.sampling_mask is None else batch.sampling_mask.take(positions)
    hidden = output.hidden[positions - 1]
    columns = head_outputs(policy, hidden, labels, temperature, logits_limit, mask)
    logprobs, entropy, correct = (_scatter(column, positions, len(batch.token_ids)) for column in columns)
    return TokenOutputs(logprobs, entropy, correct, output.aux, output.hidden, output.features)


def packed_tokens(policy: AnyPolicy, batch: MicroBatch) -> PackedTokens:
    """A micro-batch as the policy that sampled it takes it: with its images, choices and lost windows."""
    return PackedTokens(
        batch.token_ids,
        batch.cu_seqlens,
        images=encoded_images(policy, batch),
        choices=batch.choices,
        window_floors=batch.window_floors,
    )


def encoded_images(policy: AnyPolicy, batch: MicroBatch) -> ImageTokens | None:
    """The images of a micro-batch through the image tower, with gradient."""
    if batch.image_types is None:
        return None
    if not isinstance(policy, Policy):
        raise ValueError("policy=hf takes no images: take an environment of text")
    dtype, device = policy.norm.weight.dtype, policy.device
    rows = [policy.encode_image(image.patches.to(device, dtype), image.grid) for image in batch.images]
    return ImageTokens(batch.image_types, torch.cat(rows))


def head_outputs(
    policy: AnyPolicy,
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    logits_limit: int = CHUNK_ELEMENTS,
    mask: SamplingMask | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of `labels` [m], entropy [m] and whether it is the mode [m], from `hidden` [m, d].

    With `mask`, under the distribution that is renormalised over what each of the m tokens could have been.
    """
    weight: Tensor = policy.head.weight  # pyright: ignore[reportAssignmentType]
    if len(labels) * policy.config.vocab_size > logits_limit or fuses(hidden, weight, mask):
        return linear_logprobs(
            hidden,
            weight,
            labels,
            temperature=temperature,
            mask=mask,
            exact=policy.exact,
            limit=logits_limit,
        )
    distribution = truncated_logprobs(tempered(policy.logits(hidden), temperature), mask)
    logprobs = distribution.gather(-1, labels[:, None])[:, 0]
    return logprobs, entropy_of(distribution), distribution.detach().argmax(-1) == labels


def _scatter(values: Tensor, positions: Tensor, length: int) -> Tensor:
    return torch.zeros(length, dtype=values.dtype, device=values.device).index_put((positions,), values)
