"""A prompt with images: its token ids, and what the policy needs to see the pictures among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from model.images import ImageReader, PreparedImage
from model.vision import ImageTokens, TokenType

if TYPE_CHECKING:
    from model.policy import Policy


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with their `TokenType`s, and the images whose spans are among them, in their order."""

    token_ids: list[int]
    types: list[int]
    images: tuple[PreparedImage, ...] = ()

    @staticmethod
    def of_pieces(pieces: Sequence[list[int] | PreparedImage], reader: ImageReader | None) -> Prompt:
        """Joins runs of text ids and images, each image becoming its span."""
        token_ids: list[int] = []
        types: list[int] = []
        images: list[PreparedImage] = []
        for piece in pieces:
            if isinstance(piece, list):
                token_ids += piece
                types += [TokenType.TEXT] * len(piece)
                continue
            assert reader is not None, "an image was read without a reader"
            span = piece.types(reader.vision)
            token_ids += [reader.token_id] * len(span)
            types += span
            images.append(piece)
        return Prompt(token_ids, types, tuple(images))

    def image_tokens(self, policy: Policy) -> ImageTokens | None:
        """Runs the image tower; types [T] and rows for `policy.forward`, or by `part` for `policy.extend`.

        None when there is no image.
        """
        if not self.images:
            return None
        dtype, device = policy.norm.weight.dtype, policy.device
        rows = [policy.encode_image(image.patches.to(device, dtype), image.grid) for image in self.images]
        return ImageTokens(torch.tensor(self.types, device=device), torch.cat(rows))
