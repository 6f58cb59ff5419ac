"""What bounded replay costs: a turn's time, and the share of it that lost windows take.

A turn appends `new` tokens (a prompt or a tool's answer) and generates some. All new tokens run through the
encoder and the last W of them through the decoder. When the windows of the sequence are lost, the last W
tokens before the turn run through the encoder again, and the decoder replays a whole window even where fewer
tokens are new. The share falls with the length of the turn and rises with the share of turns that miss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from model.config import AttentionMode, PolicyConfig
from model.policy import Policy

_REPEATS = 3


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Cost of one token, in any one unit."""

    encoder: float
    """Through the first half, in a prefill."""
    decoder: float
    """Through the second half, in a prefill."""
    step: float
    """Generated: all layers and the head."""


@dataclass(frozen=True, slots=True)
class TurnCost:
    """A turn of `new` appended tokens when a share `miss_rate` of turns finds its windows lost."""

    new: int
    miss_rate: float
    turn: float
    """Mean cost of the turn."""
    replay: float
    """Mean cost of what lost windows add to it."""

    @property
    def share(self) -> float:
        """Of the turn's cost that is replay."""
        return self.replay / self.turn


def turn_cost(costs: TokenCosts, window: int, new: int, generated: int, miss_rate: float) -> TurnCost:
    """The mean turn of `new` appended and `generated` sampled tokens in a sequence longer than `window`."""
    decoded = min(new, window)
    lost = window * costs.encoder + (window - decoded) * costs.decoder
    base = new * costs.encoder + decoded * costs.decoder + generated * costs.step
    return TurnCost(new, miss_rate, base + miss_rate * lost, miss_rate * lost)


def parameter_costs(config: PolicyConfig) -> TokenCosts:
    """Costs in parameters that a token meets, the measure of work where arithmetic is the limit."""
    start = config.num_hidden_layers // 2 if config.decoder_start is None else config.decoder_start
    encoder = sum(_active(config, layer) for layer in range(start))
    decoder = sum(_active(config, layer) for layer in range(start, config.num_hidden_layers))
    head = config.vocab_size * config.hidden_size
    return TokenCosts(float(encoder), float(decoder), float(encoder + decoder + head))


def _active(config: PolicyConfig, layer: int) -> int:
    d, width, q = config.hidden_size, config.head_dim, config.q_lora_rank
    experts = config.num_experts_per_tok + config.n_shared_experts
    count = experts * 3 * d * config.moe_intermediate_size + d * config.n_routed_experts
    heads = config.num_attention_heads * width
    narrow = config.o_groups * config.o_lora_rank
    count += d * q + q * heads + d * width + heads * config.o_lora_rank + narrow * d
    mode = config.mode(layer)
    if mode is AttentionMode.FULL:
        count += d * width * min(config.ratio(layer), 2) + width * config.index_head_dim
    if mode in (AttentionMode.FULL, AttentionMode.REINDEX):
        count += config.index_n_heads * (q * config.index_head_dim + d)
    return count


@torch.inference_mode()
def measured_costs(policy: Policy, length: int) -> TokenCosts:
    """Costs in seconds on this machine.

    Timed are prefills of `length` tokens through both halves and through the encoder alone, and single steps.

    Raises:
        ValueError: the policy has no decoder of its own.
    """
    cache = policy.new_cache(1, length + 1)
    ids = torch.zeros(1, length, dtype=torch.int64, device=policy.device)
    lengths, one = torch.tensor([length]), torch.ones(1, dtype=torch.int64)
    whole, encoder, steps = [], [], []
    for _ in range(_REPEATS):
        slot = torch.tensor([cache.allocate()], device=policy.device)
        whole.append(_seconds(lambda s=slot: policy.extend(cache, s, ids, lengths)))
        steps.append(_seconds(lambda s=slot: policy.logits(policy.extend(cache, s, ids[:, :1], one))))
        cache.free(int(slot))
        slot = torch.tensor([cache.allocate()], device=policy.device)
        encoder.append(
            _seconds(lambda s=slot: policy.extend(cache, s, ids, lengths, decode_from=lengths.to(s.device)))
        )
        cache.free(int(slot))
    half = min(encoder) / length
    return TokenCosts(half, max(min(whole) / length - half, 0.0), min(steps))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
