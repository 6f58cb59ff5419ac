"""Definition of the rows of window records."""

import torch
from torch import Tensor


def window_rows(
    slots: Tensor, positions: Tensor, floors: Tensor, entries: int, window: int
) -> tuple[Tensor, Tensor]:
    """See `model.ops.window_rows.window_rows`."""
    oldest = torch.maximum(positions - (window - 1), floors)
    place = oldest[..., None] + torch.arange(window, device=positions.device)
    rows = slots[:, None] * entries + place % entries
    return torch.where(place <= positions[:, None], rows, -1).int(), (positions - oldest + 1).int()
