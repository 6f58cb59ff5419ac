"""Matrices of experts as they are stored: routed ones in FP4, shared ones as they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.quant.blocks import WIDE_BLOCK
from model.quant.weights import as_pairs, decode_fp4

LARGEST_SCALE = 136
"""Scale byte 2^9: the kernel decodes weights as value * 2^-8, whose scale must be a finite bf16."""


@dataclass(frozen=True, slots=True)
class Stack:
    """E packed matrices [N, K], and S plain ones behind them."""

    codes: Tensor
    """[E, N, K / 2] uint8, two E2M1 codes a byte, as `model.quant.weights.as_words` has them."""
    scales: Tensor
    """[E, N, K / 32] uint8, UE8M0, one a row and 32 columns."""
    plain: Tensor
    """[S, N, K]."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """E + S, N, K."""
        return len(self.codes) + len(self.plain), self.codes.shape[1], self.codes.shape[2] * 2

    def matrix(self, expert: int, dtype: torch.dtype | None = None) -> Tensor:
        """One matrix [N, K], decoded exactly, in the dtype of the plain ones unless told."""
        if expert >= len(self.codes):
            found = self.plain[expert - len(self.codes)]
        else:
            found = decode_fp4(as_pairs(self.codes[expert]), self.scales[expert])
        return found.to(self.plain.dtype if dtype is None else dtype)

    def check(self) -> None:
        """Raise ValueError where shapes or types do not belong together."""
        count, rows, half = self.codes.shape
        fit = 2 * half % WIDE_BLOCK == 0 and self.scales.shape == (count, rows, 2 * half // WIDE_BLOCK)
        bytes_ = self.codes.dtype is self.scales.dtype is torch.uint8
        if not fit or not bytes_ or self.plain.shape[1:] != (rows, 2 * half):
            shapes = [f"{x.dtype} {tuple(x.shape)}" for x in (self.codes, self.scales, self.plain)]
            raise ValueError(f"codes, scales and plain matrices do not belong together: {', '.join(shapes)}")
