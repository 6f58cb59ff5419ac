"""The policy: a causal encoder-decoder over packed documents, or over sequences held in a cache.

One code path serves training and inference, so that the log-probabilities a sampler reports are those a
trainer computes. The decoder half is not a separate module: its only main keys are those of its first layer,
which reads the encoder's output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import fused
from model.balance import BALANCE_SPEED, balance_loss, expert_load, move_bias
from model.batch import Batch, NewTokens, PackedTokens, Trace
from model.cache.policy_cache import PolicyCache, Storage
from model.cache.progress import Span
from model.choices import FREE, Capture, Choices
from model.config import AttentionMode, PolicyConfig, VisionConfig
from model.decode_graphs import graphs_of
from model.dspark import Drafter
from model.initialization import initialize
from model.layers.attention import Globals, RunOptions
from model.layers.block import Block
from model.layers.engram_hash import DEAD, EngramHash, look_back
from model.layers.engram_table import TableStorage
from model.layers.exact import fill, in_own_mode, matmul
from model.layers.hyper_connections import collapse
from model.layers.indexer_loss import Supervision, Variant
from model.layers.linear import wide_linear
from model.layers.moe import MixtureOfExperts, Routing
from model.layers.norm import RMSNorm
from model.layers.packed import ExpertStorage
from model.ops.dispatch import served
from model.vision import Aligner, ImageTokens, TokenType, VisionTower, place_images

__all__ = ["PackedTokens", "Policy", "PolicyAux", "PolicyOutput"]

_DENSE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class PolicyAux:
    """What a forward pass says besides its output."""

    expert_load: Tensor
    """[layers, experts] text tokens routed to each expert, float32."""
    image_expert_load: Tensor | None
    """The same for tokens of image spans; None where there are none."""
    balance_loss: Tensor
    """Scalar: sequence-level balance loss, mean over documents, summed over layers, no coefficient."""
    indexer_loss: Tensor | None
    """Scalar, mean over tokens, summed over index layers, without its coefficient; None unless asked for."""


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Result of a training forward pass."""

    hidden: Tensor
    """[T, d], the head's input."""
    aux: PolicyAux
    features: Tensor | None = None
    """[T, 3 d] what the drafter reads; None unless asked for."""


