"""Where the window records lie that the tokens of a decode step see."""

from torch import Tensor

from model.ops.dispatch import use_kernel
from model.ops.window_rows import reference

__all__ = ["window_rows"]


def window_rows(
    slots: Tensor, positions: Tensor, floors: Tensor, *, entries: int, window: int
) -> tuple[Tensor, Tensor]:
    """Rows of the window records that each token sees, and how many there are.

    Token b at position p sees positions max(p - window + 1, floor) .. p; that of position q lies in row
    slots[b] * entries + q % entries.

    Args:
        slots: [B] int64 of the sequences.
        positions: [B] int64 of the tokens.
        floors: [F, B] int64 first visible positions, one set a kind of layer.
        entries: records of a slot.
        window: positions of a full window.

    Returns:
        [F, B, window] int32, oldest first and -1 at the end, and [F, B] int32.
    """
    if use_kernel("window_rows", positions):
        from model.ops.window_rows import triton

        return triton.window_rows(slots, positions, floors, entries, window)
    return reference.window_rows(slots, positions, floors, entries, window)
