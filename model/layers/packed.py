"""Experts that are held in FP4, as the published checkpoint stores them, for inference."""

from __future__ import annotations

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn

from model.ops.packed_experts import LARGEST_SCALE, Stack
from model.quant.blocks import WIDE_BLOCK
from model.quant.weights import as_words, encode_fp4

ExpertStorage = Literal["plain", "packed"]
"""How a policy holds its routed experts: as trained, or in FP4 for inference."""


class PackedExperts(nn.Module):
    """Routed experts as E2M1 codes with a scale byte per 32 columns, shared ones as plain matrices."""

    def __init__(
        self,
        experts: int,
        shared: int,
        inner: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Unfilled buffers: `w13` [2 f, d] and `w2` [d, f] of each expert, d and f multiples of 32."""
        super().__init__()
        if inner % WIDE_BLOCK or width % WIDE_BLOCK:
            raise ValueError(
                f"experts of width {inner} in a policy of width {width} cannot be packed: both must be "
                f"multiples of {WIDE_BLOCK}, the columns that share a scale"
            )
        for name, rows, columns in (("w13", 2 * inner, width), ("w2", width, inner)):
            for part, shape, kind in (
                ("codes", (experts, rows, columns // 2), torch.uint8),
                ("scales", (experts, rows, columns // WIDE_BLOCK), torch.uint8),
                ("shared", (shared, rows, columns), dtype),
            ):
                self.register_buffer(f"{name}_{part}", torch.empty(shape, dtype=kind, device=device))

    @property
    def weights(self) -> int:
        """How many numbers the matrices stand for."""
        return sum(prod(stack.shape) for stack in (self.w13, self.w2))

    @property
    def w13(self) -> Stack:
        """Gate and up rows."""
        return Stack(self.w13_codes, self.w13_scales, self.w13_shared)  # pyright: ignore

    @property
    def w2(self) -> Stack:
        """The way back."""
        return Stack(self.w2_codes, self.w2_scales, self.w2_shared)  # pyright: ignore

    @torch.no_grad()
    def fill(self, expert: int, w13: Tensor, w2: Tensor) -> None:
        """Round the matrices [2 f, d] and [d, f] of a routed expert, or take those of a shared one.

        Raises:
            ValueError: weights are too large to be packed.
        """
        for stack, matrix in ((self.w13, w13), (self.w2, w2)):
            routed = len(stack.codes)
            if expert >= routed:
                stack.plain[expert - routed].copy_(matrix)
                continue
            codes, scales = encode_fp4(matrix)
            check_scales(scales)
            stack.codes[expert].copy_(as_words(codes))
            stack.scales[expert].copy_(scales)


def check_scales(scales: Tensor) -> None:
    """Raise ValueError where scale bytes are larger than kernels decode."""
    largest = int(scales.max())
    if largest > LARGEST_SCALE:
        raise ValueError(
            f"weights with a scale of 2^{largest - 127} cannot be packed (at most 2^{LARGEST_SCALE - 127}): "
            "load the experts unpacked"
        )
