"""Everything that serving needs is compiled before the first request, and what compiles later is told.

A kernel takes seconds to compile and a fraction of one to load; in the middle of a rollout each would be a
stall of the whole batch. Decode steps are captured as graphs, prefills run once in each shape that has
kernels of its own: sizes on both sides of every threshold, contexts from one bucket to the next. Choices run
over every number of keys that the sequences of a prefill can hold together, draws with and without limits,
checks of drafts over every number of these.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from model.cache.policy_cache import PolicyCache
from model.cache.progress import Progress
from model.config import AttentionMode
from model.decode_graphs import graphs_of, width_bucket
from model.engine.sampler import SamplingColumns, sample
from model.fused import unserved
from model.layers.exact import exact_mode
from model.ops.candidates import best_blocks
from model.ops.topk import FEW, topk
from model.ops.verification import verification

if TYPE_CHECKING:
    from model.policy import Policy

_log = logging.getLogger(__name__)
_compiled: list[str] = []
_WIDEST = 1 << 22
"""Of more keys groups of groups are chosen from, by the same kernels."""


def compiled() -> dict[str, int]:
    """How many variants of each kernel this process has compiled or loaded so far, by name."""
    return dict(Counter(_compiled))


def _count(*, fn: Any, **_: Any) -> None:
    name = f"{fn.module}.{fn.name.rsplit('.', 1)[-1]}".removeprefix("model.ops.")
    _compiled.append(name)


@contextlib.contextmanager
def late_compiles_told() -> Iterator[None]:
    """Around an engine's step: warns of each kernel that its requests had to wait for."""
    before = len(_compiled)
    yield
    for name in dict.fromkeys(_compiled[before:]):
        _log.warning("%s was compiled for another shape while requests waited", name)


def watch() -> None:
    """Count what Triton compiles from here on; nothing happens without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    if knobs.runtime.jit_post_compile_hook is None:
        knobs.runtime.jit_post_compile_hook = _count


def serves(policy: Policy, cache: PolicyCache) -> bool:
    """Whether a cache's sequences run on kernels."""
    on_kernels = cache.device.type == "cuda" and cache.storage == "packed"
    return on_kernels and policy.config.dtype == "bfloat16" and unserved(policy.config) is None


def warm_up(policy: Any, cache: Any, rows: int, prefill_tokens: int, decode_tokens: int = 1) -> None:
    """Make an empty cache's engine ready for `rows` sequences and prefills of up to `prefill_tokens` a step.

    A prefill is of several sequences where one has no room for as many tokens. A step computes up to
    `decode_tokens` of each sequence: the last one, and drafts.

    Logs a line for each graph and each prefill. Nothing happens where no kernels run.
    """
    if not isinstance(cache, PolicyCache) or not serves(policy, cache):
        return
    watch()
    with torch.inference_mode(cache.tail.is_inference()), torch.no_grad():
        graphs_of(policy, cache).warm_up(rows)
        _prefills(policy, cache, min(prefill_tokens, _whole(cache, rows) * cache.max_tokens))
        before = len(_compiled)
        _choices(policy, cache, rows)
        _draws(policy, cache, rows * decode_tokens)
        _checks(policy, cache, decode_tokens - 1)
        _log.info("choices, draws and checks: %d kernels made ready", len(_compiled) - before)


def sizes(most: int) -> list[int]:
    """Numbers of tokens to run: 1, and on both sides of powers of two, of which the last is `most`."""
    found = {1, most, max(1, most - 1)}
    for power in range(4, most.bit_length()):
        found |= {(1 << power) - 1, 1 << power, (1 << power) + 1}
    return sorted(n for n in found if n <= most)


def contexts(longest: int) -> list[int]:
    """How many tokens a sequence has before a prefill: none, and up to each bucket of contexts."""
    found, width = [0], 0
    while width < longest:
        width = width_bucket(width + 1, longest)
        found.append(width)
    return found


