"""Where a decoded token first differs from the training pass: in which layer and operation.

In exact mode nothing may differ. Each token is decoded from a cache that agrees with training so far, in
three ways: by the operations of a decode step one by one, by the captured step (a graph on a GPU), and by the
pass that prefills. What the three keep under way is compared, bit for bit, with what training keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import Trace
from model.cache.policy_cache import PolicyCache
from model.policy import PackedTokens, Policy

STEP, CAPTURED, PREFILL = "step", "captured step", "prefill pass"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first result of a token, in the order of computing, that is not that of training."""

    token: int
    way: str
    name: str
    """As traced (`layers.3.heads`), or `hidden`."""
    differing: int
    """Elements of it that differ, of `elements`."""
    elements: int
    largest: float
    """Largest difference."""

    def __str__(self) -> str:
        """One line."""
        return (
            f"token {self.token} by {self.way}: {self.name}, {self.differing} of {self.elements} elements, "
            f"largest difference {self.largest:.3g}"
        )


@torch.no_grad()
def differences(policy: Policy, ids: Tensor, pieces: Sequence[int]) -> list[Difference]:
    """Decode a document token by token and compare each with a training pass over all of it.

    Ends after the first token whose prefill pass differs: from there on the cache does.

    Args:
        policy: in exact mode, with rounded keys; left as it was.
        ids: [T] of the document, on the policy's device.
        pieces: lengths of the pieces in which the prompt is prefilled; what is left of the document is
            decoded.

    Raises:
        ValueError: nothing is left to decode.
    """
    prompt = sum(pieces)
    if not 0 < prompt < len(ids):
        raise ValueError(f"{prompt} of {len(ids)} tokens are a prompt: some must be left to decode")
    training = Trace()
    whole = torch.tensor([0, len(ids)], device=ids.device)
    hidden = policy(PackedTokens(ids, whole), trace=training).hidden
    trained = {**training.values, "hidden": hidden}
    cache = policy.new_cache(1, len(ids) + 64, storage="packed")
    slot = torch.tensor([cache.allocate()], device=ids.device)
    at, found = 0, []
    for length in pieces:
        _extend(policy, cache, slot, ids[at : at + length], None)
        at += length
    for token in range(prompt, len(ids)):
        for way, trace in ((STEP, Trace(steps=True)), (CAPTURED, None), (PREFILL, Trace())):
            result = _extend(policy, cache, slot, ids[token : token + 1], trace)
            kept = {} if trace is None else trace.values
            first = _first(token, way, {**kept, "hidden": result}, trained)
            if first is not None:
                found.append(first)
            if way != PREFILL:
                cache.truncate(int(slot[0]), token)
        if found and found[-1].way == PREFILL:
            break
    return found


def _extend(policy: Policy, cache: PolicyCache, slot: Tensor, ids: Tensor, trace: Trace | None) -> Tensor:
    length = torch.tensor([len(ids)], device=ids.device)
    return policy.extend(cache, slot, ids[None], length, trace=trace)


def _first(token: int, way: str, values: dict[str, Tensor], trained: dict[str, Tensor]) -> Difference | None:
    for name, expected in trained.items():
        if name not in values or len(expected) <= token:
            continue
        got, right = values[name][-1].flatten(), expected[token].flatten()
        shared = min(len(got), len(right))
        unequal = got[:shared] != right[:shared]
        if bool(unequal.any()):
            largest = (got[:shared].double() - right[:shared].double()).abs().max().item()
            return Difference(token, way, name, int(unequal.sum()), shared, largest)
    return None
