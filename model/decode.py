"""One decoded token for each of some cached sequences, with no number of it on the host.

Everything a step does follows from tensors on the device (slots, tokens, positions), so that it can be
captured as a graph once and replayed (`model.decode_graphs`). Keys are read where they lie, as records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import AttentionMode
from model.flat import Angles
from model.flat_keys import index_records, projected, records_of
from model.fused import COEFFICIENTS, coefficients, expert_rows
from model.layers.attention import Attention
from model.layers.engram_hash import look_back
from model.layers.exact import is_exact
from model.layers.linear import rounded_input
from model.layers.rope import cosine_and_sine
from model.ops.candidates import best_blocks
from model.ops.decode_rows import decode_rows
from model.ops.exact_linear import exact_linear, exact_pair
from model.ops.hyper_boundary import STREAMS, hyper_input, hyper_update, hyper_update_of_rows
from model.ops.index_decode import decode_scores
from model.ops.latents import latents
from model.ops.pack_keys import pack_keys
from model.ops.rotary import index_heads
from model.ops.side import SideStream
from model.ops.sparse_attention import group_heads
from model.ops.sparse_decode import sparse_decode
from model.ops.topk import topk
from model.ops.window_rows import window_rows

if TYPE_CHECKING:
    from model.batch import Trace
    from model.cache.policy_cache import PolicyCache
    from model.policy import Policy

_FEW = 32
"""With no more tokens the library's split products are faster than our own."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """What a step reads. All [B] int64 on the device."""

    slots: Tensor
    token_ids: Tensor
    positions: Tensor
    """Of the tokens."""
    floors: Tensor
    """[2, B] first positions whose window keys the encoder and the decoder see."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the layers of a group share."""

    source: int
    rows: Tensor | None = None
    """[B, K] int32 rows of main records."""
    counts: Tensor | None = None
    """[B, 2] int32, how many of these rows and of the window's are set."""
    blocks: Tensor | None = None
    """[B, C] int32 candidate blocks; None: all keys."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the groups of a step's tokens lie. All int64 on the device."""

    rows: Tensor
    """[B] of their records."""
    angles: Angles
    """Of the groups."""
    own: Tensor
    """[B] rows of the tokens among the pending ones."""
    waiting: Tensor
    """[B * ratio] rows of all members of the groups among the pending ones."""


