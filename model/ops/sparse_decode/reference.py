"""Definition of decode attention over packed records: unpack the rows, then one softmax with a sink."""

import torch
from torch import Tensor

from model.ops.records import unpack
from model.ops.rotary.reference import rotary
from model.ops.sparse_attention.reference import attend


def decode(
    query: Tensor,
    records: Tensor,
    indices: Tensor,
    window: Tensor,
    window_indices: Tensor,
    sink: Tensor,
    *,
    scale: float,
    rope: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """See `model.ops.sparse_decode.sparse_decode`."""
    if rope is not None:
        query = rotary(query, *rope)
    keys = torch.cat(
        [
            unpack("main", records[indices.clamp(min=0).long()]),
            unpack("window", window[window_indices.clamp(min=0).long()]),
        ],
        1,
    )
    visible = torch.cat([indices, window_indices], 1) >= 0
    out, _ = attend(query.float(), keys, visible, sink.float(), scale)
    out = out.to(query.dtype)
    return out if rope is None else rotary(out, rope[0], -rope[1])
