"""Speed of the inference engine on the CPU: decoding, prefill without the decoder, sessions that come back.

`python -m benchmarks.engine [--threads N] [--preset NAME]` measures in one run, always in turns, so that both
sides of a ratio meet the same machine:

- decoding at batch 1, 8, 32 and 128 with the engine (scheduling, sampling and log-probabilities included),
  on caches of floats and on packed pages, and with a loop over `policy.extend` alone;
- the prefill of 2,048 tokens with bounded replay against all layers, on a policy of equal halves whose layers
  are wide enough to outweigh the fixed costs of a call;
- the next turn of a session whose caches are there, against one that computes its history anew;
- the first turn of a session from another engine, found in a prefix store in memory, against the same.

The last line holds the figures; exit status 1 when one misses what it is to show.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.prefix_times import measure_engine
from model.config import PolicyConfig
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import Policy
from model.replay import Replay

_BATCHES = (1, 8, 32, 128)
_LEAST_RATIO = {32: 0.8, 128: 0.8}
_LEAST_PREFILL_RATIO = 1.7
_LEAST_HIT_RATIO = 5.0
_LEAST_STORE_RATIO = 3.0
_PROMPT, _CONTEXT, _WINDOWS, _WARM_UP = 9, 64, 6, 3
_STEPS = (_CONTEXT - _PROMPT - _WARM_UP) // _WINDOWS
_LONG, _ROUNDS = 2048, 5


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


def _decoding(policy: Policy, batch: int, storage: str) -> Engine:
    engine = Engine(
        policy,
        max_requests=batch,
        max_tokens=_CONTEXT,
        idle_sessions=0,
        prefill_tokens=4096,
        storage=storage,  # pyright: ignore[reportArgumentType]
    )
    generator = torch.Generator().manual_seed(0)
    for i in range(batch):
        prompt = torch.randint(0, policy.config.vocab_size, (_PROMPT,), generator=generator).tolist()
        engine.submit(Request(f"session-{i}", prompt, _sampling(policy, _CONTEXT, i)))
    return engine


def _sampling(policy: Policy, max_tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_ids=frozenset({policy.config.vocab_size}), seed=seed)


def in_turns(actions: list[Callable[[], object]], rounds: int, repeats: int = 1) -> list[float]:
    """Median seconds of each action over `rounds` turns of `repeats` calls."""
    seconds: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, times in zip(actions, seconds, strict=True):
            begin = time.perf_counter()
            for _ in range(repeats):
                action()
            times.append((time.perf_counter() - begin) / repeats)
    return [statistics.median(times) for times in seconds]


def decode_speed(policy: Policy, batch: int) -> list[float]:
    """Tokens/s of the engine on dense and on packed caches, and of the policy alone on dense ones."""
    engines = [_decoding(policy, batch, storage) for storage in ("dense", "packed")]
    steps: list[Callable[[], object]] = [*(engine.step for engine in engines), _Bare(policy, batch).step]
    for step in steps:
        for _ in range(_WARM_UP):
            step()
    return [batch / seconds for seconds in in_turns(steps, _WINDOWS, _STEPS)]


def equal_halves() -> Policy:
    """A policy of four encoder and four decoder layers, wide enough that tokens cost more than calls."""
    nano = PolicyConfig.preset("nano")
    config = replace(
        nano,
        hidden_size=128,
        num_hidden_layers=8,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 4, 6),
        candidate_source_layer_id=4,
        moe_intermediate_size=64,
        max_position_embeddings=2 * _LONG,
    )
    policy = Policy(config)
    policy.fake_quant = True
    return policy


def prefill_speed(policy: Policy) -> tuple[float, float]:
    """Tokens/s of the prefill of a long prompt with bounded replay, and with all layers."""
    prompt = torch.randint(0, policy.config.vocab_size, (_LONG,)).tolist()

    def prefill(replay: Replay) -> Callable[[], object]:
        engine = Engine(
            policy,
            max_requests=1,
            max_tokens=_LONG + 8,
            idle_sessions=0,
            storage="dense",
            replay=replay,
            prefill_tokens=512,
        )
        return lambda: _turn(engine, prompt)

    bounded, every = in_turns([prefill("bounded"), prefill("off")], _ROUNDS)
    return _LONG / bounded, _LONG / every


def _turn(engine: Engine, history: list[int], session: str = "s", *, forget: bool = True) -> list[int]:
    """Samples one token after a history; `forget` drops the session's caches first."""
    if forget:
        engine.release(session)
    engine.submit(Request(session, history, SamplingParams(max_tokens=1)))
    turn: list[int] = []
    while engine.has_work:
        turn = [id for finished in engine.step().finished for id in finished.turn.token_ids.tolist()]
    return turn


