"""Compressed sparse attention: a sliding window per layer plus selected main keys shared between layers.

A Full layer compresses its input to main keys and selects among them, a Reindex layer selects anew among an
earlier layer's keys, a Reuse layer takes both as they are. What layers share travels in `Globals`, one a
group of rows. Short rows are computed as dense products with a mask, long ones by gathering each token's
window and selection, a chunk of tokens at a time; both give the same result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.batch import Batch, Trace
from model.cache.main_kv import KeySource, TensorKeys
from model.choices import Capture
from model.config import AttentionMode, PolicyConfig
from model.layers.attend import as_bias, attend
from model.layers.compressor import Compressor
from model.layers.exact import fill, is_exact, matmul
from model.layers.indexer import CandidateRule, Choice, Indexer, IndexQueries, select
from model.layers.indexer_loss import Supervision, Teacher, indexer_loss
from model.layers.linear import Linear, widen
from model.layers.norm import RMSNorm
from model.layers.rope import Rotation, layer_frequencies, rotate
from model.layers.selection import Selection
from model.quant.blocks import round_main, round_window, straight_through
from model.rows import Rows

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache

_CHUNK_ELEMENTS = 1 << 23
"""Gathered key elements held at once."""


@dataclass(frozen=True, slots=True)
class Globals:
    """What layers hand on for one group of rows."""

    main: KeySource | None = None
    index_keys: KeySource | None = None
    selection: Selection | None = None
    candidates: Tensor | None = None


@dataclass(slots=True)
class RunOptions:
    """How to run one forward pass."""

    fake_quant: bool
    dense_limit: int
    """Rows with more keys than this gather their selection instead of masking a dense product."""
    supervision: Supervision | None = None


class Attention(nn.Module):
    """One layer's attention, in the mode the configuration gives it."""

    def __init__(self, config: PolicyConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        d, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        quantized = config.quantization is not None
        self.layer, self.ratio, self.mode = layer, config.ratio(layer), config.mode(layer)
        self.heads, self.width, self.groups = heads, width, config.o_groups
        self.top_k = config.index_topk
        self.wq_a = Linear(d, config.q_lora_rank, dtype, quantized)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps, dtype)
        self.wq_b = Linear(config.q_lora_rank, heads * width, dtype, quantized)
        self.wkv = Linear(d, width, dtype, quantized)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps, dtype)
        self.wo_a = Linear(heads * width // config.o_groups, config.o_groups * config.o_lora_rank, dtype)
        self.wo_b = Linear(config.o_groups * config.o_lora_rank, d, dtype, quantized)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if self.mode is AttentionMode.FULL:
            self.compressor = Compressor(config, self.ratio, dtype)
        if self.mode in (AttentionMode.FULL, AttentionMode.REINDEX):
            self.indexer = Indexer(config, self.mode is AttentionMode.FULL, dtype)
        self.restricted = config.uses_candidates(layer)
        self.rule = None
        if layer == config.candidate_source_layer_id or self.restricted:
            self.rule = CandidateRule(config.candidate_topk_blocks, config.candidate_block_size)
        frequencies = layer_frequencies(config, self.ratio)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.frequencies: Tensor

    def forward(
        self, x: Tensor, batch: Batch, shared: list[Globals], cache: PolicyCache | None, options: RunOptions
    ) -> tuple[Tensor, list[Globals]]:
        """Attention of a batch.

        Args:
            x: [T, d], normalised.
            batch: the tokens' layout.
            shared: what earlier layers handed on, one a group of rows; in a Full layer its own keys.
            cache: holds the window keys before the new tokens; None in training.
            options: of this pass.

        Returns:
            [T, d], and what later layers share.
        """
        rotation, per_head = batch.rotations(self.ratio, self.frequencies)
        query_latent, query = self.queries(x, per_head)
        window = self.window_keys(x, rotation, options.fake_quant)
        asked = self._ask(x, query_latent, per_head, options)
        outputs, handed_on = [], []
        for rows, known in zip(batch.rows, shared, strict=True):
            row_query, row_window = rows.pad(query), self._row_keys(rows, window, cache)
            if asked is not None:
                asked_rows = IndexQueries(rows.pad(asked.heads), rows.pad(asked.weights))
                known = self._choose(asked_rows, rows, known, batch.trace)
                known = self._forced(known, batch.forced_selection(self.layer, rows))
                if options.supervision is not None:
                    self._supervise(options.supervision, asked_rows, row_query, row_window, rows, known)
            handed_on.append(known)
            outputs.append(rows.unpad(self._attend(rows, row_query, row_window, known, options)))
        if cache is not None:
            cache.windows.append(self.layer, batch.rows[0], window)
        if asked is not None and batch.capture is not None and batch.capture.selections_too:
            self._capture(batch, batch.capture, handed_on)
        return self.output(batch.merge(outputs), per_head), handed_on

    def add_keys(
        self, x: Tensor, batch: Batch, cache: PolicyCache | None, options: RunOptions
    ) -> list[Globals]:
        """Compress tokens to this Full layer's main keys and index keys.

        Args:
            x: [T, d], this layer's own input, or in the decoder that of its first layer.
            batch: the tokens' layout.
            cache: gets the keys of groups that closed; None in training.
            options: of this pass.

        Returns:
            The keys, one a group of rows.
        """
        projected = self.compressor.project(x)
        return [self._add_row_keys(projected, rows, cache, options, batch.trace) for rows in batch.rows]

    def read_keys(self, rows: Rows, cache: PolicyCache) -> Globals:
        """This Full layer's keys of the sequences of `rows`, as cached."""
        assert rows.target is not None
        slots, width = rows.target.slots, rows.width(self.ratio)
        main, index_keys = cache.main[self.layer], cache.index_keys[self.layer]
        return Globals(main.gather(slots, width), index_keys.gather(slots, width))

    def queries(self, x: Tensor, per_head: Rotation) -> tuple[Tensor, Tensor]:
        """The latent [T, q] and the rotated heads [T, H, c]."""
        latent = self.q_norm(self.wq_a(x))
        return latent, rotate(self.wq_b(latent).unflatten(-1, (self.heads, self.width)), per_head)

    def window_keys(self, x: Tensor, rotation: Rotation, fake_quant: bool) -> Tensor:
        """Keys [T, c] of this layer's sliding window."""
        keys = rotate(self.kv_norm(self.wkv(x)), rotation)
        return straight_through(keys, round_window) if fake_quant else keys

    def _ask(
        self, x: Tensor, query_latent: Tensor, per_head: Rotation, options: RunOptions
    ) -> IndexQueries | None:
        """Packed index queries; only the indexer's own loss sends a gradient here, not past the inputs."""
        if self.mode not in (AttentionMode.FULL, AttentionMode.REINDEX):
            return None
        with torch.set_grad_enabled(options.supervision is not None and torch.is_grad_enabled()):
            return self.indexer.queries(x.detach(), query_latent.detach(), per_head, options.fake_quant)

    def _add_row_keys(
        self,
        projected: Tensor,
        rows: Rows,
        cache: PolicyCache | None,
        options: RunOptions,
        trace: Trace | None,
    ) -> Globals:
        """The same for a group of rows, from what the compressor projected."""
        plan = rows.groups(self.ratio)
        pending = None if cache is None else cache.pending.get(self.layer)
        latent = self.compressor.pool(projected, rows, plan, pending, self.wkv.weight.dtype)
        rotation = rows.group_rotation(self.ratio, self.frequencies)
        groups, flat = latent.shape[:2], fill(latent.flatten(0, 1))

        def shaped(x: Tensor) -> Tensor:
            return x[: groups.numel()].unflatten(0, groups)

        unrounded = shaped(rotate(flat, rotation))
        main = straight_through(unrounded, round_main) if options.fake_quant else unrounded
        with torch.set_grad_enabled(options.supervision is not None and torch.is_grad_enabled()):
            index_keys = shaped(self.indexer.keys(flat.detach(), rotation, options.fake_quant))
        if trace is not None:
            trace.record_layer(self.layer, latent=latent, main_kv=main, index_k=index_keys)
        if cache is None or rows.target is None:
            return Globals(TensorKeys(main), TensorKeys(index_keys))
        cache.main[self.layer].append(plan, unrounded, main)
        cache.index_keys[self.layer].append(plan, index_keys, index_keys)
        return self.read_keys(rows, cache)

    def _choose(self, asked: IndexQueries, rows: Rows, known: Globals, trace: Trace | None) -> Globals:
        """Select among the main keys of the owner, inside the candidates where this layer is restricted."""
        assert known.index_keys is not None
        visible = rows.visible(self.ratio)
        candidates = known.candidates if self.restricted else None
        rule = None if self.restricted and candidates is None else self.rule
        keys = known.index_keys.dense()
        choice = select(asked, keys, visible, self.top_k, rule, candidates, trace is not None)
        if trace is not None:
            self._record_choice(trace, choice, candidates)
        kept = candidates if self.restricted else choice.candidates
        return replace(known, selection=choice.selection, candidates=kept)

    def _forced(self, known: Globals, index: Tensor | None) -> Globals:
        """`known` with the selection that replay forces."""
        assert known.selection is not None
        return replace(known, selection=known.selection.forced(index, self.top_k))

    def _capture(self, batch: Batch, capture: Capture, handed_on: list[Globals]) -> None:
        listed = []
        for rows, known in zip(batch.rows, handed_on, strict=True):
            assert known.selection is not None
            listed.append(rows.unpad(known.selection.sorted_index(self.top_k)))
        capture.selections[self.layer] = batch.among_all(batch.merge(listed))

    def _record_choice(self, trace: Trace, choice: Choice, candidates: Tensor | None) -> None:
        assert choice.scores is not None
        index = choice.selection.sorted_index(self.top_k)
        trace.record_layer(self.layer, index_topk=index, index_scores=choice.scores)
        blocks = candidates if candidates is not None else choice.candidates
        if self.rule is not None and blocks is not None:
            mask = self.rule.expand(blocks, choice.selection.width)
            trace.record_layer(self.layer, candidate_mask=mask)

    def _supervise(
        self,
        supervision: Supervision,
        asked: IndexQueries,
        query: Tensor,
        window: Tensor,
        rows: Rows,
        known: Globals,
    ) -> None:
        """Add this layer's indexer loss."""
        assert known.main is not None and known.index_keys is not None and known.selection is not None
        attended = known.selection
        supervised = ~attended.main_blocked()
        if supervision.variant == "dense":
            attended = Selection(attended.visible, attended.width, None)
            supervised = ~attended.main_blocked()
            if self.restricted and self.rule is not None and known.candidates is not None:
                supervised = supervised & self.rule.expand(known.candidates, attended.width)
        keys = torch.cat([window, known.main.dense()], dim=1).detach()
        blocked = attended.blocked_with(rows.window_blocked)
        teacher = Teacher(query.detach(), keys, blocked, self.attn_sink.detach())
        total, count = indexer_loss(asked, known.index_keys.dense(), teacher, supervised, rows.real)
        supervision.add(self.layer, total, count)

    def _attend(
        self, rows: Rows, query: Tensor, window: Tensor, known: Globals, options: RunOptions
    ) -> Tensor:
        """Attention of [B, L, H, c] over the window and the selection."""
        selection = known.selection if self.ratio else None
        width = 0 if selection is None else selection.width
        if is_exact() or window.shape[1] + width > options.dense_limit:
            return self._attend_gathered(rows, query, window, known, selection)
        if selection is None or known.main is None:
            return attend(query, window, rows.window_bias(self.score_dtype), self.attn_sink)
        keys = torch.cat([window, known.main.dense()], dim=1)
        return attend(query, keys, selection.bias_with(rows.window_blocked, self.score_dtype), self.attn_sink)

    def _attend_gathered(
        self, rows: Rows, query: Tensor, window: Tensor, known: Globals, selection: Selection | None
    ) -> Tensor:
        """The same for long rows: each token's own keys are gathered, a chunk of tokens at a time."""
        window_keys, chosen = TensorKeys(window), None
        if selection is not None:
            # In exact mode a token's keys stand in one order and one number, whatever the others selected.
            chosen = selection.sorted_index(self.top_k) if is_exact() else selection

        def chunk(begin: int, end: int, query: Tensor) -> Tensor:
            index = rows.window_index(begin, end)
            keys = window_keys.take(index)
            if chosen is not None and known.main is not None:
                listed = chosen[:, begin:end] if isinstance(chosen, Tensor) else chosen.listed(begin, end)
                keys = torch.cat([keys, known.main.take(listed)], dim=2)
                index = torch.cat([index, listed], dim=2)
            one_row_a_token = query.flatten(0, 1).unsqueeze(1)
            bias = as_bias((index < 0).flatten(0, 1).unsqueeze(1), self.score_dtype)
            output = attend(one_row_a_token, keys.flatten(0, 1), bias, self.attn_sink)
            return output.unflatten(0, (rows.count, -1)).squeeze(2)

        width = rows.window + (0 if selection is None else self.top_k)
        step = max(1, _CHUNK_ELEMENTS // (rows.count * width * self.width))
        parts = []
        for begin in range(0, rows.length, step):
            end = min(begin + step, rows.length)
            arguments = (begin, end, query[:, begin:end])
            if torch.is_grad_enabled():
                parts.append(checkpoint(chunk, *arguments, use_reentrant=False))
            else:
                parts.append(chunk(*arguments))
        return torch.cat(parts, dim=1)

    def _row_keys(self, rows: Rows, window: Tensor, cache: PolicyCache | None) -> Tensor:
        new = rows.pad(window)
        if cache is None or rows.target is None:
            return new
        return torch.cat([cache.windows.gather(self.layer, rows), new], dim=1)

    @property
    def score_dtype(self) -> torch.dtype:
        """Of attention scores."""
        return self.attn_sink.dtype

    def output(self, output: Tensor, per_head: Rotation) -> Tensor:
        """Heads [T, H, c], turned back and projected by group, to [T, d]."""
        output = rotate(output, per_head.inverse())
        grouped = output.flatten(1).unflatten(1, (self.groups, -1)).transpose(0, 1)
        weight = self.wo_a.weight.unflatten(0, (self.groups, -1))
        if is_exact():
            products = [matmul(x, w) for x, w in zip(widen(grouped), widen(weight), strict=True)]
            narrow = torch.stack(products).to(output.dtype)
        else:
            narrow = torch.bmm(widen(grouped), widen(weight).transpose(1, 2)).to(output.dtype)
        return self.wo_b(narrow.transpose(0, 1).flatten(1))
