"""Times of the policy on a GPU: training, prefill, decoding, and the kernels that a layer launches."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.model_gpu_setup import cache_of, fill
from model.cache.policy_cache import PolicyCache
from model.decode import Step, StepInput
from model.decode_graphs import graphs_of, width_bucket
from model.engine.sampler import SamplingColumns, sample
from model.ops.linear_logprob import linear_logprob
from model.policy import PackedTokens, Policy


def median(run: Callable[[], object], repeat: int = 5, warm: int = 2) -> float:
    """Median seconds."""
    for _ in range(warm):
        run()
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeat // 2]


def train_step(policy: Policy, tokens: int, documents: int) -> float:
    """Seconds of forward, loss, backward and a fused AdamW update."""
    ids = torch.randint(0, policy.config.vocab_size, (tokens,), device="cuda")
    packed = PackedTokens(ids, torch.arange(documents + 1, device="cuda") * (tokens // documents))
    tables = {id(block.engram.embed.weight) for block in policy.blocks if block.engram is not None}
    dense = [p for p in policy.parameters() if id(p) not in tables]
    optimizer = torch.optim.AdamW(dense, lr=1e-6, fused=True)

    def step() -> None:
        hidden = policy(packed).hidden
        head: Tensor = policy.head.weight  # pyright: ignore[reportAssignmentType]
        logprob, *_ = linear_logprob(hidden[:-1], head, ids[1:], exact=policy.exact)
        (-logprob.mean()).backward()
        optimizer.step()
        policy.zero_grad(set_to_none=True)

    gc.collect()
    return median(step, 3, 2)


def operations(policy: Policy, tokens: int) -> float:
    """Useful operations of a training step on one document: 6 a weight met, attention and index scores."""
    c = policy.config
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    met = sum(
        p.numel()
        for name, p in policy.named_parameters()
        if p.dim() == 2 and not name.startswith("embed") and "engram.embed" not in name
    )
    met += c.num_hidden_layers * (c.num_experts_per_tok + c.n_shared_experts) * expert
    attention = index = 0.0
    for layer in range(c.num_hidden_layers):
        ratio = c.ratio(layer)
        seen = c.sliding_window
        if ratio:
            seen += min(c.index_topk, tokens / ratio / 2)
        attention += 14 * c.num_attention_heads * c.head_dim * seen
        if layer in c.index_source_layer_ids:
            index += 2 * c.index_n_heads * c.index_head_dim * tokens / ratio / 2
    return tokens * (6 * met + attention + index)


@torch.no_grad()
def prefill(policy: Policy, tokens: int, decoded: int | None) -> float:
    """Seconds to prefill a prompt, the decoder running its last `decoded` tokens (None: all)."""
    cache = cache_of(policy, 1, tokens)
    ids = torch.randint(0, policy.config.vocab_size, (1, tokens), device="cuda")
    start = None if decoded is None else torch.tensor([tokens - decoded])

    def run() -> None:
        slot = cache.allocate()
        slots = torch.tensor([slot], device="cuda")
        policy.extend(cache, slots, ids, torch.tensor([tokens]), decode_from=start)
        cache.free(slot)

    return median(run, 3, 1)


def _steps(policy: Policy, batch: int, tokens: int) -> tuple[PolicyCache, Callable[[], Tensor]]:
    """A cache of `batch` sequences of `tokens`, and a decode step that may be repeated."""
    cache = cache_of(policy, batch, tokens)
    slots = fill(policy, cache, batch, tokens)
    ids = torch.randint(0, policy.config.vocab_size, (batch,), device="cuda")
    floors = [[0] * batch, [max(tokens - 128, 0)] * batch]
    cache.make_room(slots, [1] * batch)
    return cache, lambda: graphs_of(policy, cache).step(slots, ids, [tokens] * batch, floors)


@torch.no_grad()
def decode(policy: Policy, batch: int, tokens: int) -> float:
    """Seconds of a decode step's graph for `batch` sequences of `tokens` each."""
    cache, step = _steps(policy, batch, tokens)
    step()
    captured = graphs_of(policy, cache).captured(batch, width_bucket(tokens + 1, cache.max_tokens))
    return median(captured.replay, 9, 3)


@torch.no_grad()
def sampler_step(policy: Policy, batch: int, tokens: int) -> float:
    """Seconds of a decode step, the head, and a draw for each of `batch` sequences of `tokens`."""
    _, step = _steps(policy, batch, tokens)
    columns, places = SamplingColumns.empty(batch), np.full(batch, tokens)
    return median(lambda: sample(policy.logits(step()), columns, places, exact=policy.exact), 9, 3)


def launches(run: Callable[[], object]) -> list[tuple[str, float]]:
    """Names of the kernels that a call launches, in order, and their microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    kernels = [e for e in profile.events() if e.device_type == on_device and not e.name.startswith("Mem")]
    return [(e.name, e.device_time) for e in sorted(kernels, key=lambda e: e.time_range.start)]


def of_a_layer(names: list[tuple[str, float]], layer: int) -> list[str]:
    """The kernels of a layer: those after the layer before has updated the streams, to its own update."""
    updates = [at for at, (name, _) in enumerate(names) if name == "_update"]
    return [name for name, _ in names[updates[2 * layer - 1] + 1 : updates[2 * layer + 1] + 1]]


PARTS = {
    "experts": ("_few", "_expert", "_route", "_place", "_swiglu", "_grouped", "_specialised"),
    "products": ("nvjet", "splitK", "gemm", "_product", "cublas"),
    "norm, rotation, packing": (
        "_rotary",
        "_window",
        "_pack",
        "_index",
        "layer_norm",
        "_unpack",
        "_latents",
        "vectorized_layer",
    ),
    "attention": ("_decode", "_forward", "_joint_rows"),
    "index scan": ("_scores",),
    "top-k": ("_select", "_maxima", "_rows"),
    "hyper-connections": ("_coefficients", "_update", "_input"),
}


def split(names: list[tuple[str, float]]) -> dict[str, float]:
    """Milliseconds by part of the step."""
    found = dict.fromkeys([*PARTS, "other"], 0.0)
    for name, microseconds in names:
        part = next((p for p, marks in PARTS.items() if any(mark in name for mark in marks)), "other")
        found[part] += microseconds / 1000
    return found


@torch.no_grad()
def step_alone(policy: Policy, cache: PolicyCache, slots: list[int], tokens: int) -> Callable[[], Tensor]:
    """A decode step without a graph, for the profiler."""
    batch = len(slots)
    numbers = torch.tensor(
        [slots, [tokens] * batch, [0] * batch, [max(tokens - 128, 0)] * batch], device="cuda"
    )
    given = StepInput(numbers[0], torch.full_like(numbers[0], 5), numbers[1], numbers[2:])
    cache.make_room(slots, [1] * batch)

    def run() -> Tensor:
        with torch.no_grad():
            return Step(policy, cache, given, cache.max_tokens).run()

    run()
    return run
