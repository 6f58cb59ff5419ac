"""Main keys and selections of a pass on kernels: made by a source layer, shared by the layers after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from model.cache.record_rows import RecordKeys, RecordRows
from model.choices import FREE, force
from model.flat import Angles, Flat, Groups
from model.layers.linear import wide_linear
from model.layers.norm import rms_norm
from model.ops.candidates import best_blocks, topk_in_blocks
from model.ops.indexer import index_scores, index_topk, queries_at_once
from model.ops.pack_keys import pack_keys
from model.ops.records import unpack
from model.ops.rotary import index_heads, rotary
from model.ops.sparse_attention import InverseIndex, Selected, invert
from model.ops.topk import topk
from model.ops.unpack_keys import unpack_keys

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache
    from model.layers.attention import Attention

_TILE = 64
"""Keys that a score kernel takes at once."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one source layer; `table` has room for the window rows of a layer behind the entries."""

    groups: Groups
    entries: Tensor
    """[E, c] as attention sees them."""
    index_keys: Tensor
    """[E, c_I]."""
    table: Tensor | None = None
    selected: Selected | None = None
    inverse: InverseIndex | None = None
    candidates: Tensor | None = None
    """[T, C] int32 block numbers counted from the sequence's first key, -1 for none."""


class _Compress(torch.autograd.Function):
    """Latents and main keys by the kernel that packs records; gradients by the definition."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, gates: Tensor | None, norm: Tensor, layout: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        ratio, starts, eps, angles, rounded = layout
        ctx.save_for_backward(values, norm, *(() if gates is None else (gates,)))
        ctx.layout = layout
        latent, records = pack_keys(
            "main", values, gates=gates, ratio=ratio, starts=starts, norm=norm, eps=eps, rope=angles
        )
        return latent, unpack_keys(records) if rounded else rotary(latent, *angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, norm, *gates = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        ratio, starts, eps, angles, _ = ctx.layout
        with torch.enable_grad():
            latent = rms_norm(_pooled(values, gates[0] if gates else None, ratio, starts), norm, eps)
            total = (latent * grads[0]).sum() + (rotary(latent, *angles) * grads[1]).sum()
        found = torch.autograd.grad(total, (values, norm, *gates))
        return found[0], found[2] if gates else None, found[1], None


class _IndexKeys(torch.autograd.Function):
    """Index keys as a cache keeps them, to the bit; gradients by the definition."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor, norm: Tensor, eps: float, angles: Angles) -> Tensor:
        ctx.save_for_backward(projected, norm)
        ctx.layout = eps, angles
        return unpack("index", pack_keys("index", projected, norm=norm, eps=eps, rope=angles)[1]).to(
            torch.bfloat16
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        projected, norm = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        eps, angles = ctx.layout
        with torch.enable_grad():
            total = (rotary(rms_norm(projected, norm, eps), *angles) * grads[0]).sum()
        return *torch.autograd.grad(total, (projected, norm)), None, None


def _pooled(values: Tensor, gates: Tensor | None, ratio: int, starts: Tensor) -> Tensor:
    if gates is None:
        return values.to(torch.bfloat16)
    rows = starts.long()[:, None] + torch.arange(ratio, device=values.device)
    return (gates[rows].softmax(1) * values[rows]).sum(1).to(torch.bfloat16)


def new_keys(attention: Attention, x: Tensor, flat: Flat, rounded: bool, taught: bool) -> Keys:
    """Compress the documents of a training batch to the keys of a source layer.

    With `taught` index keys have a gradient, to the indexer only.
    """
    groups, compressor = flat.groups(attention.ratio), attention.compressor
    width, indexer = attention.width, attention.indexer
    if not groups.total:
        return Keys(groups, x.new_zeros(1, width), x.new_zeros(1, indexer.width))
    values, gates = projected(attention, x)
    angles = flat.group_angles(attention.ratio, attention.frequencies)
    layout = (attention.ratio, groups.starts, compressor.norm.eps, angles, rounded)
    latent, entries = _Compress.apply(values, gates, compressor.norm.weight, layout)  # pyright: ignore
    with torch.set_grad_enabled(taught and torch.is_grad_enabled()):
        raw, norm = indexer.wk(latent.detach()), indexer.k_norm
        if rounded:
            index_keys = _IndexKeys.apply(raw, norm.weight, norm.eps, angles)  # pyright: ignore
        else:
            normed = norm(raw)
            index_keys = index_heads(normed[:, None], *angles, rounded=False)[:, 0]
    return Keys(groups, entries, index_keys)


def projected(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Values and gates [T, c] that the compressor of a source layer pools."""
    compressor = attention.compressor
    if attention.ratio == 1:
        return compressor.wkv(x), None
    joint = wide_linear(x, torch.cat([compressor.wkv.weight, compressor.wgate.weight]))
    values, gates = joint.split(attention.width, 1)
    return values.contiguous(), gates.contiguous()


def cached_keys(attention: Attention, x: Tensor, flat: Flat, cache: PolicyCache) -> Keys:
    """Compress new tokens of cached sequences, write the records of closed groups, and read all keys."""
    rows, ratio, layer = flat.batch.rows[0], attention.ratio, attention.layer
    compressor, plan, width = attention.compressor, rows.groups(ratio), attention.width
    gates = None
    if ratio == 1:
        values = rows.pad(compressor.wkv(x)).flatten(0, 1)
    else:
        joint = wide_linear(x, torch.cat([compressor.wkv.weight, compressor.wgate.weight]))
        aligned = compressor.aligned(joint, rows, plan, cache.pending.get(layer)).flatten(0, 2)
        values, gates = aligned[:, :width].contiguous(), aligned[:, width:].contiguous()
    angles = flat.group_angles(ratio, attention.frequencies)
    main, index = records_of(cache, layer)
    latent, records = pack_keys(
        "main",
        values,
        gates=gates,
        ratio=ratio,
        norm=compressor.norm.weight,
        eps=compressor.norm.eps,
        rope=angles,
    )
    main.write(plan, records)
    index.write(plan, index_records(attention, latent, angles))
    return read_keys(attention, flat, cache)


def index_records(attention: Attention, latent: Tensor, angles: Angles) -> Tensor:
    """Index records [E, bytes] of latents [E, c]."""
    indexer = attention.indexer
    norm = indexer.k_norm
    return pack_keys("index", indexer.wk(latent), norm=norm.weight, eps=norm.eps, rope=angles)[1]


def records_of(cache: PolicyCache, layer: int) -> tuple[RecordRows, RecordRows]:
    """Where main and index keys of `layer` lie in a packed cache."""
    main, index = cache.main[layer], cache.index_keys[layer]
    assert isinstance(main, RecordRows) and isinstance(index, RecordRows)
    return main, index


def read_keys(attention: Attention, flat: Flat, cache: PolicyCache) -> Keys:
    """The keys of a source layer as cached, for the sequences of `flat`."""
    rows, groups = flat.batch.rows[0], flat.groups(attention.ratio)
    assert rows.target is not None
    width, channels = rows.width(attention.ratio), attention.indexer.width
    main, index = records_of(cache, attention.layer)
    table = torch.zeros(
        (max(groups.total, 1) + flat.window_rows, attention.width), dtype=torch.bfloat16, device=flat.device
    )
    entries = table[: max(groups.total, 1)]
    if not groups.total:
        return Keys(groups, entries, entries.new_zeros(1, channels), table)
    held, held_index = main.gather(rows.target.slots, width), index.gather(rows.target.slots, width)
    assert isinstance(held, RecordKeys) and isinstance(held_index, RecordKeys)
    entries.copy_(unpack_keys(held.records()))
    return Keys(groups, entries, unpack("index", held_index.records()).to(torch.bfloat16), table)


def ask(
    attention: Attention, x: Tensor, latent: Tensor, angles: Angles, rounded: bool, taught: bool
) -> tuple[Tensor, Tensor]:
    """Index queries [T, h, c_I] and head weights [T, h] fp32; a gradient goes to the indexer only."""
    indexer = attention.indexer
    with torch.set_grad_enabled(taught and torch.is_grad_enabled()):
        heads = indexer.wq_b(latent.detach()).unflatten(-1, (indexer.heads, indexer.width))
        heads = index_heads(heads, *angles, rounded=rounded)
        weights = indexer.weights_proj(x.detach()) * (indexer.width**-0.5 * indexer.heads**-0.5)
        return heads, weights.float()


def choose(attention: Attention, queries: tuple[Tensor, Tensor], keys: Keys, flat: Flat, grad: bool) -> Keys:
    """`keys` with what the tokens that `ask` select among them."""
    groups = keys.groups
    with torch.no_grad():
        asked = (queries[0].detach(), keys.index_keys.detach(), queries[1].detach())
        rule = attention.rule
        longest = int(flat.longest // attention.ratio)
        if (
            rule is None
            or rule.count(longest) <= rule.blocks
            or (attention.restricted and keys.candidates is None)
        ):
            indices = index_topk(*asked, attention.top_k, begins=groups.begins, ends=groups.ends)
            candidates = keys.candidates
        else:
            indices, candidates = _among_candidates(attention, asked, keys, flat)
        indices = _forced(attention, indices, keys, flat)
        if flat.batch.trace is not None:
            flat.batch.record_layer(attention.layer, chosen_keys=_local(indices, groups))
        inverse = invert(indices, len(keys.entries)) if grad else None
    selected = selection(flat, indices, len(keys.entries))
    return replace(keys, selected=selected, inverse=inverse, candidates=candidates)


def selection(flat: Flat, indices: Tensor, entries: int) -> Selected:
    """What the tokens of `flat` attend to, besides `indices` their windows."""
    last = (
        flat.last
        if flat.last is not None
        else torch.arange(flat.count, dtype=torch.int32, device=flat.device)
    )
    return Selected(entries, indices, flat.first, last, flat.window)


def _among_candidates(
    attention: Attention, asked: tuple[Tensor, Tensor, Tensor], keys: Keys, flat: Flat
) -> tuple[Tensor, Tensor]:
    """Selections [T, K], and candidate blocks [T, C], made here or read from `keys`."""
    rule, groups = attention.rule, keys.groups
    assert rule is not None
    query, index_keys, weights = asked
    count = flat.count
    indices = torch.full((count, attention.top_k), -1, dtype=torch.int32, device=flat.device)
    blocks = keys.candidates
    if blocks is None:
        blocks = torch.full((count, rule.blocks), -1, dtype=torch.int32, device=flat.device)
    for start, stop, begin, end, before in flat.sequences(attention.ratio):
        step = queries_at_once(end - begin)
        # Those that see most come first, so that memory is taken from the device once.
        for low in reversed(range(start, stop, step)):
            part = slice(low, min(low + step, stop))
            seen = int((before + part.stop - start) // attention.ratio)
            own = index_keys[begin : min(begin + -(-max(seen, 1) // _TILE) * _TILE, end)]
            visible = groups.ends[part] - begin
            if keys.candidates is None:
                begins = torch.zeros_like(visible)
                scores = index_scores(query[part], own, weights[part], begins=begins, ends=visible)
                blocks[part] = best_blocks(scores, visible, rule.blocks, rule.size)
                found = topk(scores, attention.top_k, ends=visible)
            else:
                given = {"visible": visible, "blocks": blocks[part], "size": rule.size}
                found = topk_in_blocks(query[part], own, weights[part], attention.top_k, **given)
            indices[part] = torch.where(found >= 0, found + begin, -1) if begin else found
    return indices, blocks


def _forced(attention: Attention, indices: Tensor, keys: Keys, flat: Flat) -> Tensor:
    """Captures the selection, and puts in the one that replay forces."""
    batch, groups = flat.batch, keys.groups
    given = None if batch.choices is None else batch.choices.selection_of(attention.layer)
    if given is not None:
        padded = torch.nn.functional.pad(given, (0, attention.top_k - given.shape[-1]), value=FREE)
        local = force(_local(indices, groups).long(), padded.to(indices.device))
        indices = torch.where(local >= 0, local + groups.begins[:, None], -1).int()
    if batch.capture is not None and batch.capture.selections_too:
        batch.capture.selections[attention.layer] = batch.among_all(_local(indices, groups).long())
    return indices


def _local(indices: Tensor, groups: Groups) -> Tensor:
    """Chosen rows [T, K] counted from each token's first key, -1 for none."""
    return torch.where(indices >= 0, indices - groups.begins[:, None], -1)
