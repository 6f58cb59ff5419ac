"""Images on their way into the native engine: each goes through the image tower once, not once a turn.

A conversation's later turns repeat the images of the earlier ones. What the tower made of an image is kept
for as long as the caches that were computed with it: until the weights change, when these are recomputed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch import Tensor

from model.engine.errors import ImageError
from model.engine.policy import Policy
from model.images import ImageReader, PreparedImage
from model.policy import Policy as OwnPolicy
from model.vision import ImageTokens
from rl.engines.base import HistoryImages

_KEPT = 64


def image_reader(net: object) -> ImageReader | None:
    """Reads images for a policy that takes some; None for others."""
    if not isinstance(net, OwnPolicy) or net.config.vision is None or net.config.image_token_id is None:
        return None
    return ImageReader.of(net.config)


class ImageRows:
    """Encodes images with one policy; at most `kept` results stay."""

    def __init__(self, policy: Policy, kept: int = _KEPT) -> None:
        self._policy, self._kept = policy, kept
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0

    def of(self, history: HistoryImages) -> ImageTokens | None:
        """Types and rows as the engine takes them; None when there are no images.

        Raises:
            ImageError: The policy has no image tower.
        """
        if not history.images:
            return None
        if self._policy.config.vision is None:
            raise ImageError(
                "the request has images and this policy has no image tower: its configuration lacks "
                "vision_config"
            )
        rows = torch.cat([self._encode(image) for image in history.images])
        return ImageTokens(torch.tensor(list(history.types)), rows)

    def forget(self) -> None:
        """Drops what earlier weights made."""
        self._rows.clear()

    def _encode(self, image: PreparedImage) -> Tensor:
        digest = hashlib.blake2b(image.patches.numpy().tobytes(), digest_size=16)
        key = digest.digest() + repr(image.grid).encode()
        if (known := self._rows.get(key)) is not None:
            self._rows.move_to_end(key)
            return known
        weight = next(iter(self._policy.state_dict().values()))
        with torch.inference_mode():
            rows = self._policy.encode_image(
                image.patches.to(weight.device, weight.dtype), image.grid
            ).clone()
        self.encoded += 1
        self._rows[key] = rows
        while len(self._rows) > self._kept:
            self._rows.popitem(last=False)
        return rows
