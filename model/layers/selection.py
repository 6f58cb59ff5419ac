"""Which compressed keys each token attends to, in the two forms attention wants: a mask or a list."""

from __future__ import annotations

import torch
from torch import Tensor

from model.choices import FREE, force
from model.layers.attend import as_bias


class Selection:
    """Of `width` main keys of each row, the ones a token selected.

    `index` [B, L, K] holds positions among the main keys, -1 for an unused place, in any order; None stands
    for every visible key. `visible` [B, L] is the number of keys that end at or before a token.
    """

    def __init__(self, visible: Tensor, width: int, index: Tensor | None) -> None:
        self.visible, self.width, self.index = visible, width, index
        self._bias: Tensor | None = None

    def listed(self, begin: int, end: int) -> Tensor:
        """[B, end - begin, K] the selection of some columns as a list; -1 for an unused place."""
        if self.index is not None:
            return self.index[:, begin:end]
        every = torch.arange(self.width, device=self.visible.device)
        return torch.where(every < self.visible[:, begin:end, None], every, -1)

    def sorted_index(self, places: int) -> Tensor:
        """[B, L, places] ascending, -1 at the end."""
        listed = self.listed(0, self.visible.shape[1])
        ascending = listed.masked_fill(listed < 0, self.width).sort(dim=-1).values
        padded = torch.nn.functional.pad(
            ascending, (0, max(places - ascending.shape[-1], 0)), value=self.width
        )
        return padded.masked_fill(padded == self.width, -1)

    def forced(self, index: Tensor | None, places: int) -> Selection:
        """This selection with the rows of `index` [B, L, K] in place of its own where those hold a number."""
        if index is None:
            return self
        if index.shape[-1] > places or bool((index >= self.visible.unsqueeze(-1)).any()):
            raise ValueError(
                f"a forced selection holds more than {places} keys, or a key that its token cannot see yet: "
                "record selections over the same tokens, with the same configuration"
            )
        padded = torch.nn.functional.pad(index, (0, places - index.shape[-1]), value=FREE)
        return Selection(self.visible, self.width, force(self.sorted_index(places), padded))

    def bias_with(self, window_blocked: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, L, window keys + width] over [window, main] keys: 0, or -inf where a key must not be seen."""
        if self._bias is None:
            self._bias = as_bias(self.blocked_with(window_blocked), dtype)
        return self._bias

    def blocked_with(self, window_blocked: Tensor) -> Tensor:
        """The same as a mask, true where a key must not be seen."""
        batch, length = self.visible.shape
        return torch.cat([window_blocked.expand(batch, length, -1), self.main_blocked()], dim=-1)

    def main_blocked(self) -> Tensor:
        """[B, L, width] mask over the main keys alone."""
        if self.index is None:
            return torch.arange(self.width, device=self.visible.device) >= self.visible.unsqueeze(-1)
        return ~membership(self.index, self.width)


def membership(index: Tensor, width: int) -> Tensor:
    """[..., width] bool, true at the positions listed in `index` [..., K]; -1 is no position."""
    member = torch.zeros(*index.shape[:-1], width + 1, dtype=torch.bool, device=index.device)
    return member.scatter_(-1, index + 1, True)[..., 1:]
