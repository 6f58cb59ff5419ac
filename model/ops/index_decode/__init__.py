"""Index scores of decoded tokens, read from the packed index keys: 68 bytes a key and nothing unpacked.

The scan is the only part of a decode step that grows with the context.
"""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.index_decode import reference
from model.ops.records import channels

__all__ = ["decode_scores"]


def decode_scores(
    query: Tensor,
    weights: Tensor,
    records: Tensor,
    table: Tensor,
    ends: Tensor,
    *,
    width: int,
    page_groups: int,
    blocks: Tensor | None = None,
    block_size: int = 8,
    factor: float = 1.0,
) -> Tensor:
    """Scores, in fp32: sum_h weights[h] * relu(query[h] . key), minus infinity where a row sees no key.

    Args:
        query: [B, H, D] bf16.
        weights: [B, H] fp32, or bf16: then they are rounded once more when multiplied by `factor`.
        records: [R, 17 D / 32] uint8, index records of all pages.
        table: [B, P] int64 pages of each row's sequence.
        ends: [B] int32 keys each row sees.
        width: columns of the result.
        page_groups: records on a page.
        blocks: [B, C] int32 numbers of `block_size` neighbouring keys, -1 for none: column c then stands
            for key blocks[c // block_size] * block_size + c % block_size. None: for key c.
        block_size: keys of a block.
        factor: of the weights.
    """
    if channels(records, "index") != query.shape[-1] or weights.shape != query.shape[:2]:
        raise ValueError(
            f"query {tuple(query.shape)}, weights {tuple(weights.shape)} and records "
            f"{tuple(records.shape)} must agree in heads and width"
        )
    options = {"width": width, "page_groups": page_groups, "blocks": blocks, "block_size": block_size}
    options["factor"] = factor
    if use_kernel("decode_scores", query):
        from model.ops.index_decode import triton

        return triton.decode_scores(query, weights, records, table, ends, **options)
    return reference.decode_scores(query, weights, records, table, ends, **options)
