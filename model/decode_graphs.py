"""Decode steps as captured graphs: one launch a step instead of hundreds.

A graph serves a bucket of batch sizes and of context lengths. Rows that fill a bucket up repeat its first
row, which writes the same bytes twice. Everything is compiled and captured before the first step that needs
it (`model.engine.warm_up`, or then), never in a steady state.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model.decode import Step, StepInput
from model.layers.exact import exact_mode
from model.ops.hyper_boundary import refresh_projections

if TYPE_CHECKING:
    from model.batch import Trace
    from model.cache.policy_cache import PolicyCache
    from model.policy import Policy

_log = logging.getLogger(__name__)
_SHORTEST = 4096


@dataclass(slots=True)
class _Captured:
    given: StepInput
    output: Tensor
    graph: torch.cuda.CUDAGraph | None


def batch_bucket(rows: int) -> int:
    """The batch size whose graph serves `rows` sequences: a power of two, above 64 a multiple of 32."""
    return 1 << (rows - 1).bit_length() if rows <= 64 else -(-rows // 32) * 32


def width_bucket(tokens: int, longest: int) -> int:
    """The context length whose graph serves `tokens`: 4096 times a power of four, at most `longest`."""
    width = _SHORTEST
    while width < tokens:
        width *= 4
    return min(width, longest)


class DecodeGraphs:
    """The graphs of one cache."""

    def __init__(self, policy: Policy, cache: PolicyCache) -> None:
        self._policy, self._cache = policy, cache
        self._captured: dict[tuple[int, int, bool], _Captured] = {}
        self._pool = None

    @property
    def captures(self) -> int:
        """Graphs captured so far: constant in a steady state."""
        return len(self._captured)

    def captured(self, batch: int, width: int) -> torch.cuda.CUDAGraph:
        """The graph of a batch bucket and context bucket. Raises KeyError when it was not captured."""
        graph = self._captured[batch, width, self._policy.exact].graph
        assert graph is not None
        return graph

    def warm_up(self, rows: int) -> None:
        """Compile and capture for every batch bucket up to `rows` and every context bucket of the cache.

        Takes a slot and a page of the empty cache while it lasts, and logs a line for each graph.
        """
        longest, started = self._cache.max_tokens, time.monotonic()
        batches = sorted({batch_bucket(count) for count in range(1, rows + 1)})
        widths = sorted({width_bucket(_SHORTEST * 4**power, longest) for power in range(16)})
        slot = self._cache.allocate()
        try:
            self._cache.make_room([slot], [1])
            for number, (width, batch) in enumerate(product(widths, batches), 1):
                zeros = [0] * batch
                self._find(self._input([slot] * batch, zeros, zeros, [zeros, zeros]), width)
                _log.info(
                    "decode graph %d of %d (batch %d, context %d) after %.1f s",
                    *(number, len(widths) * len(batches), batch, width, time.monotonic() - started),
                )
        finally:
            self._cache.free(slot)

    def step(
        self,
        slots: Sequence[int],
        token_ids: Tensor,
        positions: Sequence[int],
        floors: Sequence[Sequence[int]],
        trace: Trace | None = None,
    ) -> Tensor:
        """[B, d] the head's input after one token [B] at `positions` of each sequence; `floors` [2][B].

        A traced step runs operation by operation, not as a graph.
        """
        rows = len(slots)
        size = batch_bucket(rows)
        fill = size - rows
        filled = [list(x) + [x[0]] * fill for x in (slots, positions, *floors)]
        ids = torch.cat([token_ids, token_ids[:1].expand(fill)]) if fill else token_ids
        given = self._input(filled[0], ids, filled[1], filled[2:])
        width = width_bucket(max(positions) + 1, self._cache.max_tokens)
        if trace is not None:
            return Step(self._policy, self._cache, given, width, trace).run()[:rows]
        captured = self._find(given, width)
        refresh_projections()
        if captured.graph is None:
            return captured.output[:rows]
        for name in ("slots", "token_ids", "positions", "floors"):
            getattr(captured.given, name).copy_(getattr(given, name))
        captured.graph.replay()
        return captured.output[:rows].clone()

    def _input(
        self,
        slots: Sequence[int],
        ids: Tensor | list[int],
        positions: Sequence[int],
        floors: Sequence[Sequence[int]],
    ) -> StepInput:
        device = self._cache.device
        numbers = torch.tensor([list(slots), list(positions), *map(list, floors)], dtype=torch.int64)
        numbers = numbers.to(device, non_blocking=True)
        tokens = torch.as_tensor(ids, dtype=torch.int64, device=device)
        return StepInput(numbers[0], tokens, numbers[1], numbers[2:])

    def _find(self, given: StepInput, width: int) -> _Captured:
        exact = self._policy.exact
        key = (len(given.slots), width, exact)
        if key not in self._captured:
            # At the start no method of the policy has set the mode yet.
            with exact_mode(exact):
                if not given.slots.is_cuda:
                    return _Captured(given, Step(self._policy, self._cache, given, width).run(), None)
                self._captured[key] = self._capture(given, width)
        return self._captured[key]

    def _capture(self, given: StepInput, width: int) -> _Captured:
        # What the graph reads outlives this call: it must not belong to a caller's inference mode.
        with torch.inference_mode(False):
            static = StepInput(*(getattr(given, name).clone() for name in given.__slots__))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            Step(self._policy, self._cache, static, width).run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = Step(self._policy, self._cache, static, width).run()
        self._pool = self._pool or graph.pool()
        return _Captured(static, output, graph)


def graphs_of(policy: Policy, cache: PolicyCache) -> DecodeGraphs:
    """The graphs of `cache`, made on first use."""
    if not isinstance(cache.step_graphs, DecodeGraphs):
        cache.step_graphs = DecodeGraphs(policy, cache)
    return cache.step_graphs