def hit_speed(policy: Policy) -> float:
    """How much faster a turn begins on the caches of its session than on none, after a long history."""
    engine = Engine(policy, max_requests=1, max_tokens=_LONG + 64, idle_sessions=2, storage="packed")
    history = torch.randint(0, policy.config.vocab_size, (_LONG - 64,)).tolist()
    history += _turn(engine, history, "warm")

    def warm() -> None:
        nonlocal history
        history = [*history, 1, 2]
        history += _turn(engine, history, "warm", forget=False)

    hit, cold = in_turns([warm, lambda: _turn(engine, history, "cold")], _ROUNDS)
    return cold / hit


def store_speed() -> float:
    """How much faster a session of another engine begins through a prefix store than without one."""
    with tempfile.TemporaryDirectory(prefix="engine-benchmark-", dir="/dev/shm") as folder:
        cold, hit = measure_engine(Path(folder), _LONG)
    return cold / hit


def main() -> int:
    """Prints a line a measurement and the figures last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--preset", default="nano")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    policy = Policy(PolicyConfig.preset(options.preset))
    policy.fake_quant = True
    figures, missed = list[str](), list[str]()
    with torch.inference_mode():
        for batch in _BATCHES:
            dense, packed, bare = decode_speed(policy, batch)
            ratio, overhead = dense / bare, 1e3 * batch * (1 / dense - 1 / bare)
            print(
                f"batch {batch:3d}: engine {dense:6.0f} tokens/s on dense caches, {packed:6.0f} on packed "
                f"ones, policy alone {bare:6.0f}, overhead {overhead:.2f} ms a step",
                flush=True,
            )
            figures.append(
                f"tok_s.b{batch} {dense:.0f} packed.b{batch} {packed:.0f} ratio.b{batch} {ratio:.2f}"
            )
            if ratio < _LEAST_RATIO.get(batch, 0.0):
                missed.append(f"the engine at batch {batch} has {ratio:.2f} of the policy's own speed")
        halves = equal_halves()
        bounded, every = prefill_speed(halves)
        print(
            f"prefill of {_LONG} tokens: {bounded:.0f} tokens/s bounded, {every:.0f} with all layers",
            flush=True,
        )
        hit = hit_speed(halves)
    moved = store_speed()
    figures += [f"prefill.ced {bounded / every:.2f}", f"hit {hit:.1f}", f"hit.store {moved:.1f}"]
    if bounded / every < _LEAST_PREFILL_RATIO:
        missed.append(
            f"bounded prefill is {bounded / every:.2f} times all layers, not {_LEAST_PREFILL_RATIO}"
        )
    if hit < _LEAST_HIT_RATIO:
        missed.append(f"a session's caches save {hit:.1f} times, not {_LEAST_HIT_RATIO}")
    if moved < _LEAST_STORE_RATIO:
        missed.append(f"the prefix store saves {moved:.1f} times, not {_LEAST_STORE_RATIO}")
    for miss in missed:
        print(f"missed: {miss}")
    print("engine " + " ".join(figures))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
