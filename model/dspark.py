"""DSpark: a small drafter that proposes the next tokens as one block, from features of the backbone.

Its blocks look like the policy's, but their window holds keys made from backbone features, and inside a draft
every slot sees every other. A Markov head then makes each slot depend on the token drawn for the slot before
it, and a confidence head says how likely a slot is to be accepted given that all earlier ones are. Parameter
names are the published ones, in which the first block also owns the feature projection and the last one the
heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.cache.draft import DraftWindow
from model.config import PolicyConfig
from model.layers.attend import as_bias, attend
from model.layers.attention import Attention
from model.layers.exact import fill, matmul
from model.layers.hyper_connections import HyperConnection, collapse, mix
from model.layers.linear import Linear
from model.layers.moe import MixtureOfExperts, Routing
from model.layers.norm import RMSNorm
from model.layers.packed import ExpertStorage
from model.layers.rope import Rotation

if TYPE_CHECKING:
    from model.batch import Trace
    from model.policy import Policy


Choose = Callable[[Tensor, int], Tensor]
"""Draws the tokens [B] of a slot from its logits [B, V]."""


def greedy(logits: Tensor, _slot: int) -> Tensor:
    """The most likely token of each row."""
    return logits.argmax(-1)


class MarkovHead(nn.Module):
    """A bias on the logits that depends on the token before."""

    def __init__(self, config: PolicyConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed, self.head = nn.Module(), nn.Module()
        shape = (config.vocab_size, config.dspark_markov_rank)
        self.embed.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.head.weight = nn.Parameter(torch.empty(shape, dtype=dtype))

    def forward(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [...] to their embedding [..., rank] and logits [..., V], float32."""
        table: Tensor = self.embed.weight  # pyright: ignore[reportAssignmentType]
        head: Tensor = self.head.weight  # pyright: ignore[reportAssignmentType]
        embedded = F.embedding(previous, table)
        return embedded, matmul(embedded.float(), head.float())


class DraftBlock(nn.Module):
    """Attention over the feature window and the draft itself, then experts."""

    def __init__(
        self, config: PolicyConfig, number: int, dtype: torch.dtype, experts: ExpertStorage = "plain"
    ) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attn_norm, self.ffn_norm = RMSNorm(d, eps, dtype), RMSNorm(d, eps, dtype)
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn = Attention(config, config.num_hidden_layers + number, dtype)
        self.ffn = MixtureOfExperts(
            config, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok, dtype, experts
        )
        if number == 0:
            features = len(config.dspark_target_layer_ids) * d
            self.main_proj = Linear(features, d, dtype, config.quantization is not None)
            self.main_norm = RMSNorm(d, eps, dtype)
        if number == config.num_nextn_predict_layers - 1:
            self.norm = RMSNorm(d, eps, dtype)
            self.markov_head = MarkovHead(config, dtype)
            self.confidence_head = nn.Module()
            # bfloat16 on disk, float32 in memory.
            self.confidence_head.proj = Linear(d + config.dspark_markov_rank, 1, torch.float32)

    def forward(
        self,
        streams: Tensor,
        weights: Tensor,
        window: Tensor,
        blocked: Tensor,
        rotation: Rotation,
        fake_quant: bool,
    ) -> tuple[Tensor, Tensor, Routing]:
        """One block: streams and A for the next, and where the slots were routed.

        Args:
            streams: [B * slots, n, d].
            weights: A of the previous site.
            window: [B, W, c] keys of the backbone's positions.
            blocked: [B, W] true where the window holds nothing yet.
            rotation: [B * slots, r / 2] of the draft's positions.
            fake_quant: whether keys are rounded as a cache stores them.
        """
        next_weights, write, carry = self.hc_attn(streams)
        x = self.attn_norm(collapse(weights, streams))
        _, query = self.attn.queries(x, rotation.per_head())
        rows = window.shape[0]
        own = self.attn.window_keys(x, rotation, fake_quant).unflatten(0, (rows, -1))
        keys = torch.cat([window, own], dim=1)
        slots = own.shape[1]
        bias = as_bias(F.pad(blocked, (0, slots)), self.attn.score_dtype).unsqueeze(1).expand(-1, slots, -1)
        output = attend(query.unflatten(0, (rows, slots)), keys, bias, self.attn.attn_sink).flatten(0, 1)
        streams = mix(carry, streams, write, self.attn.output(output, rotation.per_head()))
        weights, write, carry = self.hc_ffn(streams)
        update, routing = self.ffn(self.ffn_norm(collapse(next_weights, streams)))
        return mix(carry, streams, write, update), weights, routing


@dataclass(frozen=True, slots=True)
class Draft:
    """A block of proposals for B sequences."""

    token_ids: Tensor
    """[B, slots]."""
    logits: Tensor
    """[B, slots, V], Markov bias included."""
    confidence: Tensor
    """[B, slots] logit of a slot's acceptance given that of all earlier ones."""


@dataclass(frozen=True, slots=True)
class DraftStates:
    """What the blocks made of a draft's slots."""

    hidden: Tensor
    """[B, slots, d], before the last norm."""
    routings: list[Routing]
    """Of each block, over B * slots tokens."""


