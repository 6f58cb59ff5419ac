"""How much attention the selection loses: recall of the chosen main keys against dense attention.

A layer attends to the main keys that an indexer chose, inside a pool of candidate blocks, and a Reuse layer
to those that another layer chose for itself. Dense attention over every visible main key says what its own
queries would have looked at. Recall is the share of that mass which lies on the keys in question, weighted by
mass, so that tokens that hardly look back count for little.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.batch import PackedTokens
from model.config import AttentionMode, PolicyConfig
from model.diagnostics.capture import AttentionView, visit_attention
from model.layers.indexer import CandidateRule, index_scores
from model.layers.selection import membership
from model.layers.top_k import top_k_lowest_index
from model.policy import Policy


@dataclass(frozen=True, slots=True)
class DistanceRecall:
    """Main keys that end `begin` .. `end` - 1 tokens before the query; `end` None: all beyond."""

    begin: int
    end: int | None
    mass: float
    """Share of a token's attention that dense attention gives to these keys, mean over tokens."""
    selected: float
    """Share of that mass on selected keys."""
    pool: float | None
    """Share of it inside the candidate pool; None where no pool applies."""


@dataclass(frozen=True, slots=True)
class LayerRecall:
    """Recall of one layer with main keys."""

    layer: int
    mode: AttentionMode
    selected_by: int
    """The layer whose selection it uses."""
    tokens: int
    mass: float
    """Share of a token's attention that dense attention gives to main keys, mean over tokens."""
    selected: float
    """Share of that mass on the keys the layer attends to."""
    pool: float | None
    """Share of it inside the candidate pool; None for layers that no pool applies to."""
    best: float
    """Share of it on as many keys as the layer attends to, chosen with hindsight for each token."""
    choices_in_pool: float | None
    """Of what a restricted indexer would choose without the pool, the share that the pool holds."""
    by_distance: tuple[DistanceRecall, ...]

    @property
    def missed(self) -> float:
        """Share of a token's attention that the selection misses."""
        return self.mass * (1 - self.selected)


@dataclass(slots=True)
class _Sums:
    """Running sums of one layer; tensors are by distance bucket, float64."""

    mass: Tensor
    selected: Tensor
    pool: Tensor
    best: float = 0.0
    tokens: int = 0
    wanted: int = 0
    wanted_in_pool: int = 0


def recall(policy: Policy, tokens: PackedTokens) -> tuple[LayerRecall, ...]:
    """Measures every layer with main keys, in one pass over `tokens`."""
    collector = _Collector(policy.config, int(tokens.cu_seqlens.diff().max()))
    visit_attention(policy, tokens, collector.add)
    return tuple(collector.result(layer) for layer in sorted(collector.sums))


def distance_edges(window: int, length: int) -> list[int]:
    """Starts of the distance buckets: 0, then the window's size and its doubles below `length`."""
    edges = [0]
    while max(edges[-1] * 2, window) < length:
        edges.append(max(edges[-1] * 2, window))
    return edges


