"""Engines of three roles against one engine of all: `python -m benchmarks.roles [--requests N] [--prompt N]`.

Requests with an image, a long prompt and a few tokens to draw go through an encode, a prefill and a decode
engine, each in a process of its own, as a run with `launcher.prefill_replicas` and `launcher.encode_replicas`
has them; the same requests then go to one engine of all roles. Every engine computes in one thread. While an
engine works on some requests, the others work on other ones: the overlap is the share of the time in which at
least two of them are busy. The last line is

    roles overlap O% throughput T tok/s against one A tok/s ratio R

and the exit status 1 when nothing overlapped, or when a request drew other tokens than with one engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from model.config import PolicyConfig, VisionConfig
from model.engine.sampler import SamplingParams
from model.images import PreparedImage
from model.policy import Policy
from model.vision import ImageTokens, span_types
from rl.actors import Cluster
from rl.engines.base import Completion, Engine, GenerateRequest, HistoryImages
from rl.engines.native import NativeEngine, Prefilled
from rl.engines.roled import RoledEngine
from rl.placement import Bundle, reserve
from rl.ray_session import start_ray, stop_ray

_IMAGE, _GRID, _AT_ONCE = 63, (24, 24), 16
Span = tuple[float, float]


def policy() -> Policy:
    """A small policy with an image tower."""
    vision = VisionConfig(
        num_hidden_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=128,
        patch_size=4,
        rope_theta=10000.0,
        downsample_ratio=3,
        max_image_tokens=128,
        min_pixels=16,
        max_wh_ratio=None,
    )
    made = Policy(replace(PolicyConfig.preset("pico"), vision=vision, image_token_id=_IMAGE))
    made.reset_parameters(6)
    return made


def engine(role: Literal["all", "encode", "prefill", "decode"], context: int) -> NativeEngine:
    """An engine of one role; each role draws the same tokens to the last bit (exact mode)."""
    torch.set_num_threads(1)
    return NativeEngine(policy(), max_requests=_AT_ONCE, max_tokens=context, exact=True, role=role)


class Timed:
    """An engine in its process, with the times at which it worked (the machine's monotonic clock)."""

    def __init__(self, native: NativeEngine) -> None:
        self._native = native
        self.spans: list[Span] = []

    async def encode(self, history: HistoryImages) -> ImageTokens | None:
        """Encodes images."""
        return await self._native.encode(history)

    async def prefill(self, request: GenerateRequest, rows: ImageTokens | None) -> Prefilled:
        """Computes a prompt."""
        return await self._native.prefill(request, rows)

    def busy(self) -> list[Span]:
        """When it worked."""
        return self.spans


@asynccontextmanager
async def open_timed(role: Literal["encode", "prefill"], context: int) -> AsyncIterator[Timed]:
    """Opens an engine whose commands and steps are timed."""
    native = engine(role, context)
    timed = Timed(native)
    watch(native, timed.spans)
    try:
        yield timed
    finally:
        await native.close()


def watch(native: NativeEngine, spans: list[Span]) -> None:
    """Notes when the engine's thread computes: its steps, and the images it encodes."""
    inner: Any = native._engine
    inner.step = timed(inner.step, spans)
    images: Any = native._images
    images.of = timed(images.of, spans)


def timed(call: Callable[..., Any], spans: list[Span]) -> Callable[..., Any]:
    """The same call, with its time noted."""

    def noted(*args: Any) -> Any:
        started = time.monotonic()
        try:
            return call(*args)
        finally:
            spans.append((started, time.monotonic()))

    return noted


def requests(count: int, prompt: int, tokens: int) -> list[GenerateRequest]:
    """So many requests, each with an image of its own."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        patches = torch.randn(_GRID[0] * _GRID[1], 3, 4, 4, generator=draw)
        span = span_types(_GRID, 3)
        text = torch.randint(0, 60, (prompt,), generator=draw).tolist()
        types = [-1] * 3 + [int(kind) for kind in span] + [-1] * prompt
        ids = [1, 2, 3, *[_IMAGE] * len(span), *text]
        sampling = SamplingParams(max_tokens=tokens, seed=i, stop_ids=frozenset())
        images = HistoryImages(types, [PreparedImage(patches, _GRID)])
        made.append(GenerateRequest(f"s{i}", 0, ids, sampling, images=images))
    return made


@dataclass(frozen=True, slots=True)
class Result:
    """Drawn tokens, tokens a second (prompts included), and when each engine worked."""

    turns: list[Completion]
    seconds: float


async def play(one: Engine, todo: list[GenerateRequest]) -> Result:
    """Sends all requests, so many at once."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(request: GenerateRequest) -> Completion:
        async with gate:
            done = await one.generate(request)
            await one.release(request.session)
            return done

    started = time.monotonic()
    turns = await asyncio.gather(*(ask(request) for request in todo))
    return Result(turns, time.monotonic() - started)


async def with_roles(
    todo: list[GenerateRequest], context: int, logs: Path
) -> tuple[Result, list[list[Span]]]:
    """The requests through three processes; this one decodes."""
    bundles = [Bundle(role, {"CPU": 1.0}) for role in ("encode", "prefill")]
    start_ray("", "roles", 128 << 20, 2.0)
    try:
        cluster = Cluster(logs, await reserve(bundles, "pack", 120.0))
        opening: list[Awaitable[Any]] = [
            cluster.open(bundle.role, bundle, open_timed, bundle.role, context) for bundle in bundles
        ]
        encode, prefill = await asyncio.gather(*opening)
        decode, spans = engine("decode", context), list[Span]()
        watch(decode, spans)
        roled = RoledEngine(decode, [prefill.remote], [encode.remote])
        await play(roled, [replace(request, session=f"warm-{request.session}") for request in todo[:2]])
        result = await play(roled, todo)
        began = time.monotonic() - result.seconds
        busy = [await encode.call("busy"), await prefill.call("busy"), spans]
        await roled.close()
        await asyncio.gather(encode.stop(), prefill.stop())
    finally:
        stop_ray()
    return result, [[(max(a, began), b) for a, b in role if b > began] for role in busy]


async def alone(todo: list[GenerateRequest], context: int) -> Result:
    """The requests through one engine."""
    one = engine("all", context)
    await play(one, [replace(request, session=f"warm-{request.session}") for request in todo[:2]])
    result = await play(one, todo)
    await one.close()
    return result


def overlap(busy: list[list[Span]], seconds: float) -> float:
    """The share of the time in which at least two engines worked."""
    edges = sorted(edge for role in busy for a, b in role for edge in ((a, 1), (b, -1)))
    shared, running, before = 0.0, 0, 0.0
    for at, change in edges:
        if running >= 2:
            shared += at - before
        running, before = running + change, at
    return shared / seconds


def main() -> int:
    """Measures both and prints the comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roles", description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=32)
    arguments = parser.parse_args()
    todo = requests(arguments.requests, arguments.prompt, arguments.tokens)
    context = max(len(request.token_ids) for request in todo) + arguments.tokens
    with tempfile.TemporaryDirectory() as folder:
        roled, busy = asyncio.run(with_roles(todo, context, Path(folder)))
    single = asyncio.run(alone(todo, context))
    tokens = sum(len(request.token_ids) for request in todo) + len(todo) * arguments.tokens
    for role, spans in zip(("encode", "prefill", "decode"), busy, strict=True):
        print(f"{role:<8} busy {sum(b - a for a, b in spans) / roled.seconds:6.1%} of {roled.seconds:.2f} s")
    equal = all(
        one.token_ids == other.token_ids for one, other in zip(roled.turns, single.turns, strict=True)
    )
    print(f"the same tokens: {'yes' if equal else 'NO'}")
    shared, rate, base = overlap(busy, roled.seconds), tokens / roled.seconds, tokens / single.seconds
    print(
        f"roles overlap {shared:.1%} throughput {rate:.0f} tok/s against one {base:.0f} tok/s ratio "
        f"{rate / base:.2f}"
    )
    return int(not equal or shared <= 0)


if __name__ == "__main__":
    sys.exit(main())
