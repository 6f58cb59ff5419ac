"""What the caches' number formats cost: logits with rounded keys against logits without.

Main keys are held in FP4, window keys in FP8, index keys (and the queries that meet them) in FP4. The first
two change values, the last one only choices; a changed choice is a jump, so the differences have heavy tails.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import PackedTokens
from model.policy import Policy
from model.quant.blocks import Rounded, probing

CACHES = {
    "off": frozenset[Rounded](),
    "main": frozenset({Rounded.MAIN}),
    "window": frozenset({Rounded.WINDOW}),
    "index": frozenset({Rounded.INDEX}),
    "all": frozenset({Rounded.MAIN, Rounded.WINDOW, Rounded.INDEX}),
}
"""Which caches are rounded, by name of the variant."""


@dataclass(frozen=True, slots=True)
class LogitError:
    """Differences of logits over tokens. `top` is the share of tokens with the same most likely token."""

    rms: float
    """Root mean square difference, as a share of the root mean square of the centred logits."""
    largest: float
    """Largest absolute difference of a logit."""
    kl: float
    """Mean Kullback-Leibler divergence from the exact distribution, in nats."""
    top: float


@dataclass(frozen=True, slots=True)
class _Only:
    """A probe that lets `kinds` be rounded, and inputs of quantised linear maps as ever."""

    kinds: frozenset[Rounded]

    def leaves_out(self, kind: Rounded) -> bool:
        return kind is not Rounded.ACTIVATION and kind not in self.kinds

    def see(self, kind: Rounded, blocks: Tensor, scale: Tensor) -> None:
        pass


def logit_error(ours: Tensor, exact: Tensor) -> LogitError:
    """Compares logits [..., V] token by token."""
    ours, exact = ours.double().flatten(0, -2), exact.double().flatten(0, -2)
    difference = ours - exact
    spread = (exact - exact.mean(-1, keepdim=True)).pow(2).mean().sqrt()
    expected, found = exact.log_softmax(-1), ours.log_softmax(-1)
    return LogitError(
        rms=float(difference.pow(2).mean().sqrt() / spread),
        largest=float(difference.abs().max()),
        kl=float((expected.exp() * (expected - found)).sum(-1).mean()),
        top=float((ours.argmax(-1) == exact.argmax(-1)).double().mean()),
    )


@torch.no_grad()
def cache_error(policy: Policy, tokens: PackedTokens) -> dict[str, LogitError]:
    """The error of each variant in `CACHES`, against the policy with all keys unrounded."""
    exact = _logits(policy, tokens, CACHES["off"])
    return {name: logit_error(_logits(policy, tokens, kinds), exact) for name, kinds in CACHES.items()}


def _logits(policy: Policy, tokens: PackedTokens, kinds: frozenset[Rounded]) -> Tensor:
    before, policy.fake_quant = policy.fake_quant, True
    try:
        with probing(_Only(kinds)):
            return policy.logits(policy(tokens).hidden)
    finally:
        policy.fake_quant = before
