"""Image files to patches: sizes, resizing and cutting as the image tower was trained with.

Pixels of a file come from outside, so everything about it is checked before it is decoded: where it lies, its
bytes, its kind, and the size its header claims. Errors (all `ImageError`, a ValueError):

- `ImageNotFound`: no such file, or it is no file
- `ImageTooLarge`: more bytes or pixels than allowed; nothing has been decoded
- `UnsupportedImage`: of another kind than those in `FORMATS`, animated, or to be fetched from the network
- `BrokenImage`: damaged or cut off
- `PillowMissing`: the library that decodes images is not installed
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from model.config import PolicyConfig, VisionConfig
from model.vision import span_types

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_BYTES = 64 << 20
MAX_PIXELS = 64_000_000
_FILL = (127, 127, 127)
_DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


class ImageError(ValueError):
    """An image that cannot be used: what is wrong and what to do."""


class ImageNotFound(ImageError):
    """No such file, or a folder."""


class ImageTooLarge(ImageError):
    """More bytes or pixels than allowed."""


class UnsupportedImage(ImageError):
    """A kind of image or a source that is not read."""


class BrokenImage(ImageError):
    """A damaged image."""


class PillowMissing(ImageError):
    """Pillow is not installed."""


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """One image as the tower takes it: `patches` float32 [h * w, 3, p, p] in -1 .. 1, `grid` (h, w)."""

    patches: Tensor
    grid: tuple[int, int]

    def types(self, vision: VisionConfig) -> list[int]:
        """`TokenType` of each token of the image's span."""
        return span_types(self.grid, vision.downsample_ratio)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads the image parts of messages for one policy, within these limits."""

    vision: VisionConfig
    token_id: int
    """Of every token of an image's span."""
    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS

    @staticmethod
    def of(config: PolicyConfig) -> ImageReader:
        """The reader of a policy's configuration. Raises ImageError when it has no image tower."""
        if config.vision is None or config.image_token_id is None:
            raise UnsupportedImage(
                "this policy takes no images: its configuration lacks vision_config or image_token_id"
            )
        return ImageReader(config.vision, config.image_token_id)

    def read(self, part: Mapping[str, Any]) -> PreparedImage:
        """The image of a content part (see `source_of`). Raises ImageError."""
        return prepare(source_of(part), self.vision, max_bytes=self.max_bytes, max_pixels=self.max_pixels)


