"""How tokens are laid out by expert, as plain data that kernels and definitions share."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_TOKENS = 16
"""Tokens of a block, of which the router says how many went to each expert."""
TILE_ROWS = 128
"""Rows of an expert that a program multiplies together."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows grouped by expert, tokens in order in a group; shared experts come last and get all."""

    tokens: Tensor
    """[n] int32 token of each row."""
    place: Tensor
    """[T, k + shared] int32 row of each of a token's experts, in the order of its choice."""
    ends: Tensor
    """[E + shared] int32, one past the last row of each expert."""
    tiles: Tensor
    """[most_tiles(...) + 1, 2] int32 expert and first row of each row tile; the expert is -1 beyond the last.
    The last line is how many there are, twice."""


def most_tiles(rows: int, experts: int) -> int:
    """How many tiles of `TILE_ROWS` rows there can be, however `rows` are spread over `experts`."""
    return rows // TILE_ROWS + min(rows, experts)


def row_tiles(ends: Tensor, rows: int) -> Tensor:
    """`Plan.tiles` of `rows` rows that end at `ends` for each expert."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    stops = tiles.cumsum(0)
    slot = torch.arange(most_tiles(rows, len(ends)), device=ends.device)
    expert = torch.searchsorted(stops, slot, right=True)
    real, known = expert < len(ends), expert.clamp(max=len(ends) - 1)
    first = (ends - counts)[known] + (slot - (stops - tiles)[known]) * TILE_ROWS
    table = torch.stack([expert.where(real, -1), first.where(real, 0)], 1)
    return torch.cat([table, stops[-1:].expand(1, 2)]).int()


def block_loads(ids: Tensor, experts: int) -> Tensor:
    """[blocks, E] int32: how many tokens of each block of `BLOCK_TOKENS` chose an expert in `ids` [T, k]."""
    block = torch.arange(len(ids), device=ids.device) // BLOCK_TOKENS
    loads = ids.new_zeros((-(-len(ids) // BLOCK_TOKENS), experts), dtype=torch.int32)
    at = (block[:, None] * experts + ids).flatten()
    loads.view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    return loads


def shape_of(weight: Tensor, back: bool, pair: bool, columns: int) -> tuple[int, int, int]:
    """Depth of the sums, width of the result, and how much of it a tile makes of `columns` products.

    Of rows times matrices of `weight` [G, N, K], or times the matrices as they are if `back`; a `pair` of
    products, gate and up, makes one element.
    """
    _, height, width = weight.shape
    depth, products = (height, width) if back else (width, height)
    return (depth, products // 2, columns // 2) if pair else (depth, products, columns)