class Step:
    """One step of `policy` over `cache`, for contexts of up to `width` tokens."""

    def __init__(
        self, policy: Policy, cache: PolicyCache, given: StepInput, width: int, trace: Trace | None = None
    ) -> None:
        self.policy, self.cache, self.given, self.width, self.trace = policy, cache, given, width, trace
        config = policy.config
        assert cache.pages is not None
        self.table = cache.pages.table.index_select(0, given.slots)
        self.entries = cache.windows.storage.shape[2]
        self.target = given.slots * self.entries + given.positions % self.entries
        rows, counts = window_rows(
            given.slots, given.positions, given.floors, entries=self.entries, window=config.sliding_window
        )
        self.windows = list(zip(rows, counts, strict=True))
        self._angles: dict[int, Angles] = {}
        self._ends: dict[int, Tensor] = {}
        self._places: dict[int, Place] = {}
        for block in policy.blocks:
            self.angles(block.attn)  # for both streams
        none = torch.full((len(given.slots), 1), -1, dtype=torch.int32, device=given.slots.device)
        self._side = SideStream(none.device)
        self._nothing = none, none.new_zeros((1, 9 * config.head_dim // 16), dtype=torch.uint8)

    def run(self) -> Tensor:
        """[B, d], the head's input."""
        policy, config = self.policy, self.policy.config
        embedded = F.embedding(self.given.token_ids, policy.embed.weight)  # pyright: ignore
        memories = self._side.run(self._memories)
        streams = embedded.unsqueeze(1).expand(-1, STREAMS, -1).contiguous()
        coefficient = torch.zeros(len(embedded), COEFFICIENTS, device=streams.device)
        coefficient[:, 0] = 1.0
        x = squares = chosen = None
        sources: dict[int, Chosen] = {}
        for block in policy.blocks:
            attention = block.attn
            if block.engram is not None:
                self._side.join()
                streams, x = block.engram.gate(streams, memories.pop(block.layer), None), None
                self._record(block.layer, engram_out=streams)
            if x is None or squares is None:
                x, squares = hyper_input(
                    streams, coefficient, block.attn_norm.weight, eps=block.attn_norm.eps
                )
            if block.layer == config.decoder_start:
                for layer in (s for s in config.kv_source_layer_ids if s >= block.layer):
                    sources[layer] = self._side.run(partial(self._add_keys, policy.blocks[layer].attn, x))
            if block.layer in sources:
                chosen = sources.pop(block.layer)
            elif attention.mode is AttentionMode.FULL:
                chosen = self._side.run(partial(self._add_keys, attention, x))
            coefficient = self._side.run(partial(coefficients, block.hc_attn, streams, squares))
            self._record(block.layer, attn_in=x, squares=squares)
            update, chosen = self._attend(attention, x, chosen)
            ffn_norm = block.ffn_norm
            self._side.join()
            self._record(block.layer, attn_coefficients=coefficient, attn_out=update)
            streams, x, squares = hyper_update(
                streams, update, coefficient, ffn_norm.weight, eps=ffn_norm.eps
            )
            coefficient = self._side.run(partial(coefficients, block.hc_ffn, streams, squares))
            rows, plan, routing = expert_rows(block.ffn, x, None)
            self._side.join()
            self._record(block.layer, ffn_in=x, router_ids=routing.expert_ids, ffn_coefficients=coefficient)
            last = block.layer + 1 == len(policy.blocks)
            norm = policy.norm if last else policy.blocks[block.layer + 1].attn_norm
            streams, x, squares = hyper_update_of_rows(
                streams, rows, plan.place, coefficient, norm.weight, eps=norm.eps
            )
            self._record(block.layer, streams=streams)
        assert x is not None
        return x

    def _record(self, layer: int, **values: Tensor) -> None:
        """Keep what `model.fused.Pass` keeps under the same names, when this step is traced."""
        if self.trace is not None:
            self.trace.record_layer(layer, **values)

    def angles(self, attention: Attention) -> Angles:
        """Of the tokens in a layer."""
        kind = min(attention.ratio, 1)
        if kind not in self._angles:
            self._angles[kind] = cosine_and_sine(self.given.positions, attention.frequencies)
        return self._angles[kind]

    def ends(self, ratio: int) -> Tensor:
        """[B] int32, how many main keys of `ratio` tokens each token sees."""
        if ratio not in self._ends:
            self._ends[ratio] = torch.div(self.given.positions + 1, ratio, rounding_mode="floor").int()
        return self._ends[ratio]

    def _memories(self) -> dict[int, Tensor]:
        """What the n-gram memories say of the tokens [B, (n + 1) d], by layer."""
        policy, cache, given = self.policy, self.cache, self.given
        if policy.engram_hash is None or policy.token_map is None:
            return {}
        pad = policy.token_map[policy.config.engram_pad_token_id]
        ids = policy.token_map[given.token_ids]
        entries = cache.tail.shape[1]
        cache.tail.view(-1).index_copy_(0, given.slots * entries + given.positions % entries, ids)
        before = given.positions[:, None] - torch.arange(cache.reach + 1, device=ids.device)
        held = cache.tail[given.slots[:, None], before % entries]
        rows = policy.engram_hash(look_back(torch.where(before < 0, pad, held), pad))
        return {
            block.layer: block.engram.project(rows[:, block.engram_column])
            for block in policy.blocks
            if block.engram is not None
        }

    def _add_keys(self, attention: Attention, x: Tensor) -> Chosen:
        """Write the record of each token's group, which is seen once the group has closed."""
        layer, cache, place = attention.layer, self.cache, self._place(attention)
        norm, gates = attention.compressor.norm, None
        values, own_gates = projected(attention, x)
        if own_gates is not None:
            pending = cache.pending[layer]
            flat = pending.view(-1, pending.shape[2])
            flat.index_copy_(0, place.own, torch.cat([values, own_gates], 1))
            waiting = flat.index_select(0, place.waiting)
            values, gates = (
                waiting[:, : attention.width].contiguous(),
                waiting[:, attention.width :].contiguous(),
            )
        main, index = records_of(cache, layer)
        latent, records = pack_keys(
            "main",
            values,
            gates=gates,
            ratio=attention.ratio,
            norm=norm.weight,
            eps=norm.eps,
            rope=place.angles,
        )
        main.records.index_copy_(0, place.rows, records)
        index.records.index_copy_(0, place.rows, index_records(attention, latent, place.angles))
        return Chosen(layer)

    def _place(self, attention: Attention) -> Place:
        """Where the tokens' groups lie, which is the same in every source layer of a ratio."""
        ratio, given, cache = attention.ratio, self.given, self.cache
        if ratio not in self._places:
            size = records_of(cache, attention.layer)[0].page_groups
            group = torch.div(given.positions, ratio, rounding_mode="floor")
            pages = self.table.gather(1, torch.div(group, size, rounding_mode="floor")[:, None])[:, 0]
            rows, angles = pages * size + group % size, self.angles(attention)
            own = waiting = given.slots
            if ratio > 1:
                angles = cosine_and_sine(group * ratio, attention.frequencies)
                ring = cache.pending[attention.layer].shape[1]
                own = given.slots * ring + given.positions % ring
                members = group[:, None] * ratio + torch.arange(ratio, device=group.device)
                waiting = (given.slots[:, None] * ring + members % ring).flatten()
            self._places[ratio] = Place(rows, angles, own, waiting)
        return self._places[ratio]

    def _choose(self, attention: Attention, x: Tensor, latent: Tensor, known: Chosen) -> Chosen:
        main, index = records_of(self.cache, known.source)
        indexer, rule = attention.indexer, attention.rule
        heads = indexer.wq_b(latent).unflatten(-1, (indexer.heads, indexer.width))
        heads = index_heads(heads, *self.angles(attention), rounded=True)
        ends = self.ends(attention.ratio)
        width = max(self.width // attention.ratio, 1)
        size = 8 if rule is None else rule.size
        blocks = known.blocks if attention.restricted else None
        scores = decode_scores(
            heads,
            indexer.weights_proj(x),
            index.records,
            self.table,
            ends,
            width=width if blocks is None else blocks.shape[1] * size,
            page_groups=main.page_groups,
            blocks=blocks,
            block_size=size,
            factor=indexer.width**-0.5 * indexer.heads**-0.5,
        )
        made = known.blocks
        if rule is not None and not attention.restricted and rule.count(width) > rule.blocks:
            made = best_blocks(scores, ends, rule.blocks, size)
        if blocks is None:
            chosen = topk(scores, attention.top_k, ends=ends)
        else:
            chosen = topk(scores, attention.top_k, blocks=blocks, block_size=size, packed=True)
        seen = self._window_of(attention)[1]
        rows, counts = decode_rows(chosen, self.table, seen, page_groups=main.page_groups)
        self._record(attention.layer, chosen_keys=chosen)
        return replace(known, rows=rows, counts=counts, blocks=made)

    def _window_of(self, attention: Attention) -> tuple[Tensor, Tensor]:
        start = self.policy.config.decoder_start
        return self.windows[start is not None and attention.layer >= start]

    def _attend(self, attention: Attention, x: Tensor, known: Chosen | None) -> tuple[Tensor, Chosen | None]:
        angles, norm = self.angles(attention), attention.kv_norm
        ring = self.cache.windows.storage[attention.layer].flatten(0, 1)
        values, window = _projections(attention, x)
        latent, _ = latents(
            values,
            attention.q_norm.weight,
            window,
            norm.weight,
            angles,
            eps=norm.eps,
            rounded=False,
            ring=ring,
            target=self.target,
        )
        query = attention.wq_b(latent).unflatten(-1, (attention.heads, attention.width))
        if attention.mode in (AttentionMode.FULL, AttentionMode.REINDEX):
            assert known is not None
            self._side.join()
            known = self._choose(attention, x, latent, known)
        window_rows, window_counts = self._window_of(attention)
        if attention.ratio and known is not None and known.rows is not None and known.counts is not None:
            rows, counts = known.rows, known.counts
            records = records_of(self.cache, known.source)[0].records
        else:
            rows, records = self._nothing
            counts = torch.stack([torch.zeros_like(window_counts), window_counts], 1)
        output = sparse_decode(
            query,
            records,
            rows,
            ring,
            window_rows,
            attention.attn_sink,
            scale=attention.width**-0.5,
            counts=counts,
            rope=angles,
            exact=is_exact(),
        )
        self._record(attention.layer, query_latent=latent, query=query, heads=output)
        return _output(attention, output), known


def _projections(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Query latents [B, q] and window keys [B, c] before their norms, by one product."""
    down, window = attention.wq_a, attention.wkv
    assert down.quantized == window.quantized
    joint = exact_pair(rounded_input(x) if down.quantized else x, down.weight, window.weight)
    values, keys = joint.split([len(down.weight), len(window.weight)], 1)
    return values, keys


def _output(attention: Attention, heads: Tensor) -> Tensor:
    """Heads [B, H, c], turned back, projected by group to [B, d]."""
    weight = attention.wo_a.weight.unflatten(0, (attention.groups, -1))
    narrow, last = group_heads(heads, weight, is_exact()), attention.wo_b
    if len(heads) <= _FEW:
        return last(narrow)
    # The library splits so deep a product too, and adds up in a second kernel.
    return exact_linear(rounded_input(narrow) if last.quantized else narrow, last.weight)
