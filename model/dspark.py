"""DSpark: a small drafter that proposes the next tokens as one block, from features of the backbone.

Its blocks look like the policy's, but their window holds keys made from backbone features, and inside a draft
every slot sees every other. A Markov head then makes each slot depend on the token drawn for the slot before
it, and a confidence head says how likely a slot is to be accepted given that all earlier ones are. Parameter
names are the published ones, in which the first block also owns the feature projection and the last one the
heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import PolicyConfig
from model.layers.attend import as_bias, attend
from model.layers.attention import Attention
from model.layers.hyper_connections import HyperConnection, collapse, mix
from model.layers.linear import Linear
from model.layers.moe import MixtureOfExperts
from model.layers.norm import RMSNorm
from model.layers.rope import Rotation

if TYPE_CHECKING:
    from model.batch import Trace
    from model.policy import Policy


class MarkovHead(nn.Module):
    """A bias on the logits that depends on the token before."""

    def __init__(self, config: PolicyConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed, self.head = nn.Module(), nn.Module()
        shape = (config.vocab_size, config.dspark_markov_rank)
        self.embed.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.head.weight = nn.Parameter(torch.empty(shape, dtype=dtype))

    def forward(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] to their embedding [B, rank] and logits [B, V], float32."""
        table: Tensor = self.embed.weight  # pyright: ignore[reportAssignmentType]
        head: Tensor = self.head.weight  # pyright: ignore[reportAssignmentType]
        embedded = F.embedding(previous, table)
        return embedded, F.linear(embedded.float(), head.float())


class DraftBlock(nn.Module):
    """Attention over the feature window and the draft itself, then experts."""

    def __init__(self, config: PolicyConfig, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attn_norm, self.ffn_norm = RMSNorm(d, eps, dtype), RMSNorm(d, eps, dtype)
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn = Attention(config, config.num_hidden_layers + number, dtype)
        self.ffn = MixtureOfExperts(
            config, config.dspark_n_routed_experts, config.dspark_num_experts_per_tok, dtype
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
    ) -> tuple[Tensor, Tensor]:
        """One block.

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
        update, _ = self.ffn(self.ffn_norm(collapse(next_weights, streams)))
        return mix(carry, streams, write, update), weights


class DraftWindow:
    """Keys [blocks, B, W, c] that the drafter keeps of B sequences: a ring by position."""

    def __init__(self, config: PolicyConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.num_nextn_predict_layers, rows, config.sliding_window, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.next = torch.zeros(rows, dtype=torch.int64, device=device)
        """[B] position that will be written next."""

    def blocked(self) -> Tensor:
        """[B, W] true where nothing has been written."""
        return torch.arange(self.keys.shape[2], device=self.next.device) >= self.next[:, None]


@dataclass(frozen=True, slots=True)
class Draft:
    """A block of proposals for B sequences."""

    token_ids: Tensor
    """[B, slots]."""
    logits: Tensor
    """[B, slots, V], Markov bias included."""
    confidence: Tensor
    """[B, slots] logit of a slot's acceptance given that of all earlier ones."""


class Drafter(nn.ModuleList):
    """The draft blocks of a policy."""

    def __init__(self, config: PolicyConfig, dtype: torch.dtype) -> None:
        numbers = range(config.num_nextn_predict_layers)
        super().__init__(DraftBlock(config, number, dtype) for number in numbers)
        self.config = config

    @property
    def blocks(self) -> list[DraftBlock]:
        """The blocks in order."""
        return list(self)  # pyright: ignore[reportReturnType]

    def new_window(self, rows: int) -> DraftWindow:
        """An empty window for `rows` sequences."""
        weight = self.blocks[0].main_norm.weight
        return DraftWindow(self.config, rows, weight.dtype, weight.device)

    def observe(self, window: DraftWindow, features: Tensor, fake_quant: bool) -> None:
        """Add backbone features [B, L, 3 d] of each sequence's next L positions; only the last W matter."""
        rows, length = features.shape[:2]
        size = self.config.sliding_window
        first = max(0, length - size)
        positions = window.next[:, None] + torch.arange(first, length, device=features.device)
        head = self.blocks[0]
        main = head.main_norm(head.main_proj(features[:, first:].flatten(0, 1)))
        places = (torch.arange(rows, device=features.device)[:, None], positions % size)
        for number, block in enumerate(self.blocks):
            rotation = Rotation.at(positions.flatten(), block.attn.frequencies)
            keys = block.attn.window_keys(main, rotation, fake_quant)
            window.keys[number][places] = keys.unflatten(0, (rows, -1))
        window.next = window.next + length

    def draft(
        self, policy: Policy, window: DraftWindow, anchor: Tensor, *, trace: Trace | None = None
    ) -> Draft:
        """Propose greedily what follows `anchor` [B], the token the backbone drew last."""
        config = self.config
        slots = config.dspark_block_size
        noise = anchor.new_full((anchor.shape[0], slots - 1), config.dspark_noise_token_id)
        token_ids = torch.cat([anchor[:, None], noise], dim=1).flatten()
        embedded = F.embedding(token_ids, policy.embed.weight)  # pyright: ignore[reportArgumentType]
        streams = embedded.unsqueeze(1).expand(-1, config.hc_mult, -1).contiguous()
        weights = torch.zeros(token_ids.shape[0], config.hc_mult, device=streams.device)
        weights[:, 0] = 1.0
        positions = (window.next[:, None] + torch.arange(slots, device=anchor.device)).flatten()
        for number, block in enumerate(self.blocks):
            rotation = Rotation.at(positions, block.attn.frequencies)
            keys, blocked = window.keys[number], window.blocked()
            streams, weights = block(streams, weights, keys, blocked, rotation, policy.fake_quant)
            if trace is not None:
                trace.record(f"mtp.{number}.streams", streams)
                trace.record(f"mtp.{number}.next_A", weights)
        hidden = collapse(weights, streams)
        return self._heads(policy, hidden.unflatten(0, (-1, slots)), anchor)

    def _heads(self, policy: Policy, hidden: Tensor, anchor: Tensor) -> Draft:
        last = self.blocks[-1]
        base = policy.logits(last.norm(hidden))
        project: nn.Module = last.confidence_head.proj  # pyright: ignore[reportAssignmentType]
        tokens, logits, confidence, previous = [], [], [], anchor
        for slot in range(hidden.shape[1]):
            embedded, bias = last.markov_head(previous)
            logits.append(base[:, slot] + bias)
            confidence.append(project(torch.cat([hidden[:, slot], embedded], dim=-1).float()).squeeze(-1))
            previous = logits[-1].argmax(-1)
            tokens.append(previous)
        return Draft(torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1))
