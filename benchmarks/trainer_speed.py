"""What the trainer costs beside the model: its tokens a second against a plain PyTorch loop, and its packing.

    python -m benchmarks.trainer_speed [--preset nano] [--rounds 12] [--documents 96]

Both take the same optimiser steps over the same documents of long-tailed lengths: the trainer as it is
(packing, masks, metrics, checks), and a loop of a dozen lines: the same model called on the same
micro-batches, packed beforehand, cross-entropy, clipping, torch's AdamW. They take turns in one process and
one thread, each round is measured in processor time, and the figure is the median of the rounds' ratios.
Packing efficiency is the share of the micro-batches' budget that is filled. The last lines hold both; the
exit status is 1 when one misses what it must show.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from model.config import PolicyConfig
from model.policy import PackedTokens, Policy
from rl.trainers import OptimizerConfig, Sample, SFTConfig, SFTTrainer
from rl.trainers.packing import micro_batches, pack

SPEED_FLOOR, PACKING_FLOOR = 0.9, 0.95
BUDGET, SHORTEST, LONGEST = 1024, 8, 512
RATES = OptimizerConfig(learning_rate=1e-3, warmup_steps=0, weight_decay=0.01)


def lengths(count: int, seed: int) -> list[int]:
    """Log-normal lengths with a long tail, cut to `SHORTEST` .. `LONGEST`."""
    drawn = np.random.default_rng(seed).lognormal(4.0, 1.0, count)
    return np.clip(drawn, SHORTEST, LONGEST).astype(int).tolist()


def samples(count: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """Documents of random tokens, of which all but the first are trained."""
    rng = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths(count, seed)):
        mask = np.arange(length) > 0
        made.append(
            Sample(
                token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.zeros(length, np.float32),
                advantages=mask.astype(np.float32),
                policy_version=np.full(length, -1, np.int32),
                id=str(number),
            )
        )
    return made


def fresh(preset: str) -> Policy:
    """A policy with the weights of seed 0."""
    policy = Policy(PolicyConfig.preset(preset))
    policy.reset_parameters(0)
    return policy


def plain_step(policy: Policy, documents: list[Sample]) -> Callable[[], None]:
    """The loop anybody would write first, over micro-batches packed beforehand."""
    batches = [
        (PackedTokens(b.token_ids, b.cu_seqlens), b.token_ids, b.loss_mask.nonzero()[:, 0])
        for b in micro_batches(documents, BUDGET, torch.device("cpu"))
    ]
    count = sum(len(positions) for *_, positions in batches)
    tables = {n for n, _ in policy.named_parameters() if n.endswith("engram.embed.weight")}
    dense = [p for n, p in policy.named_parameters() if n not in tables]
    sparse = [p for n, p in policy.named_parameters() if n in tables]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(dense, lr=1e-3, betas=RATES.betas, weight_decay=0.01, fused=True),
        torch.optim.SparseAdam(sparse, lr=1e-3, betas=RATES.betas),
    ]

    def step() -> None:
        for tokens, ids, positions in batches:
            logits = policy.logits(policy(tokens).hidden[positions - 1])
            (F.cross_entropy(logits, ids[positions], reduction="sum") / count).backward()
        nn.utils.clip_grad_norm_(dense, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        policy.zero_grad(set_to_none=True)

    return step


def cpu_time(step: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def speed(preset: str, documents: int, rounds: int) -> tuple[float, float]:
    """The trainer's speed as a share of the plain loop's (median), and its tokens a processor second."""
    policy = fresh(preset)
    batch = samples(documents, policy.config.vocab_size)
    trainer = SFTTrainer(policy, SFTConfig(token_budget=BUDGET, optimizer=RATES))
    plain = plain_step(fresh(preset), batch)

    def ours() -> object:
        return trainer.step(batch)

    ours()
    plain()
    ratios, best = [], float("inf")
    for number in range(rounds):
        if number % 2:
            own, other = cpu_time(ours), cpu_time(plain)
        else:
            other, own = cpu_time(plain), cpu_time(ours)
        ratios.append(other / own)
        best = min(best, own)
        print(f"round {number + 1}: plain {other:.3f} s, trainer {own:.3f} s, ratio {other / own:.3f}")
    return statistics.median(ratios), sum(len(sample) for sample in batch) / best


def packing(batches: int = 20, count: int = 1024, budget: int = 4096) -> float:
    """The share of the budget that is filled, over batches of long-tailed lengths."""
    filled = bins = 0
    for seed in range(batches):
        drawn = lengths(count, seed)
        filled += sum(drawn)
        bins += len(pack(drawn, budget))
    return filled / (bins * budget)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--documents", type=int, default=96)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratio, rate = speed(arguments.preset, arguments.documents, arguments.rounds)
    efficiency = packing()
    print(f"{rate:.0f} tokens a processor second ({arguments.preset})")
    print(f"packing_efficiency={efficiency:.3f} (at least {PACKING_FLOOR})")
    print(f"speed_ratio={ratio:.3f} (at least {SPEED_FLOOR})")
    return 0 if ratio >= SPEED_FLOOR and efficiency >= PACKING_FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