def token_count(width: int, height: int, vision: VisionConfig) -> int:
    """Tokens of the span of an image of `width` x `height` pixels (multiples of the patch size)."""
    side = vision.patch_size * vision.downsample_ratio
    return -(-height // side) * (-(-width // side) + 1) + 2


def fitted_size(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """The width and height to which an image is resized.

    It has at least `min_pixels`, both sides are multiples of the patch size, and its span has at most
    `max_image_tokens` tokens (which must be 4 or more). Source: the published preprocessing.
    """
    patch = vision.patch_size
    if vision.max_wh_ratio is not None and width > vision.max_wh_ratio * height:
        width = max(int(vision.max_wh_ratio * height), 1)
    if width * height < vision.min_pixels:
        scale = math.sqrt(vision.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    width, height = -(-width // patch) * patch, -(-height // patch) * patch
    if token_count(width, height, vision) <= vision.max_image_tokens:
        return width, height
    return _shrunk(width, height, vision)


def _shrunk(width: int, height: int, vision: VisionConfig) -> tuple[int, int]:
    """The largest size of the same shape within the token budget; one row or column for extreme shapes."""
    patch, side = vision.patch_size, vision.patch_size * vision.downsample_ratio
    ratio, budget = height / width, vision.max_image_tokens - 2
    # rows * (columns + 1) = budget with rows = ratio * columns, solved for columns.
    columns = math.sqrt(budget / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        return side, budget // 2 * side
    if rows < 1:
        return (budget - 1) * side, side
    scale = min(math.floor(columns) * side / width, math.floor(rows) * side / height)
    # Where one side binds, the other may come out below a patch.
    columns, rows = max(math.floor(width * scale / patch), 1), max(math.floor(height * scale / patch), 1)
    return columns * patch, rows * patch


def prepare(
    source: bytes | str | Path,
    vision: VisionConfig,
    *,
    max_bytes: int = MAX_BYTES,
    max_pixels: int = MAX_PIXELS,
) -> PreparedImage:
    """Read, resize and cut an image.

    Args:
        source: the file's bytes, or its path.
        vision: sizes and limits of the tower.
        max_bytes: largest file.
        max_pixels: largest area a file's header may claim, checked before anything is decoded.

    Raises:
        ImageError: One of its subclasses, see the module docstring.
    """
    try:
        from PIL import ImageOps
    except ImportError as error:
        raise PillowMissing(
            "images need Pillow, which is not installed: pip install 'tempering[images]', or leave them out"
        ) from error
    name, data = _read(source, max_bytes)
    image = _decode(name, data, max_pixels)
    size = fitted_size(*image.size, vision)
    return _cut(np.asarray(ImageOps.pad(image, size, color=_FILL)), vision.patch_size)


def _cut(pixels: np.ndarray, patch: int) -> PreparedImage:
    """[H, W, 3] bytes to patches, row after row."""
    height, width, _ = pixels.shape
    scaled = torch.from_numpy(pixels.astype(np.float32)) / 255 * 2 - 1
    tiles = scaled.view(height // patch, patch, width // patch, patch, 3).permute(0, 2, 4, 1, 3)
    return PreparedImage(tiles.flatten(0, 1).contiguous(), (height // patch, width // patch))


def _read(source: bytes | str | Path, max_bytes: int) -> tuple[str, bytes]:
    """What to call the image in a message, and its bytes."""
    if isinstance(source, bytes):
        name, size = f"the image of {len(source)} bytes", len(source)
    else:
        path = Path(source)
        name, size = f"the image {path}", _file_size(path)
    if size > max_bytes:
        raise ImageTooLarge(f"{name} has {size} bytes, more than {max_bytes}: make it smaller")
    if size == 0:
        raise BrokenImage(f"{name} is empty: write it anew")
    if isinstance(source, bytes):
        return name, source
    try:
        return name, Path(source).read_bytes()
    except OSError as error:
        raise ImageNotFound(f"{name} cannot be read ({error}): check its permissions") from error


def _file_size(path: Path) -> int:
    try:
        if not path.exists():
            raise ImageNotFound(f"there is no image {path}: check the path")
        if not path.is_file():
            raise ImageNotFound(f"{path} is no file: name the image itself")
        return path.stat().st_size
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageNotFound(f"{str(path)!r} cannot be a path ({error}): check it") from error


def _decode(name: str, data: bytes, max_pixels: int) -> Image:
    """An RGB image. Pillow's decoders raise all kinds of errors on damaged data."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise ImageTooLarge(
                    f"{name} claims {width} x {height} pixels, more than {max_pixels}: make it smaller"
                )
            if getattr(image, "is_animated", False):
                raise UnsupportedImage(f"{name} is animated: give one frame as an image of its own")
            return image.convert("RGB")
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLarge(
            f"{name} claims more pixels than can be decoded ({error}): make it smaller"
        ) from error
    except UnidentifiedImageError as error:
        raise UnsupportedImage(
            f"{name} is no {', '.join(FORMATS)} file, or its beginning is damaged: convert it to one of these"
        ) from error
    except Exception as error:  # the decoders share no narrower class
        raise BrokenImage(f"{name} is damaged ({error}): write or fetch it anew") from error


def source_of(part: Mapping[str, Any]) -> bytes | str | Path:
    """Where the image of a message's content part comes from.

    The part is `{"type": "image", "path": ...}`, `{"type": "image", "bytes": ...}`, or
    `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}` (the URL alone will do).

    Raises:
        ImageError: Another shape, or a URL that would have to be fetched.
    """
    found = [key for key in ("path", "bytes", "image_url") if part.get(key) is not None]
    if len(found) != 1:
        raise ImageError(
            f"an image part has one of path, bytes and image_url, this one has {', '.join(found) or 'none'}"
        )
    value = part[found[0]]
    if found[0] == "image_url":
        return _of_url(value.get("url") if isinstance(value, Mapping) else value)
    kinds = (str, Path) if found[0] == "path" else (bytes, bytearray)
    if not isinstance(value, kinds):
        raise ImageError(f"{found[0]} of an image part is not a {type(value).__name__}")
    return bytes(value) if isinstance(value, bytearray) else value


def _of_url(url: Any) -> bytes:
    if not isinstance(url, str):
        raise ImageError(f"image_url holds a URL, not {url!r}")
    head = _DATA_URI.match(url)
    if head is None:
        raise UnsupportedImage(
            f"the image URL {url[:60]!r} is no data:image/...;base64 URL, and nothing is fetched from the "
            "network: fetch the image yourself and give its bytes or its path"
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BrokenImage(f"the image URL is not valid base64 ({error}): encode it anew") from error
