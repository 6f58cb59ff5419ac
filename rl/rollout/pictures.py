"""Images of a turn between their forms: tensors (chat format, engine) and `envs.types.Images`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from envs.types import Images
from model.images import PreparedImage
from model.vision import TokenType
from rl.engines.base import HistoryImages
from rl.rollout.recorded import pack, unpack


def images_of(types: Sequence[int], images: Sequence[PreparedImage]) -> Images | None:
    """The record of the images in a prompt whose tokens have these types; None: there are none."""
    if not images:
        return None
    patches = tuple(pack(image.patches.numpy(), "f4") for image in images)
    return Images(pack(np.array(types), "i1"), patches, tuple(image.grid for image in images))


def last_images(types: Sequence[int], images: Sequence[PreparedImage], tokens: int) -> Images | None:
    """As `images_of`, for the last `tokens` tokens of a history."""
    part = list(types[len(types) - tokens :])
    count = part.count(int(TokenType.START))
    return images_of(part, images[len(images) - count :])


def prepared(images: Images) -> list[PreparedImage]:
    """The images of a record as tensors."""
    return [
        PreparedImage(torch.from_numpy(unpack(patches).copy()), grid)
        for patches, grid in zip(images.patches, images.grids, strict=True)
    ]


def history_images(parts: Sequence[tuple[int, Images | None, int]]) -> HistoryImages | None:
    """The images of a history of turns, each given as its prompt's tokens, images, and sampled tokens."""
    if all(images is None for _, images, _ in parts):
        return None
    types: list[int] = []
    found: list[PreparedImage] = []
    for prompt, images, sampled in parts:
        if images is None:
            types += [int(TokenType.TEXT)] * prompt
        else:
            types += unpack(images.types).tolist()
            found += prepared(images)
        types += [int(TokenType.TEXT)] * sampled
    return HistoryImages(types, found)
