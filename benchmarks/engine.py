"""Decode speed of the inference engine on the CPU, and what it costs over the bare policy.

`python -m benchmarks.engine [--threads N] [--preset NAME]` decodes at batch 1, 8, 32 and 128 with the engine
(scheduling, sampling and log-probabilities included) and with a loop over `policy.extend` alone, in the same
run and in turns, so that both meet the same machine. The last line holds the figures; exit status 1 when the
engine is slower than what it is to show.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import Policy

_BATCHES = (1, 8, 32, 128)
_TARGETS = {32: 2500.0, 128: 5000.0}
_PROMPT, _CONTEXT, _WINDOWS, _WARM_UP = 9, 64, 6, 3
_STEPS = (_CONTEXT - _PROMPT - _WARM_UP) // _WINDOWS


class _Bare:
    """A loop over the policy alone, on random tokens."""

    def __init__(self, policy: Policy, batch: int) -> None:
        self._policy, self._cache = policy, policy.new_cache(batch, _CONTEXT)
        self._slots = torch.tensor([self._cache.allocate() for _ in range(batch)])
        self._ones = torch.ones(batch, dtype=torch.int64)
        self._tokens = torch.randint(0, policy.config.vocab_size, (batch, _PROMPT))
        policy.extend(self._cache, self._slots, self._tokens, self._ones * _PROMPT)

    def step(self) -> None:
        """Decodes one token a row."""
        hidden = self._policy.extend(self._cache, self._slots, self._tokens[:, :1], self._ones)
        self._policy.logits(hidden)


def _engine(policy: Policy, batch: int) -> Engine:
    engine = Engine(policy, max_requests=batch, max_tokens=_CONTEXT, idle_sessions=0, prefill_tokens=4096)
    generator = torch.Generator().manual_seed(0)
    for i in range(batch):
        prompt = torch.randint(0, policy.config.vocab_size, (_PROMPT,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=_CONTEXT, stop_ids=frozenset({policy.config.vocab_size}), seed=i)
        engine.submit(Request(f"session-{i}", prompt, sampling))
    return engine


def measure(policy: Policy, batch: int) -> tuple[float, float]:
    """Returns decode tokens/s of the engine and of the bare policy: medians over alternating windows."""
    engine, bare = _engine(policy, batch), _Bare(policy, batch)
    steps = (engine.step, bare.step)
    for step in steps:
        for _ in range(_WARM_UP):
            step()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(_WINDOWS):
        for step, times in zip(steps, seconds, strict=True):
            begin = time.perf_counter()
            for _ in range(_STEPS):
                step()
            times.append(time.perf_counter() - begin)
    own, other = (batch * _STEPS / statistics.median(times) for times in seconds)
    return own, other


def main() -> int:
    """Prints a line a batch size and the figures last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--preset", default="nano")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policy = Policy(PolicyConfig.preset(options.preset))
    policy.fake_quant = True
    figures: dict[int, tuple[float, float]] = {}
    with torch.inference_mode():
        for batch in _BATCHES:
            figures[batch] = own, bare = measure(policy, batch)
            overhead = 1e3 * batch * (1 / own - 1 / bare)
            print(
                f"batch {batch:3d}: engine {own:6.0f} tokens/s, policy alone {bare:6.0f} tokens/s, "
                f"overhead {overhead:.2f} ms a step",
                flush=True,
            )
    missed = [b for b, target in _TARGETS.items() if options.preset == "nano" and figures[b][0] < target]
    for batch in missed:
        print(f"batch {batch} misses its {_TARGETS[batch]:.0f} tokens/s")
    speeds = " ".join(f"tok_s.b{batch} {own:.0f}" for batch, (own, _) in figures.items())
    ratios = " ".join(f"ratio.b{batch} {own / bare:.3f}" for batch, (own, bare) in figures.items())
    print(f"engine {speeds} {ratios}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