@dataclass(slots=True)
class _Collector:
    config: PolicyConfig
    length: int
    sums: dict[int, _Sums] = field(default_factory=dict)

    def add(self, view: AttentionView) -> None:
        if self.config.mode(view.layer) is AttentionMode.WINDOW:
            return
        buckets = len(distance_edges(self.config.sliding_window, self.length))
        empty = torch.zeros(buckets, dtype=torch.float64, device=view.query.device)
        sums = self.sums.setdefault(view.layer, _Sums(empty, empty.clone(), empty.clone()))
        assert view.known.selection is not None
        for begin, end in view.chunks():
            selected = ~view.known.selection.main_blocked()[:, begin:end]
            self._add_chunk(sums, view, begin, end, selected)

    def _add_chunk(self, sums: _Sums, view: AttentionView, begin: int, end: int, selected: Tensor) -> None:
        real = view.rows.real[:, begin:end]
        mass = (view.dense_mass(begin, end) * real.unsqueeze(-1)).double()
        pool = self._pool(view, begin, end, mass.shape[-1])
        bucket = self._buckets(view, begin, end, mass.shape[-1])
        for total, kept in ((sums.mass, mass), (sums.selected, mass * selected), (sums.pool, mass * pool)):
            total.index_add_(0, bucket.flatten(), kept.flatten())
        places = min(self.config.index_topk, mass.shape[-1])
        sums.best += float(mass.topk(places, dim=-1).values.sum())
        sums.tokens += int(real.sum())
        self._add_choices(sums, view, begin, end, pool & real.unsqueeze(-1), real)

    def _has_pool(self, layer: int) -> bool:
        source = self.config.candidate_source_layer_id
        return 0 <= source <= layer and self.config.kv_owner(layer) == self.config.kv_owner(source)

    def _pool(self, view: AttentionView, begin: int, end: int, width: int) -> Tensor:
        """[B, C, S] bool: what later layers may select from."""
        blocks = view.known.candidates
        if blocks is None or not self._has_pool(view.layer):
            return torch.ones(
                view.query.shape[0], end - begin, width, dtype=torch.bool, device=view.query.device
            )
        rule = CandidateRule(self.config.candidate_topk_blocks, self.config.candidate_block_size)
        return rule.expand(blocks[:, begin:end], width)

    def _buckets(self, view: AttentionView, begin: int, end: int, width: int) -> Tensor:
        """[B, C, S] number of the distance bucket of each key."""
        device, ratio = view.query.device, view.attention.ratio
        last_tokens = torch.arange(width, device=device) * ratio + ratio - 1
        distance = view.rows.position[:, begin:end, None] - last_tokens
        edges = torch.tensor(distance_edges(self.config.sliding_window, self.length)[1:], device=device)
        return torch.bucketize(distance, edges, right=True)

    def _add_choices(
        self, sums: _Sums, view: AttentionView, begin: int, end: int, pool: Tensor, real: Tensor
    ) -> None:
        """Compares a restricted indexer's free choice with the pool."""
        if not view.attention.restricted or view.asked is None or view.known.index_keys is None:
            return
        scores = index_scores(view.asked, view.known.index_keys.dense(), begin, end)
        allowed = torch.arange(scores.shape[-1], device=scores.device) < view.visible[:, begin:end, None]
        allowed = allowed & real.unsqueeze(-1)
        index = top_k_lowest_index(
            scores.masked_fill(~allowed, -torch.inf), min(self.config.index_topk, scores.shape[-1])
        )
        wanted = membership(index, scores.shape[-1]) & allowed
        sums.wanted += int(wanted.sum())
        sums.wanted_in_pool += int((wanted & pool).sum())

    def result(self, layer: int) -> LayerRecall:
        sums, pooled = self.sums[layer], self._has_pool(layer)
        edges = distance_edges(self.config.sliding_window, self.length)
        ends = [*edges[1:], None]
        columns = zip(
            edges, ends, sums.mass.tolist(), sums.selected.tolist(), sums.pool.tolist(), strict=True
        )
        total = float(sums.mass.sum())
        return LayerRecall(
            layer=layer,
            mode=self.config.mode(layer),
            selected_by=self.config.index_owner(layer),
            tokens=sums.tokens,
            mass=total / max(sums.tokens, 1),
            selected=_share(float(sums.selected.sum()), total),
            pool=_share(float(sums.pool.sum()), total) if pooled else None,
            best=_share(sums.best, total),
            choices_in_pool=_share(sums.wanted_in_pool, sums.wanted)
            if self.config.uses_candidates(layer)
            else None,
            by_distance=tuple(
                DistanceRecall(
                    begin,
                    end,
                    mass / max(sums.tokens, 1),
                    _share(selected, mass),
                    _share(pool, mass) if pooled else None,
                )
                for begin, end, mass, selected, pool in columns
            ),
        )


def _share(part: float, whole: float) -> float:
    """`part` of `whole`; where there is nothing to lose, nothing is lost. Not-a-numbers stay."""
    return 1.0 if whole == 0 else part / whole