class Drafter(nn.ModuleList):
    """The draft blocks of a policy."""

    def __init__(self, config: PolicyConfig, dtype: torch.dtype, experts: ExpertStorage = "plain") -> None:
        numbers = range(config.num_nextn_predict_layers)
        super().__init__(DraftBlock(config, number, dtype, experts) for number in numbers)
        self.config = config

    @property
    def blocks(self) -> list[DraftBlock]:
        """The blocks in order."""
        return list(self)  # pyright: ignore[reportReturnType]

    def new_window(self, rows: int, storage: Literal["dense", "packed"] = "dense") -> DraftWindow:
        """An empty window for `rows` sequences."""
        weight = self.blocks[0].main_norm.weight
        return DraftWindow(self.config, rows, weight.dtype, weight.device, storage)

    def window_keys(self, features: Tensor, positions: Tensor, fake_quant: bool) -> Tensor:
        """Backbone features [T, 3 d] at `positions` [T] to each block's window keys [blocks, T, c]."""
        head, count = self.blocks[0], features.shape[0]
        features, positions = fill(features), fill(positions)
        main = head.main_norm(head.main_proj(features))
        keys = [
            block.attn.window_keys(main, Rotation.at(positions, block.attn.frequencies), fake_quant)
            for block in self.blocks
        ]
        return torch.stack(keys)[:, :count]

    def observe(
        self,
        window: DraftWindow,
        features: Tensor,
        fake_quant: bool,
        *,
        rows: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        """Add backbone features of each sequence's next positions.

        Args:
            window: to write to.
            features: [B, L, 3 d].
            fake_quant: whether keys are rounded as a cache stores them.
            rows: [B] windows that are meant; None: all.
            lengths: [B] how many of the L count; None: all of them.
        """
        count, length = features.shape[:2]
        if rows is None:
            rows = torch.arange(count, device=features.device)
        if lengths is None:
            lengths = torch.full((count,), length, device=features.device)
        positions = window.next[rows][:, None] + torch.arange(length, device=features.device)
        keys = self.window_keys(features.flatten(0, 1), positions.flatten(), fake_quant)
        window.append(rows, keys.unflatten(1, (count, length)), lengths)

    def hidden(
        self,
        policy: Policy,
        keys: Tensor,
        blocked: Tensor,
        anchor: Tensor,
        position: Tensor,
        trace: Trace | None = None,
    ) -> DraftStates:
        """Run the blocks.

        Args:
            policy: whose embedding is used, without a gradient.
            keys: [blocks, B, W, c] of the context.
            blocked: [B, W] true where the context holds nothing.
            anchor: [B] the token drawn last.
            position: [B] its position, which the backbone has not computed yet.
            trace: where to keep intermediate results.
        """
        config = self.config
        slots = config.dspark_block_size
        noise = anchor.new_full((anchor.shape[0], slots - 1), config.dspark_noise_token_id)
        token_ids = torch.cat([anchor[:, None], noise], dim=1).flatten()
        table: Tensor = policy.embed.weight  # pyright: ignore[reportAssignmentType]
        embedded = F.embedding(token_ids, table.detach())
        streams = embedded.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous()
        weights = torch.zeros(token_ids.shape[0], config.hc_mult, device=streams.device)
        weights[:, 0] = 1.0
        positions = (position[:, None] + torch.arange(slots, device=anchor.device)).flatten()
        routings = []
        for number, block in enumerate(self.blocks):
            rotation = Rotation.at(positions, block.attn.frequencies)
            streams, weights, routing = block(
                streams, weights, keys[number], blocked, rotation, policy.fake_quant
            )
            routings.append(routing)
            if trace is not None:
                trace.record(f"mtp.{number}.streams", streams)
                trace.record(f"mtp.{number}.next_A", weights)
        return DraftStates(collapse(weights, streams).unflatten(0, (-1, slots)), routings)

    def draft(
        self,
        policy: Policy,
        window: DraftWindow,
        anchor: Tensor,
        *,
        rows: Tensor | None = None,
        choose: Choose = greedy,
        trace: Trace | None = None,
    ) -> Draft:
        """Propose what follows `anchor` [B], the token drawn last in each of `rows` [B] (None: all)."""
        if rows is None:
            rows = torch.arange(anchor.shape[0], device=anchor.device)
        count = anchor.shape[0]
        rows, anchor = fill(rows), fill(anchor)
        keys, blocked = window.gather(rows), window.blocked(rows)
        states = self.hidden(policy, keys, blocked, anchor, window.next[rows], trace)
        base = self.base_logits(policy, states.hidden)
        tokens, logits, confidence, previous = [], [], [], anchor
        for slot in range(base.shape[1]):
            bias, sure = self.given(states.hidden[:, slot], previous)
            logits.append(base[:, slot] + bias)
            confidence.append(sure)
            tokens.append(choose(logits[-1][:count], slot))
            previous = fill(tokens[-1])
        every = (torch.stack(columns, 1)[:count] for columns in (tokens, logits, confidence))
        return Draft(*every)

    def base_logits(self, policy: Policy, hidden: Tensor) -> Tensor:
        """[..., d] of the last block to float32 [..., V], by the policy's head without a gradient to it."""
        return policy.logits(self.blocks[-1].norm(hidden), frozen=True)

    def given(self, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """What a slot owes to the token before it.

        Args:
            hidden: [..., d] of the slots.
            previous: [...] the token before each.

        Returns:
            The bias on the logits [..., V] and the logit of the slot's acceptance [...].
        """
        last = self.blocks[-1]
        embedded, bias = last.markov_head(previous)
        project: nn.Module = last.confidence_head.proj  # pyright: ignore[reportAssignmentType]
        return bias, project(torch.cat([hidden, embedded], dim=-1).float()).squeeze(-1)
