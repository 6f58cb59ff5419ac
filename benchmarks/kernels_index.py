"""Rows of the kernels' benchmark for candidate blocks: 1024 queries at the end of contexts of 32K to 256K."""

import torch
from torch import Tensor

from benchmarks import kernel_data as data
from benchmarks.kernel_data import TOPK
from benchmarks.kernel_timing import Row, timed
from model.ops.candidates import best_blocks, topk_in_blocks
from model.ops.candidates import reference as definition
from model.ops.dispatch import reference_only
from model.ops.indexer import index_scores
from model.ops.topk import topk

BLOCKS, SIZE = 2048, 8


def _peer_blocks(scores: Tensor, unseen: Tensor) -> Tensor:
    return scores.masked_fill(unseen, -torch.inf).unflatten(1, (-1, SIZE)).amax(-1).topk(BLOCKS, 1)[1]


def _peer_choice(query: Tensor, keys: Tensor, weights: Tensor, visible: Tensor, blocks: Tensor) -> Tensor:
    scores = index_scores(query, keys, weights, begins=torch.zeros_like(visible), ends=visible)
    kept = definition.members(blocks, SIZE, len(keys))
    return scores.masked_fill_(~kept, -torch.inf).topk(TOPK, 1)[1]


def candidates() -> list[Row]:
    """Making candidate blocks from scores, and choosing among their keys with new scores."""
    rows, count = [], 1024
    for context in (32768, 65536, 262144):
        query, keys = data.mxfp4_values(count, 32, 128).bfloat16(), data.mxfp4_values(context, 128).bfloat16()
        weights = torch.randn(count, 32, device="cuda") * 0.1
        visible = torch.arange(context - count, context, device="cuda").int() + 1
        scores = index_scores(query, keys, weights, begins=torch.zeros_like(visible), ends=visible)
        unseen = torch.arange(context, device="cuda") >= visible[:, None]
        blocks = best_blocks(scores, visible, BLOCKS, SIZE)
        query = query.roll(1, 0)
        given = {"visible": visible, "blocks": blocks, "size": SIZE}
        chosen = topk_in_blocks(query, keys, weights, TOPK, **given)
        again = index_scores(query, keys, weights, begins=torch.zeros_like(visible), ends=visible)
        some = slice(0, count, 16)
        with reference_only():
            right = torch.equal(blocks[some], best_blocks(scores[some], visible[some], BLOCKS, SIZE))
            expected = topk(again[some], TOPK, ends=visible[some], blocks=blocks[some], block_size=SIZE)
            right = right and torch.equal(chosen[some], expected)
        worst = 0.0 if right else float("inf")
        del again
        time = timed(lambda s=scores, v=visible: best_blocks(s, v, BLOCKS, SIZE))
        peer = timed(lambda s=scores, u=unseen: _peer_blocks(s, u))
        what = f"best {BLOCKS} blocks of {count} x {context} scores"
        rows.append(Row(what, time, "us", time, worst, None, "torch masked_fill + amax + topk", peer))
        del scores
        asked = (query, keys, weights)
        time = timed(lambda a=asked, g=given: topk_in_blocks(*a, TOPK, **g))
        peer = timed(lambda a=asked, v=visible, b=blocks: _peer_choice(*a, v, b))
        what = f"scores and top-{TOPK} in these blocks, context {context}"
        rows.append(Row(what, time, "us", time, worst, None, "our scores, torch mask + topk", peer))
    return rows
