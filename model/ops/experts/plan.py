"""How tokens are laid out by expert, as plain data that kernels and definitions share."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows grouped by expert, tokens in order in a group; shared experts come last and get all."""

    tokens: Tensor
    """[n] int32 token of each row."""
    place: Tensor
    """[T, k + shared] int32 row of each of a token's experts, in the order of its choice."""
    ends: Tensor
    """[E + shared] int32, one past the last row of each expert."""
