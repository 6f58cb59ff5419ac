"""The hash of the n-gram memory: from the last compressed token ids to rows of each layer's table.

Moduli are consecutive primes, multipliers come from a seeded generator, so both are functions of the
configuration and are never stored. All arithmetic is on 64-bit integers; products stay below 2^62.
"""

from __future__ import annotations

import math
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn

from model.config import PolicyConfig

DEAD = -1
"""Compressed id of an image token: it has no n-gram, and no look-back crosses it."""
_SEED_STEP = 10007


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def bucket_primes(config: PolicyConfig) -> list[list[list[int]]]:
    """Moduli by layer, n-gram order (2 first) and head: primes from `engram_vocab_size` up, each once."""
    primes = (number for number in count(config.engram_vocab_size) if _is_prime(number))
    orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    return [[[next(primes) for _ in range(heads)] for _ in range(orders)] for _ in config.engram_layer_ids]


def multipliers(config: PolicyConfig) -> list[list[int]]:
    """Odd multipliers by layer and look-back distance."""
    bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
    return [
        (
            np.random.default_rng(_SEED_STEP * layer).integers(
                0, bound, size=config.engram_max_ngram_size, dtype=np.int64
            )
            * 2
            + 1
        ).tolist()
        for layer in config.engram_layer_ids
    ]


def look_back(history: Tensor, pad: Tensor) -> Tensor:
    """Replace what no look-back may read.

    Args:
        history: [T, n] compressed ids of the token and of those 1, 2, ... before it; `DEAD` for image tokens.
        pad: compressed id that stands for a missing token.

    Returns:
        [T, n]: once an entry is dead, it and all further ones are `pad`.
    """
    dead = (history == DEAD).cumsum(dim=1) > 0
    return torch.where(dead, pad, history)


class EngramHash(nn.Module):
    """Rows [T, layers, columns] of all n-gram tables. Columns: order 2 first, then head; offset included."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        primes = bucket_primes(config)
        self._check_rows(config, primes)
        moduli = torch.tensor(primes, dtype=torch.int64, device="cpu")
        flat = moduli.flatten(1)
        offsets = (flat.cumsum(1) - flat).view_as(moduli)
        self.register_buffer("moduli", moduli, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("factors", torch.tensor(multipliers(config), device="cpu"), persistent=False)
        self.moduli: Tensor
        self.offsets: Tensor
        self.factors: Tensor

    @staticmethod
    def _check_rows(config: PolicyConfig, primes: list[list[list[int]]]) -> None:
        for layer, rows, found in zip(
            config.engram_layer_ids, config.engram_num_embeddings, primes, strict=True
        ):
            expected = sum(map(sum, found))
            if rows != expected:
                raise ValueError(
                    f"engram_num_embeddings gives layer {layer} {rows} rows, but the primes from "
                    f"engram_vocab_size {config.engram_vocab_size} need {expected}: set it to {expected}"
                )

    def forward(self, history: Tensor) -> Tensor:
        """[T, n] compressed ids after `look_back` (distance 0 first) to rows [T, layers, (n - 1) * heads]."""
        products = history.unsqueeze(1) * self.factors
        running = products[..., 0]
        hashes = []
        for distance in range(1, history.shape[-1]):
            running = running ^ products[..., distance]
            hashes.append(running)
        return (torch.stack(hashes, dim=-1).unsqueeze(-1) % self.moduli + self.offsets).flatten(2)