def _whole(cache: PolicyCache, rows: int) -> int:
    """How many of `rows` sequences can be as long as any may be, at the same time."""
    if cache.pages is None:
        return rows
    return min(rows, cache.pages.free_pages // cache.pages.table.shape[1])


def _prefills(policy: Policy, cache: PolicyCache, most: int) -> None:
    started, done = time.monotonic(), 0
    before = len(_compiled)
    plan = [(0, size) for size in sizes(most)]
    most = min(most, cache.max_tokens)
    for context in contexts(cache.max_tokens)[1:]:
        plan += [(context - size, size) for size in (1, min(17, most), most) if context > size]
    for number, (context, size) in enumerate(plan, 1):
        _prefill(policy, cache, context, size)
        done = len(_compiled) - before
        _log.info(
            "prefill %d of %d (%d tokens after %d) after %.1f s, %d kernels made ready",
            *(number, len(plan), size, context, time.monotonic() - started, done),
        )


def _prefill(policy: Policy, cache: PolicyCache, context: int, size: int) -> None:
    """`size` tokens, of one sequence where it has room for them after `context` that are not there."""
    window, longest = policy.config.sliding_window, cache.max_tokens - context
    lengths = [min(longest, size - begin) for begin in range(0, size, longest)]
    floor = max(context - window, 0)
    progress = Progress(context, context, context, floor, floor, context, context)
    taken: list[int] = []
    try:
        for _ in lengths:
            taken.append(cache.take_over(progress) if context else cache.allocate())
        slots = torch.tensor(taken, device=cache.device)
        ids = torch.zeros((len(taken), lengths[0]), dtype=torch.int64, device=cache.device)
        policy.extend(cache, slots, ids, torch.tensor(lengths, device=cache.device))
    finally:
        for slot in taken:
            cache.free(slot)


def _choices(policy: Policy, cache: PolicyCache, rows: int) -> None:
    """Of entries by every number of keys, few and many queries; nothing is visible, so nothing is chosen."""
    modes = AttentionMode.FULL, AttentionMode.REINDEX
    layers = [block.attn for block in policy.blocks if block.attn.mode in modes]
    for k, rule, ratio in dict.fromkeys((a.top_k, a.rule, a.ratio) for a in layers):
        width, most = 64, min(rows * cache.max_tokens // ratio, _WIDEST)
        while width < 2 * most:
            for queries in (1, FEW + 1):
                # Rows that overlap: their stride is one of those that wide loads take.
                shape = (queries, width), (16, 1)
                scores = torch.zeros(16 * queries + width, device=cache.device).as_strided(*shape)
                none = torch.zeros(queries, dtype=torch.int32, device=cache.device)
                topk(scores, k, begins=none, ends=none)
                if rule is not None:
                    topk(scores, k, ends=none)
                    blocks = best_blocks(scores, none, rule.blocks, rule.size)
                    topk(scores, k, ends=none, blocks=blocks, block_size=rule.size)
            width *= 2


def _draws(policy: Policy, cache: PolicyCache, rows: int) -> None:
    """Logits of up to `rows` tokens, and draws, for any number alike: with and without limits."""
    like = policy.norm.weight
    for count in sizes(rows):
        policy.logits(like.new_zeros(count, policy.config.hidden_size))
    logits = torch.zeros(1, policy.config.vocab_size, device=cache.device)
    for limit in (0, 2):
        columns = SamplingColumns.empty(1)
        columns.top_k[:] = limit
        sample(logits, columns, np.zeros(1, np.int64), exact=policy.exact)


def _checks(policy: Policy, cache: PolicyCache, drafts: int) -> None:
    """Drafts, and checks by how many there are."""
    if not drafts or policy.mtp is None or cache.draft is None:
        return
    slot = cache.allocate()
    try:
        rows = torch.tensor([slot], device=cache.device)
        with exact_mode(policy.exact):
            policy.mtp.draft(policy, cache.draft, torch.zeros_like(rows), rows=rows)
    finally:
        cache.free(slot)
    for width in range(drafts + 1):
        logits = torch.zeros(width + 1, policy.config.vocab_size, device=cache.device)
        numbers = torch.zeros(1, width + 1, dtype=torch.int64, device=cache.device)
        chances = numbers.double()
        given = numbers, numbers[:, :width], numbers[:, 0], chances[:, :width], chances[:, 0]
        verification(logits, logits[:width, None], *given)
