"""Images: from patches to rows of the embedding, and where in a sequence they go.

An image span is `[start] + ([image] * columns + [newline]) * rows + [end]`; all its tokens have the image
token id and are told apart by their type. `model.images` resizes an image file and cuts it into patches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import PolicyConfig, VisionConfig
from model.layers.norm import RMSNorm

_NORM_EPS = 1e-6


class TokenType(IntEnum):
    """What a token stands for."""

    TEXT = -1
    START = 0
    IMAGE = 1
    NEWLINE = 2
    END = 3


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The images among some tokens."""

    types: Tensor
    """`TokenType` of each token, of the shape of the token ids."""
    rows: Tensor
    """[M, d] aligner rows of the tokens of type IMAGE, in their order."""

    def part(self, begin: int, end: int) -> ImageTokens:
        """The images among tokens `begin` .. `end` of a sequence (types [T]); spans may be cut anywhere."""
        first, last = (int((self.types[:stop] == TokenType.IMAGE).sum()) for stop in (begin, end))
        return ImageTokens(self.types[begin:end], self.rows[first:last])


def span_types(grid: tuple[int, int], downsample: int) -> list[int]:
    """Types of the tokens of an image of `grid` (rows, columns) patches."""
    rows, columns = (-(-side // downsample) for side in grid)
    line = [TokenType.IMAGE] * columns + [TokenType.NEWLINE]
    return [TokenType.START, *(line * rows), TokenType.END]


def patch_angles(grid: tuple[int, int], head_dim: int, theta: float) -> Tensor:
    """[patches, head_dim / 2] rotation angles: first by row, then by column of the patch grid."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2))
    row, column = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    return torch.cat([place.flatten().float()[:, None] * frequencies for place in (row, column)], dim=-1)


def _rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Turn channel k with channel k + c / 2, in float32; x [patches, heads, c]."""
    first, second = x.float().chunk(2, dim=-1)
    cosine, sine = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


class VisionAttention(nn.Module):
    """Full attention among the patches of one image."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, dtype=dtype)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[patches, d] to [patches, d]."""
        query, key, value = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        query, key = _rotate_halves(query, angles), _rotate_halves(key, angles)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        return self.wo(F.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1).flatten(1))


class VisionMLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False, dtype=dtype)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[patches, d] to [patches, d]."""
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size, _NORM_EPS, dtype)
        self.attn = VisionAttention(config, dtype)
        self.norm2 = RMSNorm(config.hidden_size, _NORM_EPS, dtype)
        self.mlp = VisionMLP(config, dtype)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """[patches, d] to [patches, d]."""
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class VisionTower(nn.Module):
    """Patches of one image to features."""

    def __init__(self, config: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Linear(3 * config.patch_size**2, config.hidden_size, dtype=dtype)
        self.blocks = nn.ModuleList(VisionBlock(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, _NORM_EPS, dtype)

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """[h * w, 3, p, p] in -1 .. 1, row after row, to [h * w, d]."""
        projection: nn.Module = self.patch_embed.proj  # pyright: ignore[reportAssignmentType]
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        angles = patch_angles(grid, head_dim, self.config.rope_theta).to(patches.device)
        x = projection(patches.flatten(1))
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)


class Aligner(nn.Module):
    """Features of neighbouring patches joined and brought to the policy's width."""

    def __init__(self, config: PolicyConfig, vision: VisionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.side = vision.downsample_ratio
        self.w1 = nn.Linear(vision.hidden_size * self.side**2, config.hidden_size, dtype=dtype)
        self.w2 = nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype)

    def forward(self, features: Tensor, grid: tuple[int, int]) -> Tensor:
        """[h * w, d_v] to [ceil(h / side) * ceil(w / side), d], missing patches being zero."""
        rows, columns = grid
        image = features.view(rows, columns, -1).permute(2, 0, 1)
        image = F.pad(image, (0, -columns % self.side, 0, -rows % self.side))
        # Channel-major: channel, then row and column inside the square.
        tiles = image.unflatten(1, (-1, self.side)).unflatten(3, (-1, self.side)).permute(1, 3, 0, 2, 4)
        return self.w2(F.gelu(self.w1(tiles.flatten(2).flatten(0, 1))))


def place_images(embedded: Tensor, images: ImageTokens, marks: Mapping[TokenType, Tensor]) -> Tensor:
    """[T, d] with the rows of image spans replaced; `marks` are the learned rows of the other types."""
    expected = int((images.types == TokenType.IMAGE).sum())
    if images.rows.shape[0] != expected:
        raise ValueError(
            f"there are {expected} tokens of type IMAGE and {images.rows.shape[0]} image rows: encode the "
            "images of these very tokens"
        )
    embedded = embedded.clone()
    for kind, row in marks.items():
        embedded[images.types == kind] = row
    embedded[images.types == TokenType.IMAGE] = images.rows.to(embedded.dtype)
    return embedded
