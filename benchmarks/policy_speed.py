"""How fast the small policy trains and decodes on this machine's processor.

    python -m benchmarks.policy_speed [--preset nano] [--threads 2] [--rounds 8]

Training is forward and backward over 64 documents of 28 tokens; decoding appends one token to each of 32 or
128 cached sequences and computes its logits. Figures are the best of several rounds, since other programs
only ever slow a round down. The last line holds the figures; the exit status is 1 when one misses its floor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from model.config import PolicyConfig
from model.policy import PackedTokens, Policy

DOCUMENTS, LENGTH = 64, 28
FLOORS = {"train": 5000.0, "decode32": 2500.0, "decode128": 5000.0}


def best_rate(step: Callable[[], int], rounds: int, steps: int) -> float:
    """Tokens a second of the fastest of `rounds` rounds of `steps` steps; `step` returns its tokens."""
    step()
    rates = []
    for _ in range(rounds):
        begin = time.perf_counter()
        tokens = sum(step() for _ in range(steps))
        rates.append(tokens / (time.perf_counter() - begin))
    return max(rates)


def train_rate(policy: Policy, rounds: int) -> float:
    """Training tokens a second, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, policy.config.vocab_size, (DOCUMENTS * LENGTH,), generator=generator)
    tokens = PackedTokens(token_ids, torch.arange(DOCUMENTS + 1) * LENGTH)

    def step() -> int:
        logits = policy.logits(policy(tokens).hidden)
        F.cross_entropy(logits[:-1], token_ids[1:]).backward()
        policy.zero_grad(set_to_none=True)
        return token_ids.shape[0]

    return best_rate(step, rounds, 4)


def decode_rate(policy: Policy, batch: int, rounds: int) -> float:
    """Decoded tokens a second at `batch` sequences, each round from the first token to the last."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, policy.config.vocab_size, (batch, 1), generator=generator)
    lengths = torch.ones(batch, dtype=torch.int64)
    steps = LENGTH
    cache = policy.new_cache(batch, LENGTH)
    slots = torch.tensor([cache.allocate() for _ in range(batch)])

    def sequence() -> int:
        for slot in slots.tolist():
            cache.free(slot)
        fresh = torch.tensor([cache.allocate() for _ in range(batch)])
        for _ in range(steps):
            policy.logits(policy.extend(cache, fresh, token_ids, lengths))
        return batch * steps

    with torch.inference_mode():
        return best_rate(sequence, rounds, 1)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policy = Policy(PolicyConfig.preset(arguments.preset))
    policy.fake_quant = True
    rates = {
        "train": train_rate(policy, arguments.rounds),
        "decode32": decode_rate(policy, 32, arguments.rounds),
        "decode128": decode_rate(policy, 128, arguments.rounds),
    }
    print(f"{arguments.preset} " + " ".join(f"{name} {rate:.0f} tok/s" for name, rate in rates.items()))
    missed = [name for name, floor in FLOORS.items() if rates[name] < floor]
    if missed:
        print(f"below the floor: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
