"""Definition of candidate blocks and of the choice among their keys."""

import torch
from torch import Tensor

from model.ops.indexer.reference import index_scores
from model.ops.topk.reference import topk

_CHUNK = 256


def block_maxima(scores: Tensor, visible: Tensor, size: int) -> Tensor:
    """Largest visible score [T, blocks] of each block; that of the newest visible key gets infinity."""
    width = scores.shape[1]
    count = -(-width // size)
    seen = (torch.arange(width, device=scores.device) < visible[:, None]) & (scores > -torch.inf)
    masked = torch.where(seen, scores, -torch.inf)
    padded = torch.nn.functional.pad(masked, (0, count * size - width), value=-torch.inf)
    best = padded.unflatten(-1, (count, size)).amax(-1)
    newest = torch.div(visible - 1, size, rounding_mode="floor")[:, None]
    return best.masked_fill(torch.arange(count, device=scores.device) == newest, torch.inf)


def members(blocks: Tensor, size: int, width: int) -> Tensor:
    """[T, width] bool: keys of the listed blocks."""
    count = -(-width // size)
    held = torch.zeros(len(blocks), count + 1, dtype=torch.bool, device=blocks.device)
    held.scatter_(1, torch.where(blocks >= 0, blocks, count).long(), True)
    return held[:, :count].repeat_interleave(size, 1)[:, :width]


def topk_in_blocks(
    query: Tensor, keys: Tensor, weights: Tensor, k: int, *, visible: Tensor, blocks: Tensor, size: int
) -> Tensor:
    """See `model.ops.candidates.topk_in_blocks`."""
    chosen = []
    for q, w, v, b in zip(*(x.split(_CHUNK) for x in (query, weights, visible, blocks)), strict=True):
        scores = index_scores(q, keys, w).masked_fill_(~members(b, size, len(keys)), -torch.inf)
        chosen.append(topk(scores, k, ends=v))
    return torch.cat(chosen)
