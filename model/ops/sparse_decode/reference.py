"""Definition of decode attention over packed records: unpack the rows, then one softmax with a sink."""

import torch
from torch import Tensor

from model.ops.records import unpack
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
) -> Tensor:
    """See `model.ops.sparse_decode.sparse_decode`."""
    keys = torch.cat(
        [
            unpack("main", records[indices.clamp(min=0).long()]),
            unpack("window", window[window_indices.clamp(min=0).long()]),
        ],
        1,
    )
    visible = torch.cat([indices, window_indices], 1) >= 0
    out, _ = attend(query.float(), keys, visible, sink.float(), scale)
    return out.to(query.dtype)