class Policy(nn.Module):
    """The network.

    Attributes:
        fake_quant: round keys as the caches store them, with straight-through gradients.
        exact: make a token's result the same bits whatever is computed beside it, in training and from a
            cache alike; slower.
    """

    def __init__(
        self, config: PolicyConfig, *, tables: TableStorage = "resident", experts: ExpertStorage = "plain"
    ) -> None:
        """Make a policy with fresh weights.

        Args:
            config: its shape.
            tables: where the n-gram tables live; mapped ones need a checkpoint (`load_policy`).
            experts: how routed experts are held; packed ones need a checkpoint too.
        """
        super().__init__()
        self.config = config
        self.fake_quant = False
        self.exact = False
        self.dense_limit = _DENSE_LIMIT
        dtype = getattr(torch, config.dtype)
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.layers = nn.ModuleList(
            Block(config, layer, dtype, tables, experts) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.head = nn.Module()
        self.head.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype))
        self.vision = self.aligner = None
        if config.vision is not None:
            self._add_vision(config, config.vision, dtype)
        self.mtp = Drafter(config, dtype, experts) if config.num_nextn_predict_layers else None
        self.engram_hash = EngramHash(config) if config.engram_layer_ids else None
        token_map = config.engram_token_map
        self.register_buffer(
            "token_map", None if token_map is None else torch.tensor(token_map), persistent=False
        )
        self.token_map: Tensor | None
        if not self.embed.weight.is_meta:
            self.reset_parameters(0)

    def _add_vision(self, config: PolicyConfig, vision: VisionConfig, dtype: torch.dtype) -> None:
        self.vision, self.aligner = VisionTower(vision, dtype), Aligner(config, vision, dtype)
        for name in ("image_start", "image_newline", "image_end"):
            setattr(self, name, nn.Parameter(torch.empty(config.hidden_size, dtype=dtype)))
        self.image_start: nn.Parameter
        self.image_newline: nn.Parameter
        self.image_end: nn.Parameter

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def blocks(self) -> list[Block]:
        """The layers in order."""
        return list(self.layers)  # pyright: ignore[reportReturnType]

    def set_recompute(self, value: bool) -> None:
        """Whether activations of a layer are computed again in the backward pass and not kept."""
        for block in self.blocks:
            block.recompute = value

    def pack_experts(self) -> None:
        """Round all routed experts to FP4 and hold them so: about 0.53 byte a weight, for inference alone.

        Raises:
            ValueError: their widths are no multiples of 32, or a weight is too large.
        """
        for module in list(self.modules()):
            if isinstance(module, MixtureOfExperts):
                module.pack()

    def reset_parameters(self, seed: int) -> None:
        """Fill all weights from `seed`."""
        initialize(self, seed)

    @in_own_mode
    def forward(
        self,
        tokens: PackedTokens,
        *,
        indexer_loss: bool | Variant = False,
        features: bool = False,
        capture: Capture | None = None,
        trace: Trace | None = None,
    ) -> PolicyOutput:
        """Run documents for training; nothing is seen across a document's start.

        Args:
            tokens: the documents.
            indexer_loss: also compute the indexers' training loss, over each token's own selection (True or
                "sparse") or over everything selectable ("dense").
            features: also return what the drafter reads.
            capture: where to keep what was chosen.
            trace: where to keep intermediate results.

        Raises:
            ValueError: `tokens.choices` were recorded over other tokens or with another configuration.
        """
        batch = Batch.of_documents(tokens, self.config.sliding_window, trace)
        batch.keep_features = features
        batch.replay(self._checked(tokens.choices, batch), capture)
        supervision = None
        if indexer_loss:
            supervision = Supervision("sparse" if indexer_loss is True else indexer_loss)
        options = RunOptions(self.fake_quant, self.dense_limit, supervision)
        batch.mark_images(tokens.images)
        rows = self._document_engram(tokens.token_ids, batch)
        embedded = self._embed(tokens.token_ids, tokens.images)
        hidden, routings = self._run(embedded, batch, rows, None, options)
        hidden = _first(hidden, batch.total)
        image, experts = batch.image, self.config.n_routed_experts
        aux = PolicyAux(
            expert_load=expert_load(routings, experts, None if image is None else ~image),
            image_expert_load=None if image is None else expert_load(routings, experts, image),
            balance_loss=balance_loss(routings, tokens.cu_seqlens),
            indexer_loss=None if supervision is None else supervision.total(batch.total),
        )
        return PolicyOutput(hidden, aux, batch.features)

    def encode_image(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """[h * w, 3, p, p] patches of one image to the rows [M, d] of its image tokens."""
        if self.vision is None or self.aligner is None:
            raise ValueError("this policy has no image tower: its configuration lacks vision_config")
        return self.aligner(self.vision(patches, grid), grid)

    @in_own_mode
    def logits(self, hidden: Tensor, *, frozen: bool = False) -> Tensor:
        """[..., d] to float32 [..., V]; `frozen` sends no gradient to the head's weight."""
        weight: Tensor = self.head.weight  # pyright: ignore[reportAssignmentType]
        if frozen:
            weight = weight.detach()
        if served(hidden):
            return wide_linear(hidden, weight)
        if hidden.dtype is torch.bfloat16:
            return matmul(hidden.float(), weight.float())
        return matmul(hidden, weight)

    def new_cache(
        self, max_sequences: int, max_tokens: int, *, storage: Storage = "dense", pages: int | None = None
    ) -> PolicyCache:
        """An empty cache for `max_sequences` sequences of up to `max_tokens` tokens each.

        Args:
            max_sequences: slots.
            max_tokens: longest sequence.
            storage: "dense" (floats, fastest on a CPU) or "packed" (paged records; needs `fake_quant`). Both
                give the same results.
            pages: packed only: pages of compressed keys; None: as many as full slots can need.
        """
        dtype = self.norm.weight.dtype
        return PolicyCache(self.config, max_sequences, max_tokens, dtype, self.device, storage, pages)

    def look_back_ids(self, token_ids: Tensor, image: Tensor | None = None) -> Tensor:
        """What n-grams see of the tokens [n] before a sequence is resumed (`PolicyCache.adopt`).

        Args:
            token_ids: [n]; only the last ones matter.
            image: [n] bool, true on tokens of image spans.
        """
        if self.engram_hash is None:
            return token_ids[:0]
        self._pad_id()
        return self._compressed(token_ids, image)[-(self.config.engram_max_ngram_size - 1) :]

    @in_own_mode
    def extend(
        self,
        cache: PolicyCache,
        slots: Tensor,
        token_ids: Tensor,
        lengths: Tensor,
        *,
        decode_from: Tensor | None = None,
        replayed: Tensor | None = None,
        images: ImageTokens | None = None,
        new: NewTokens | None = None,
        choices: Choices | None = None,
        capture: Capture | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Append tokens to cached sequences: a prefill, a tool's answer or one decoded token each.

        Args:
            cache: holds the sequences.
            slots: [B] int64, each sequence once.
            token_ids: [B, L] int64; row b counts up to `lengths[b]`.
            lengths: [B] int64, 1 .. L.
            decode_from: [B] int64, position from which on the decoder runs; of earlier tokens it gets the
                compressed keys alone. Where that leaves a gap behind the tokens it has run, its windows start
                anew; otherwise it goes on where it stopped. None: it runs every new token.
            replayed: [B] int64, how many of the new tokens the caller takes to be counted in the cache
                already (their windows were lost, see `PolicyCache.adopt`). They are the first ones, and are
                known to the cache: this only checks that both agree.
            images: the images among the new tokens, with types [B, L].
            new: where to put what is known of every new token, not of the last one alone.
            choices: what to choose for the new tokens, packed row after row.
            capture: where to keep what was chosen for them.
            trace: where to keep intermediate results.

        Returns:
            [B, d], the head's input for the last new token of each sequence; zeros where the decoder did not
            run it.

        Raises:
            CacheFull: a sequence would outgrow its slot, or pages run out; nothing has been written.
            ValueError: a slot is not allocated or appears twice, a length is out of range, the decoder is to
                skip tokens and there is none, `replayed` is not what the cache expects, or the cache is
                packed and `fake_quant` is off.
        """
        slot_list, length_list = slots.tolist(), lengths.tolist()
        if not length_list or min(length_list) < 1 or max(length_list) > token_ids.shape[1]:
            raise ValueError(
                f"lengths must be 1 .. {token_ids.shape[1]} (the columns of token_ids), got {length_list}"
            )
        if cache.storage == "packed" and not self.fake_quant:
            raise ValueError(
                "a packed cache holds rounded keys: set policy.fake_quant, or make a dense cache"
            )
        spans = cache.make_room(slot_list, length_list, None if decode_from is None else decode_from.tolist())
        self._check_spans(spans, None if replayed is None else replayed.tolist())
        plain = new is None and images is None and choices is None and capture is None
        if plain and (trace is None or trace.steps) and fused.decodes(self, cache, spans):
            floors = [[span.floor for span in spans], [span.decoder_floor for span in spans]]
            starts = [span.start for span in spans]
            stepped = graphs_of(self, cache).step(slot_list, token_ids[:, 0], starts, floors, trace)
            cache.advance(slot_list, spans)
            return stepped
        batch = Batch.of_cached(cache, slots, spans, self.config.sliding_window, trace)
        batch.keep_features = new is not None and self.mtp is not None
        batch.replay(self._checked(choices, batch), capture)
        row = batch.rows[0]
        packed = row.unpad(token_ids[:, : row.length])
        options = RunOptions(self.fake_quant, self.dense_limit)
        if images is not None:
            images = ImageTokens(row.unpad(images.types[:, : row.length]), images.rows)
            batch.mark_images(images)
        engram_rows = self._cached_engram(packed, batch, cache, slots)
        embedded = self._embed(packed, images)
        hidden, _ = self._run(embedded, batch, engram_rows, cache, options)
        cache.advance(slot_list, spans)
        if new is not None:
            new.counts = torch.tensor([span.decoded for span in spans], device=slots.device)
        if batch.decoder is None:
            return hidden.new_zeros(len(slot_list), self.config.hidden_size)
        if new is not None:
            new.hidden, new.features = hidden[: batch.decoder.total], batch.features
        hidden = hidden[batch.decoder.rows[0].last]
        if batch.decoder_rows is None:
            return hidden
        every = hidden.new_zeros(len(slot_list), self.config.hidden_size)
        return every.index_copy_(0, batch.decoder_rows, hidden)

    def _check_spans(self, spans: list[Span], replayed: list[int] | None) -> None:
        if self.config.decoder_start is None and any(span.decoder_start > span.start for span in spans):
            raise ValueError(
                "this policy has no decoder of its own (no kv source in its upper half): give no decode_from"
            )
        counted = [span.counted for span in spans]
        if replayed is not None and replayed != counted:
            raise ValueError(
                f"of the new tokens {counted} are counted in the cache already, not {replayed}: begin at the "
                "position the slot was adopted to resume from, and leave out `replayed` or count from there"
            )

    def _checked(self, choices: Choices | None, batch: Batch) -> Choices | None:
        if choices is not None:
            experts, chosen = self.config.n_routed_experts, self.config.num_experts_per_tok
            choices.check(batch.total, len(self.layers), experts, chosen)
        return choices

    def complete(self, capture: Capture, chosen: list[Tensor]) -> None:
        """Put together what the layers chose; those that no token ran through chose nothing."""
        skipped = len(self.layers) - len(chosen)
        capture.expert_ids = torch.stack(chosen + [torch.full_like(chosen[0], FREE)] * skipped, dim=1)
        if capture.selections_too:
            nothing = chosen[0].new_full((chosen[0].shape[0], self.config.index_topk), FREE)
            missing = self.config.index_source_layer_ids
            capture.selections = {layer: capture.selections.get(layer, nothing) for layer in missing}

    def update_balance(
        self, load: Tensor, image_load: Tensor | None = None, speed: float = BALANCE_SPEED
    ) -> None:
        """Raise the router bias of experts below the mean load and lower it above; [layers, experts] each."""
        for block, row in zip(self.blocks, load, strict=True):
            move_bias(block.ffn.gate.bias, row, speed)
        if image_load is not None:
            for block, row in zip(self.blocks, image_load, strict=True):
                move_bias(block.ffn.gate.bias_vl, row, speed)

    def _run(
        self,
        embedded: Tensor,
        batch: Batch,
        rows: Tensor | None,
        cache: PolicyCache | None,
        options: RunOptions,
    ) -> tuple[Tensor, list[Routing]]:
        """The head's input [T, d] of the tokens that ran to the end, and where tokens were routed."""
        if fused.applies(self, embedded, batch, options):
            return fused.Pass(self, cache, options).run(embedded, batch, rows)
        n = self.config.hc_mult
        embedded, rows = fill(embedded), None if rows is None else fill(rows)
        for block in self.blocks:
            block.prefetch(rows)
        streams = embedded.unsqueeze(1).expand(-1, n, -1).contiguous()
        weights = torch.zeros(embedded.shape[0], n, device=streams.device)
        weights[:, 0] = 1.0
        shared = [Globals() for _ in batch.rows]
        keys: dict[int, list[Globals]] = {}
        routings: list[Routing] = []
        chosen, capture = [], batch.capture
        features: list[Tensor] = []
        whole, wanted = batch, batch.keep_features or batch.trace is not None
        for block in self.blocks:
            streams = block.inject(streams, batch, rows)
            if wanted and block.layer in self.config.dspark_target_layer_ids:
                features.append(streams.float().mean(1).to(streams.dtype))
            x = block.attention_input(streams, weights)
            if block.layer == self.config.decoder_start:
                keys = self._decoder_keys(x, batch, cache, options)
                if batch.decoder is None:
                    break
                if batch.decoder_tokens is not None:
                    tokens = fill(batch.decoder_tokens)
                    streams, weights, x = streams[tokens], weights[tokens], x[tokens]
                    rows = None if rows is None else rows[tokens]
                    features = [feature[tokens] for feature in features]
                batch = batch.decoder
            if block.layer in keys:
                shared = keys.pop(block.layer)
            elif block.attn.mode is AttentionMode.FULL:
                shared = block.attn.add_keys(x, batch, cache, options)
            streams, weights, shared, routing = block(streams, x, batch, shared, cache, options)
            routings.append(routing.first(batch.total))
            if batch.capture is not None:
                chosen.append(batch.among_all(routing.expert_ids))
        if capture is not None:
            self.complete(capture, chosen)
        if features:
            whole.features = _first(torch.cat(features, dim=-1), batch.total)
            whole.record("main_hidden", whole.features)
        return self.norm(collapse(weights, streams)), routings

    def _decoder_keys(
        self, boundary: Tensor, batch: Batch, cache: PolicyCache | None, options: RunOptions
    ) -> dict[int, list[Globals]]:
        """Keys of every KV source of the decoder: each has its own projection of the encoder's output."""
        batch.record("boundary", boundary)
        start, decoder = self.config.decoder_start, batch.decoder
        assert start is not None
        keys = {}
        for source in (layer for layer in self.config.kv_source_layer_ids if layer >= start):
            attention = self.blocks[source].attn
            keys[source] = attention.add_keys(boundary, batch, cache, options)
            if cache is not None and decoder is not None and decoder is not batch:
                keys[source] = [attention.read_keys(row, cache) for row in decoder.rows]
        return keys

    def _pad_id(self) -> Tensor:
        if self.token_map is None:
            raise ValueError(
                "this policy has an n-gram memory but no token map: set policy.token_map to the compressed "
                "id of each token (the tokenizer knows it)"
            )
        return self.token_map[self.config.engram_pad_token_id]

    def _compressed(self, token_ids: Tensor, image: Tensor | None) -> Tensor:
        """Compressed ids [T], dead where a token belongs to an image."""
        ids = self.token_map[token_ids]  # pyright: ignore[reportOptionalSubscript]
        return ids if image is None else ids.masked_fill(image, DEAD)

    def _embed(self, token_ids: Tensor, images: ImageTokens | None) -> Tensor:
        """[T, d] of text and images."""
        embedded = F.embedding(token_ids, self.embed.weight)  # pyright: ignore[reportArgumentType]
        if images is None:
            return embedded
        if self.vision is None:
            raise ValueError("this policy has no image tower: its configuration lacks vision_config")
        marks = {
            TokenType.START: self.image_start,
            TokenType.NEWLINE: self.image_newline,
            TokenType.END: self.image_end,
        }
        return place_images(embedded, images, marks)

    def _document_engram(self, token_ids: Tensor, batch: Batch) -> Tensor | None:
        """Table rows [T, layers, columns] of packed documents."""
        if self.engram_hash is None:
            return None
        pad = self._pad_id()
        ids = self._compressed(token_ids, batch.image)
        distances = torch.arange(self.config.engram_max_ngram_size, device=ids.device)
        index = torch.arange(ids.shape[0], device=ids.device)[:, None] - distances
        history = torch.where(distances <= batch.position[:, None], ids[index.clamp_min(0)], pad)
        return self._hashed(history, pad, batch)

    def _cached_engram(
        self, token_ids: Tensor, batch: Batch, cache: PolicyCache, slots: Tensor
    ) -> Tensor | None:
        """Table rows of new tokens; the look-back reaches into the cached sequences."""
        if self.engram_hash is None:
            return None
        row, pad, reach = batch.rows[0], self._pad_id(), cache.reach
        ids, entries = self._compressed(token_ids, batch.image), cache.tail.shape[1]
        before = row.starts[:, None] + torch.arange(-reach, 0)
        held = cache.tail[slots[:, None], (before % entries).to(slots.device)]
        held = torch.where((before < 0).to(slots.device), pad, held)
        ring = row.ring(entries)
        cache.tail.flatten().index_copy_(0, ring.target, ids.index_select(0, ring.source))
        history = torch.cat([held, row.pad(ids)], dim=1).unfold(1, reach + 1, 1).flip(-1)
        return self._hashed(row.unpad(history), pad, batch)

    def _hashed(self, history: Tensor, pad: Tensor, batch: Batch) -> Tensor:
        assert self.engram_hash is not None
        rows = self.engram_hash(look_back(history, pad))
        batch.record("engram_hash_ids", rows)
        return rows


def _first(x: Tensor, count: int) -> Tensor:
    """The first rows; `x` itself, and no view of it, when these are all."""
    return x if count == x.shape[0] else x[:count]
