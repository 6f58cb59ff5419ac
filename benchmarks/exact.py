"""What exact mode costs, and that it is exact: sampler and trainer compared bit by bit.

    python -m benchmarks.exact [--preset nano] [--rounds 6]

Training is forward and backward over 64 documents of 28 tokens; decoding appends one token to each of 32
cached sequences, from the first to the 28th, and computes its log-probabilities. Both modes take turns in one
run, with rounded keys and one thread; the best round counts. `maxdiff` is the largest difference between the
log-probabilities of all decoded tokens (32 side by side) and those of one training forward over the same
sequences in another order. The last line is `exact train R1x decode R2x maxdiff D`, R being exact time / fast
time; the exit status is 1 when D is not 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from model.choices import truncated_logprobs
from model.config import PolicyConfig
from model.policy import PackedTokens, Policy

DOCUMENTS, LENGTH, BATCH = 64, 28, 32


def documents(policy: Policy) -> Tensor:
    """[DOCUMENTS, LENGTH] token ids."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, policy.config.vocab_size, (DOCUMENTS, LENGTH), generator=generator)


def packed(token_ids: Tensor) -> PackedTokens:
    """Documents [N, LENGTH] end to end."""
    return PackedTokens(token_ids.flatten(), torch.arange(len(token_ids) + 1) * LENGTH)


def train(policy: Policy, token_ids: Tensor) -> None:
    """One forward and backward pass."""
    tokens = packed(token_ids)
    logits = policy.logits(policy(tokens).hidden)
    F.cross_entropy(logits[:-1], tokens.token_ids[1:]).backward()
    policy.zero_grad(set_to_none=True)


@torch.inference_mode()
def decode(policy: Policy, token_ids: Tensor) -> Tensor:
    """Log-probabilities [BATCH, LENGTH, V] of the first sequences, one token a step."""
    cache = policy.new_cache(BATCH, LENGTH)
    slots = torch.tensor([cache.allocate() for _ in range(BATCH)])
    one = torch.ones(BATCH, dtype=torch.int64)
    steps = [
        truncated_logprobs(policy.logits(policy.extend(cache, slots, token_ids[:BATCH, at, None], one)), None)
        for at in range(LENGTH)
    ]
    return torch.stack(steps, dim=1)


@torch.inference_mode()
def largest_difference(policy: Policy, token_ids: Tensor) -> float:
    """Between decoding and one training forward over all documents in reverse order."""
    hidden = policy(packed(token_ids.flip(0))).hidden
    logprobs = truncated_logprobs(policy.logits(hidden), None).unflatten(0, (DOCUMENTS, LENGTH)).flip(0)
    return (decode(policy, token_ids) - logprobs[:BATCH]).abs().max().item()


def best_times(policy: Policy, work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Seconds of the best round, fast and exact, taken in turns."""
    best = {False: float("inf"), True: float("inf")}
    for _ in range(rounds + 1):
        for exact in best:
            policy.exact = exact
            begin = time.perf_counter()
            work()
            best[exact] = min(best[exact], time.perf_counter() - begin)
    return best[False], best[True]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset(arguments.preset))
    policy.fake_quant = True
    token_ids = documents(policy)
    ratios = {}
    print(f"{arguments.preset}        fast tok/s   exact tok/s   exact / fast time")
    for name, work, tokens in (
        ("train", lambda: train(policy, token_ids), DOCUMENTS * LENGTH),
        ("decode", lambda: decode(policy, token_ids), BATCH * LENGTH),
    ):
        fast, exact = best_times(policy, work, arguments.rounds)
        ratios[name] = exact / fast
        print(f"{name:8} {tokens / fast:13.0f} {tokens / exact:13.0f} {ratios[name]:14.2f}")
    differences = {}
    for exact in (False, True):
        policy.exact = exact
        differences[exact] = largest_difference(policy, token_ids)
    print(f"maxdiff  {differences[False]:13.2g} {differences[True]:13.2g}")
    difference = f"{differences[True]:.3g}"
    print(f"exact train {ratios['train']:.2f}x decode {ratios['decode']:.2f}x maxdiff {difference}")
    return 0 if differences[True] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
