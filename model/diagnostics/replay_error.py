"""What bounded replay gets wrong: windows filled by a short replay against windows filled by every token.

Two kinds. A prefill runs the decoder over the last W tokens of the prompt alone. A sequence whose compressed
keys are found again without its windows also runs the encoder over the last W known tokens, from which the
rest goes on. In both the first replayed tokens see fewer window keys than they did, and what they write
differs. Compared are the window keys at the end of the prompt, and logits there and over the tokens that
follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.cache.main_kv import GroupCache
from model.cache.policy_cache import PolicyCache
from model.cache.swa import WindowRing
from model.diagnostics.cache_error import LogitError, logit_error
from model.policy import Policy


@dataclass(frozen=True, slots=True)
class ReplayError:
    """One kind of replay against the exact state."""

    keys: tuple[float, ...]
    """By layer: root mean square difference of the last W window keys, as a share of their size."""
    first: LogitError
    """At the last token of the prompt."""
    later: LogitError
    """Over the tokens that follow."""


@torch.inference_mode()
def replay_errors(policy: Policy, token_ids: Tensor, prompt: int) -> dict[str, ReplayError]:
    """Errors of the replays "decoder" and "encoder and decoder" on documents [B, L].

    The latter finds the compressed keys of all of the prompt but half a window.

    Raises:
        ValueError: the policy has no decoder of its own, or `prompt` leaves no token that follows.
    """
    config = policy.config
    if config.decoder_start is None:
        raise ValueError("this policy has no decoder of its own, and nothing to replay")
    if not config.sliding_window < prompt < token_ids.shape[1]:
        raise ValueError(
            f"a prompt of {prompt} of {token_ids.shape[1]} tokens: it must be longer than the window "
            f"({config.sliding_window}) and shorter than the documents"
        )
    rows, window = token_ids.shape[0], config.sliding_window
    cache = policy.new_cache(3 * rows, token_ids.shape[1])
    exact, decoder = _slots(cache, rows), _slots(cache, rows)
    decode_from = torch.full((rows,), prompt - window, device=policy.device)
    runs = {
        "exact": (exact, _prefill(policy, cache, exact, token_ids[:, :prompt], None)),
        "decoder": (decoder, _prefill(policy, cache, decoder, token_ids[:, :prompt], decode_from)),
    }
    known = (prompt - window // 2) // cache.whole_groups * cache.whole_groups
    resume = max(known - window, 0)
    both = _resumed(policy, cache, exact, token_ids, known, resume)
    hidden = _prefill(policy, cache, both, token_ids[:, resume:prompt], decode_from)
    runs["encoder and decoder"] = (both, hidden)
    keys = {name: _window_keys(policy, cache, slots, prompt) for name, (slots, _) in runs.items()}
    logits = {
        name: policy.logits(torch.stack([hidden, *_follow(policy, cache, slots, token_ids[:, prompt:])], 1))
        for name, (slots, hidden) in runs.items()
    }
    return {
        name: ReplayError(
            tuple(_relative(ours, theirs) for ours, theirs in zip(keys[name], keys["exact"], strict=True)),
            logit_error(logits[name][:, :1], logits["exact"][:, :1]),
            logit_error(logits[name][:, 1:], logits["exact"][:, 1:]),
        )
        for name in runs
        if name != "exact"
    }


def _slots(cache: PolicyCache, rows: int) -> Tensor:
    return torch.tensor([cache.allocate() for _ in range(rows)], device=cache.device)


def _prefill(
    policy: Policy, cache: PolicyCache, slots: Tensor, token_ids: Tensor, decode_from: Tensor | None
) -> Tensor:
    lengths = torch.full((len(slots),), token_ids.shape[1])
    return policy.extend(cache, slots, token_ids, lengths, decode_from=decode_from)


def _follow(policy: Policy, cache: PolicyCache, slots: Tensor, token_ids: Tensor) -> list[Tensor]:
    """The head's input at each of `token_ids` [B, n], given one after the other."""
    one = torch.ones(len(slots), dtype=torch.int64)
    return [policy.extend(cache, slots, column[:, None], one) for column in token_ids.unbind(1)]


def _resumed(
    policy: Policy, cache: PolicyCache, source: Tensor, token_ids: Tensor, known: int, resume: int
) -> Tensor:
    """Slots that hold the compressed keys of the first `known` tokens of `source`, and no windows."""
    slots = []
    for row, slot in enumerate(source.tolist()):
        tail = policy.look_back_ids(token_ids[row, :resume])
        slots.append(cache.adopt(known, resume, tail))
        for store in (*cache.main.values(), *cache.index_keys.values()):
            assert isinstance(store, GroupCache)
            store.copy(slot, slots[-1])
    return torch.tensor(slots, device=cache.device)


def _window_keys(policy: Policy, cache: PolicyCache, slots: Tensor, end: int) -> list[Tensor]:
    """By layer [B, W, c]: the keys of the last W positions before `end`."""
    positions = torch.arange(end - policy.config.sliding_window, end, device=cache.device)
    assert isinstance(cache.windows, WindowRing)
    rings = (cache.windows.storage[block.layer, slots] for block in policy.blocks)
    return [ring[:, positions % ring.shape[1]] for ring in rings]


def _relative(ours: Tensor, theirs: Tensor) -> float:
    difference, size = (ours - theirs).double().pow(2).mean().sqrt(), theirs.double().pow(2).mean().sqrt()
    return float(difference / size)
