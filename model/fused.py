"""A pass of the policy on kernels: the same layers as `Policy`, on packed tokens instead of rows.

Training, prefill and the extension of cached sequences run here on a GPU; single decoded tokens have a step
of their own (`model.decode`). What one site hands to the next is finished, mixed and normalised in one pass
over the streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from model.batch import Batch
from model.config import AttentionMode, PolicyConfig
from model.flat import Angles, Flat, Groups
from model.flat_keys import Keys, ask, cached_keys, choose, new_keys, read_keys, selection
from model.layers.attention import Attention, RunOptions
from model.layers.block import Block
from model.layers.exact import in_present_mode, is_exact
from model.layers.hyper_connections import HyperConnection
from model.layers.indexer_loss import Supervision
from model.layers.moe import MixtureOfExperts, Routing
from model.ops.dispatch import note, served
from model.ops.experts import Plan, activated, combine, few_rows, grouped, plan_of, route
from model.ops.hyper_boundary import STREAMS, hyper_coefficients, hyper_input, hyper_update
from model.ops.index_loss import index_loss
from model.ops.latents import latent_norm, latents
from model.ops.packed_experts import packed_experts
from model.ops.rotary import rotary, window_keys
from model.ops.sparse_attention import attention_site, group_heads, table_attention

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache
    from model.cache.progress import Span
    from model.policy import Policy

Handed = tuple[Tensor, Tensor, Tensor, Tensor, Keys | None, Routing]
"""What a block hands on: streams, coefficients, the next input, sums of squares, keys; and its routing."""
COEFFICIENTS = (2 + STREAMS) * STREAMS
_ROUNDS, _FLOOR = 20, 1e-6
_FEWEST_HEADS = 16
"""Heads are summed over by products in the gradients of keys, which take no fewer."""


def unserved(config: PolicyConfig) -> str | None:
    """Why the kernels do not serve a shape, or None."""
    shape = (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps)
    if shape != (STREAMS, _ROUNDS, _FLOOR):
        return f"hyper-connections {shape}, kernels have {(STREAMS, _ROUNDS, _FLOOR)}"
    if config.head_dim % 64 or config.index_head_dim % 64:
        return "head widths that are no multiple of 64"
    if config.num_attention_heads < _FEWEST_HEADS:
        return f"fewer than {_FEWEST_HEADS} heads"
    return None


def applies(policy: Policy, embedded: Tensor, batch: Batch, options: RunOptions) -> bool:
    """Whether a pass runs here; what it runs on is noted for `doctor` and the log."""
    if not served(embedded):
        note("policy", f"reference ({embedded.dtype} on {embedded.device.type})".replace("torch.", ""))
        return False
    why = unserved(policy.config)
    if why is None and batch.image is not None:
        why = "images"
    if why is None and options.supervision is not None and options.supervision.variant == "dense":
        why = "the indexer's loss over all keys"
    if why is None and any(block.ffn.spread is not None for block in policy.blocks):
        why = "experts held by other processes"
    note("policy", "kernels" if why is None else f"reference for {why}")
    return why is None


def decodes(policy: Policy, cache: PolicyCache, spans: list[Span]) -> bool:
    """Whether an extension by `spans` is one decoded token a sequence, which has a step of its own."""
    weight: Tensor = policy.embed.weight  # pyright: ignore[reportAssignmentType]
    if not served(weight) or cache.storage != "packed" or unserved(policy.config) is not None:
        return False
    if torch.is_grad_enabled() or any(block.ffn.spread is not None for block in policy.blocks):
        return False
    return all(span.length == 1 and not span.counted and span.decoder_start == span.start for span in spans)


class Pass:
    """One forward pass."""

    def __init__(self, policy: Policy, cache: PolicyCache | None, options: RunOptions) -> None:
        self.policy, self.cache, self.options = policy, cache, options
        if cache is not None and cache.storage != "packed":
            raise ValueError(
                f"kernels read packed caches and this one is {cache.storage}: make it with "
                "storage='packed' and set policy.fake_quant, or run under model.ops.dispatch.reference_only()"
            )
        self.routings: list[Routing] = []
        self.chosen: list[Tensor] = []
        self.features: list[Tensor] = []

    def run(self, embedded: Tensor, batch: Batch, rows: Tensor | None) -> tuple[Tensor, list[Routing]]:
        """The head's input [T, d], and where tokens were routed."""
        policy, whole = self.policy, batch
        config = policy.config
        flat = Flat(batch, config.sliding_window)
        streams = embedded.unsqueeze(1).expand(-1, STREAMS, -1).contiguous()
        coefficient = torch.zeros(len(embedded), COEFFICIENTS, device=streams.device)
        coefficient[:, 0] = 1.0
        x = squares = keys = None
        sources: dict[int, Keys] = {}
        wanted = batch.keep_features or batch.trace is not None
        for block in policy.blocks:
            if block.engram is not None:
                streams, x = block.inject(streams, batch, rows), None
            if wanted and block.layer in config.dspark_target_layer_ids:
                self.features.append(streams.float().mean(1).to(streams.dtype))
            if x is None or squares is None:
                x, squares = hyper_input(
                    streams, coefficient, block.attn_norm.weight, eps=block.attn_norm.eps
                )
            if block.layer == config.decoder_start:
                batch.record("boundary", x)
                sources = self._decoder_keys(x, flat)
                if batch.decoder is None:
                    break
                if batch.decoder is not batch:
                    streams, coefficient, x, squares, rows = self._decoded(
                        batch, streams, coefficient, x, squares, rows
                    )
                    batch = batch.decoder
                    flat = Flat(batch, config.sliding_window)
                    if self.cache is not None:
                        sources = {
                            layer: read_keys(policy.blocks[layer].attn, flat, self.cache) for layer in sources
                        }
            if block.layer in sources:
                keys = sources.pop(block.layer)
            elif block.attn.mode is AttentionMode.FULL:
                keys = self._keys(block.attn, x, flat)
            following = (
                policy.norm
                if block.layer + 1 == len(policy.blocks)
                else policy.blocks[block.layer + 1].attn_norm
            )
            step = self._step(block, flat, following.weight, following.eps)
            if block.recompute and torch.is_grad_enabled():
                step = partial(checkpoint, in_present_mode(step), use_reentrant=False)
            results: Handed = step(streams, x, squares, keys)  # pyright: ignore[reportAssignmentType]
            streams, coefficient, x, squares, keys, routing = results
            self.routings.append(routing)
            if batch.capture is not None:
                self.chosen.append(batch.among_all(routing.expert_ids))
        if whole.capture is not None:
            policy.complete(whole.capture, self.chosen)
        if self.features:
            whole.features = torch.cat(self.features, dim=-1)
            whole.record("main_hidden", whole.features)
        assert x is not None
        return x, self.routings

    def _decoded(
        self,
        batch: Batch,
        streams: Tensor,
        coefficient: Tensor,
        x: Tensor,
        squares: Tensor,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        tokens = batch.decoder_tokens
        if tokens is None:
            return streams, coefficient, x, squares, rows
        self.features = [feature[tokens] for feature in self.features]
        rows = None if rows is None else rows[tokens]
        return streams[tokens], coefficient[tokens], x[tokens], squares[tokens], rows

    def _keys(self, attention: Attention, x: Tensor, flat: Flat) -> Keys:
        if self.cache is None:
            taught = self.options.supervision is not None
            return new_keys(attention, x, flat, self.options.fake_quant, taught)
        return cached_keys(attention, x, flat, self.cache)

    def _decoder_keys(self, boundary: Tensor, flat: Flat) -> dict[int, Keys]:
        config = self.policy.config
        start = config.decoder_start
        assert start is not None
        sources = [layer for layer in config.kv_source_layer_ids if layer >= start]
        return {layer: self._keys(self.policy.blocks[layer].attn, boundary, flat) for layer in sources}

    def _step(self, block: Block, flat: Flat, norm: Tensor, eps: float) -> Callable[..., Handed]:
        """Both sites of a block, ending with the input of what follows."""
        record = partial(flat.batch.record_layer, block.layer)

        def step(streams: Tensor, x: Tensor, squares: Tensor, keys: Keys | None) -> Handed:
            coefficient, streams = shared_coefficients(block.hc_attn, streams, squares)
            record(attn_in=x, squares=squares, attn_coefficients=coefficient)
            update, keys = attend(block.attn, x, flat, keys, self.cache, self.options)
            record(attn_out=update)
            ffn_norm = block.ffn_norm
            streams, x, squares = hyper_update(
                streams, update, coefficient, ffn_norm.weight, eps=ffn_norm.eps
            )
            coefficient, streams = shared_coefficients(block.hc_ffn, streams, squares)
            record(ffn_in=x, ffn_coefficients=coefficient)
            choices = flat.batch.choices
            forced = None if choices is None else choices.experts_of(block.layer)
            update, routing = experts(block.ffn, x, forced)
            record(ffn_out=update)
            streams, x, squares = hyper_update(streams, update, coefficient, norm, eps=eps)
            record(streams=streams, router_ids=routing.expert_ids)
            return streams, coefficient, x, squares, keys, routing

        return step


def coefficients(site: HyperConnection, streams: Tensor, squares: Tensor) -> Tensor:
    """[T, 24] of a site from its streams."""
    return shared_coefficients(site, streams, squares)[0]


def shared_coefficients(site: HyperConnection, streams: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 24] of a site, and its streams for the update after it, so that both gradients meet in one pass."""
    return hyper_coefficients(streams, squares, site.fn, site.base, site.scale)


def attend(
    attention: Attention,
    x: Tensor,
    flat: Flat,
    keys: Keys | None,
    cache: PolicyCache | None,
    options: RunOptions,
) -> tuple[Tensor, Keys | None]:
    """An attention site: input [T, d] to output [T, d], and what later layers share."""
    angles = flat.angles(attention.ratio, attention.frequencies)
    if options.supervision is None and (cache is not None or not torch.is_grad_enabled()):
        output, keys = _attend_table(attention, x, angles, flat, keys, cache, options)
        return project(attention, output), keys
    latent = latent_norm(attention.wq_a(x), attention.q_norm.weight, attention.q_norm.eps)
    query = attention.wq_b(latent).unflatten(-1, (attention.heads, attention.width))
    taught, asked = options.supervision is not None, None
    if attention.mode in (AttentionMode.FULL, AttentionMode.REINDEX):
        assert keys is not None
        asked = ask(attention, x, latent, angles, options.fake_quant, taught)
        keys = choose(attention, asked, keys, flat, torch.is_grad_enabled() and cache is None)
    used = keys if attention.ratio and keys is not None else _window_alone(flat, x, attention.width)
    narrow, lse, query = _attend_training(attention, query, attention.wkv(x), angles, used, flat, options)
    if options.supervision is not None and asked is not None:
        _supervise(options.supervision, attention, asked, query, lse, used)
    return attention.wo_b(narrow), keys


def _window_alone(flat: Flat, x: Tensor, width: int) -> Keys:
    """Of a layer without main keys: one entry, and selections of none."""
    if "window" not in flat.key_rows:
        none = Groups(0, flat.first, flat.first, None, None)
        indices = torch.empty((flat.count, 0), dtype=torch.int32, device=x.device)
        table = x.new_zeros(1 + flat.window_rows, width)
        keys = Keys(none, table[:1], table[:1], table, selection(flat, indices, 1))
        flat.key_rows["window"] = keys
    found = flat.key_rows["window"]
    assert isinstance(found, Keys)
    return found


def _attend_training(
    attention: Attention,
    query: Tensor,
    window: Tensor,
    angles: Angles,
    keys: Keys,
    flat: Flat,
    options: RunOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `wo_b` reads [T, G N], the log-sum-exp, and the query as turned by its positions."""
    assert keys.selected is not None
    norm = attention.kv_norm
    rows = window_keys(window, norm.weight, *angles, eps=norm.eps, rounded=options.fake_quant)
    return attention_site(
        query,
        keys.entries,
        keys.selected.indices,
        rows,
        flat.first,
        attention.attn_sink,
        angles,
        attention.wo_a.weight.unflatten(0, (attention.groups, -1)),
        scale=attention.width**-0.5,
        window_size=flat.window,
        inverse=keys.inverse,
        exact=is_exact(),
    )


def _supervise(
    supervision: Supervision,
    attention: Attention,
    asked: tuple[Tensor, Tensor],
    query: Tensor,
    lse: Tensor,
    keys: Keys,
) -> None:
    """Add a layer's indexer loss: over its selection, against what the attention weighed."""
    assert keys.selected is not None
    indices = keys.selected.indices
    losses = index_loss(
        *asked,
        keys.index_keys,
        query,
        keys.entries,
        lse,
        indices,
        scale=attention.width**-0.5,
        inverse=keys.inverse,
    )
    supervision.add(attention.layer, losses.sum(), (indices >= 0).any(1).sum())


def _attend_table(
    attention: Attention,
    x: Tensor,
    angles: Angles,
    flat: Flat,
    keys: Keys | None,
    cache: PolicyCache | None,
    options: RunOptions,
) -> tuple[Tensor, Keys | None]:
    """Heads [T, H, c], turned back, without gradient, and what later layers share."""
    used = keys if attention.ratio and keys is not None else _window_alone(flat, x, attention.width)
    table = used.table
    if table is None:
        table = torch.cat([used.entries, used.entries.new_zeros(flat.window_rows, attention.width)])
    place, row = table[len(used.entries) :], flat.batch.rows[0]
    ring = target = None
    if cache is not None and flat.held:
        held = cache.windows.gather(attention.layer, row)
        place.view(row.count, -1, attention.width)[:, : flat.held] = held
    if cache is not None and flat.ring_target is not None:
        ring, target = cache.windows.storage[attention.layer].flatten(0, 1), flat.ring_target
    whole = flat.window_rows == flat.count
    latent, window = latents(
        attention.wq_a(x),
        attention.q_norm.weight,
        attention.wkv(x),
        attention.kv_norm.weight,
        angles,
        eps=attention.kv_norm.eps,
        rounded=options.fake_quant,
        ring=ring,
        target=target,
        out=place if whole else None,
    )
    if not whole:
        assert flat.last is not None
        place.index_copy_(0, flat.last.long(), window)
    query = attention.wq_b(latent).unflatten(-1, (attention.heads, attention.width))
    if attention.mode in (AttentionMode.FULL, AttentionMode.REINDEX):
        assert keys is not None
        asked = ask(attention, x, latent, angles, options.fake_quant, False)
        keys = used = choose(attention, asked, keys, flat, False)
    assert used.selected is not None
    if flat.batch.trace is not None:
        # A copy: the heads are turned where they lie.
        flat.batch.record_layer(attention.layer, query_latent=latent, query=query.clone())
    query = rotary(query, *angles, in_place=not torch.is_grad_enabled())
    output = table_attention(
        query, table, used.selected, attention.attn_sink, scale=attention.width**-0.5, exact=is_exact()
    )
    output = rotary(output, *angles, inverse=True, in_place=not torch.is_grad_enabled())
    flat.batch.record_layer(attention.layer, heads=output)
    return output, keys


def project(attention: Attention, output: Tensor) -> Tensor:
    """Heads [T, H, c], turned back, projected by group to [T, d]; without gradient."""
    weight = attention.wo_a.weight.unflatten(0, (attention.groups, -1))
    return attention.wo_b(group_heads(output, weight, is_exact()))


def experts(layer: MixtureOfExperts, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Routing]:
    """An expert site: tokens [T, d] to [T, d], and where they went."""
    rows, plan, routing = expert_rows(layer, x, forced)
    return combine(rows, plan), routing


def expert_rows(layer: MixtureOfExperts, x: Tensor, forced: Tensor | None) -> tuple[Tensor, Plan, Routing]:
    """What the experts of all tokens give [n, d], of which `combine` sums those of a token."""
    gate = layer.gate
    affinity, ids, weights, loads = route(
        x,
        gate.weight,
        gate.bias,
        chosen=gate.chosen,
        factor=gate.factor,
        temperature=gate.temperature,
        forced=forced,
    )
    routing = Routing(affinity, ids, weights)
    plan = plan_of(ids, layer.experts, layer.shared, loads)
    if layer.packed is not None:
        layer.refuse_training(x)
        packed, options = layer.packed, {"limit": layer.limit, "rounded": layer.quantized}
        rows = packed_experts(x, packed.w13, packed.w2, weights, plan, **options, exact=is_exact())
        return rows, plan, routing
    x = layer.rounded(x)
    if not layer.quantized:
        few = few_rows(x, layer.w13, layer.w2, weights, plan, limit=layer.limit)
        if few is not None:
            return few, plan, routing
    active = activated(x, layer.w13, weights, plan, limit=layer.limit)
    return grouped(layer.rounded(active), layer.w2, plan), plan, routing
