"""The attention of a policy of `transformers`: packed tokens in, as rows through torch's kernel, packed out.

A model hands its queries, keys and values to a registered function, with the keyword arguments that its
forward pass was given. One of these, `rows`, says which tokens see which: documents of a training batch, or
sequences of a cache. Nothing of it depends on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model.hf.cache import HFCache
from model.hf.settings import HFPolicyError

NAME = "tempering"
_SAME_BUCKET = 1.5
"""Documents that share a padded bucket differ in length by at most this factor, and a few tokens."""
_SLACK = 16


class Rows(Protocol):
    """Which of the packed tokens see which."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """[T, heads, d] queries, [T, kv heads, d] keys and values to [T, heads, d] outputs."""
        ...


class Documents:
    """Whole documents: each token sees those before it in its own."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        bounds = cu_seqlens.tolist()
        lengths = [b - a for a, b in pairwise(bounds)]
        device = cu_seqlens.device
        self.positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        self._buckets: list[tuple[Tensor, Tensor]] = []
        order: list[Tensor] = []
        for members in buckets(lengths):
            longest = max(lengths[i] for i in members)
            begin = torch.tensor([bounds[i] for i in members], device=device)[:, None]
            length = torch.tensor([lengths[i] for i in members], device=device)[:, None]
            column = torch.arange(longest, device=device)[None]
            inside = column < length
            index = begin + torch.minimum(column, length - 1)
            self._buckets.append((index, inside))
            order.append(index[inside])
        self._back = torch.cat(order).argsort()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See `Rows`. Padding stands behind a document's tokens, which do not see it."""
        parts = []
        for index, inside in self._buckets:
            mask = None if window is None else _band(index.shape[1], window, q.device)
            out = _sdpa(q[index], k[index], v[index], scale, mask)
            parts.append(out[inside])
        return torch.cat(parts)[self._back]


class CachedRows:
    """New tokens of cached sequences: each sees those before it, in the cache and among the new ones.

    Args:
        cache: holds the sequences; their new keys and values are written into it, layer by layer.
        slots: [B], each sequence once.
        starts: tokens that each holds already.
        lengths: new tokens of each.
    """

    def __init__(self, cache: HFCache, slots: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> None:
        self._cache, self._slots, device = cache, slots, slots.device
        start, length = torch.tensor(starts, device=device), torch.tensor(lengths, device=device)
        rows = torch.repeat_interleave(torch.arange(len(starts), device=device), length)
        begins = length.cumsum(0) - length
        self.positions = torch.arange(len(rows), device=device) - begins[rows] + start[rows]
        self._token_slots = slots[rows]
        column = torch.arange(max(lengths), device=device)[None]
        self._inside = column < length[:, None]
        self._index = begins[:, None] + torch.minimum(column, length[:, None] - 1)
        self._end = max(a + b for a, b in zip(starts, lengths, strict=True))
        self._single = max(lengths) == 1
        key = torch.arange(self._end, device=device)
        self._query = self.positions[self._index][:, :, None]
        self._seen = key <= self._query

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """See `Rows`."""
        self._cache.write(layer, self._token_slots, self.positions, k, v)
        keys, values = self._cache.read(layer, self._slots, self._end)
        seen = self._seen
        if window is not None:
            seen = seen & (torch.arange(self._end, device=q.device) > self._query - window)
        if self._single:
            return _sdpa(q[:, None], keys, values, scale, seen[:, None])[:, 0]
        return _sdpa(q[self._index], keys, values, scale, seen[:, None])[self._inside]


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of like lengths together, so that padding them costs little."""
    found: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not found or longest > _SAME_BUCKET * lengths[i] + _SLACK:
            found.append([])
            longest = lengths[i]
        found[-1].append(i)
    return found


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L] bool: each token sees itself and the `window` - 1 before it."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    return (distance >= 0) & (distance < window)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """[B, L, heads, d] queries, [B, K, kv heads, d] keys and values to [B, L, heads, d]; no mask: causal."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


_REFUSED = {
    "s_aux": "attention sinks",
    "softcap": "capped attention scores",
    "position_bias": "position biases",
}


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    rows: Rows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What a model of `transformers` calls: [1, heads, T, d] to [1, T, heads, d].

    Raises:
        HFPolicyError: The model asks for something of its attention that this one does not do, or does not
            pass `rows` on.
    """
    kind = type(module).__name__
    for name, what in _REFUSED.items():
        if options.get(name) is not None:
            raise HFPolicyError(f"{kind} uses {what}, which policy=hf does not compute: take another model")
    if dropout:
        raise HFPolicyError(
            f"{kind} drops attention weights ({dropout}) in training: set it to 0 in config.json"
        )
    if rows is None:
        raise HFPolicyError(
            f"{kind} does not pass keyword arguments on to its attention, so documents cannot be told apart: "
            "policy=hf needs a model whose forward passes **kwargs through"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return rows.attend(module.layer_idx, q, k, v, scale, sliding_window)[None], None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """What a model builds in place of an attention mask: nothing, for `rows` says it."""


def register() -> None:
    """Makes the function known to `transformers` under `NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
