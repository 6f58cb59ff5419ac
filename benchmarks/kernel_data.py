"""Inputs at official shapes for the kernels' benchmark and device tests: random every time, never zeros."""

from dataclasses import dataclass

import torch
from torch import Tensor

HEADS, WIDTH, TOPK, WINDOW = 64, 512, 512, 128
SCALE = WIDTH**-0.5


@dataclass(frozen=True)
class Attention:
    """Arguments of `sparse_attention` and a gradient of its output."""

    query: Tensor
    entries: Tensor
    indices: Tensor
    window: Tensor
    first: Tensor
    sink: Tensor
    grad: Tensor


def normal(
    *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, device: str = "cuda"
) -> Tensor:
    """Normal random numbers, made in place so that large tensors need no second copy."""
    out = torch.empty(shape, device=device, dtype=dtype)
    for part in out.view(-1).split(1 << 27):
        part.normal_(0, scale)
    return out


def selection(queries: int, entries: int, kind: str, topk: int = TOPK, device: str = "cuda") -> Tensor:
    """Distinct ascending rows [T, K]: "random", or "drift" (64 neighbouring queries share 80 %)."""
    picks = torch.randint(0, entries, (queries, 2 * topk), device=device)
    if kind == "drift":
        base = torch.randint(0, entries, (queries // 64 + 1, 2 * topk), device=device)
        base = base.repeat_interleave(64, 0)[:queries]
        picks = torch.where(torch.rand(queries, 2 * topk, device=device) < 0.2, picks, base)
    ordered = picks.sort(1).values
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    place = torch.rand(ordered.shape, device=device).masked_fill(~fresh, 2.0).argsort(1)[:, :topk]
    return ordered.gather(1, place).sort(1).values.int()


def attention(
    queries: int,
    entries: int,
    kind: str = "random",
    *,
    heads: int = HEADS,
    width: int = WIDTH,
    topk: int = TOPK,
) -> Attention:
    """A packed batch of two sequences; the first rows select fewer entries than K."""
    indices = selection(queries, entries, kind, topk)
    indices[:8, 1:] = -1
    token = torch.arange(queries, device="cuda", dtype=torch.int32)
    first = torch.where(token < queries // 3, 0, queries // 3).int()
    return Attention(
        query=normal(queries, heads, width),
        entries=normal(entries, width),
        indices=indices,
        window=normal(queries, width),
        first=first,
        sink=normal(heads, dtype=torch.float32),
        grad=normal(queries, heads, width),
    )


@dataclass(frozen=True)
class Decode:
    """Arguments of `sparse_decode`."""

    query: Tensor
    records: Tensor
    indices: Tensor
    window: Tensor
    window_indices: Tensor
    sink: Tensor


def main_records(count: int, width: int = WIDTH) -> Tensor:
    """Random codes, every one of the 16; scales of about 0.06 to 1 with some of the smallest."""
    records = torch.randint(0, 256, (count, width * 9 // 16), device="cuda", dtype=torch.uint8)
    records[:, width // 2 :] = torch.randint(40, 72, (count, width // 16), device="cuda", dtype=torch.uint8)
    records[:, width // 2 + 1] = 1
    records[:, width // 2 + 2] = 7
    return records


def window_records(count: int, width: int = WIDTH) -> Tensor:
    """Normal values at scales of 2^-9 to 2^-5."""
    values = (torch.randn(count, width, device="cuda") * 60).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.randint(118, 122, (count, width // 32), device="cuda", dtype=torch.uint8)
    return torch.cat([values, scales], 1)


def decode(batch: int, context: int, records: Tensor) -> Decode:
    """Queries of `batch` sequences with `context` entries each, in one pool; the first one is short."""
    offset = torch.arange(batch, device="cuda", dtype=torch.int32)[:, None]
    indices = selection(batch, context, "random") + offset * context
    window_indices = offset * WINDOW + torch.arange(WINDOW, device="cuda", dtype=torch.int32)
    if batch > 1:
        indices[0, 3:] = -1
        window_indices[0, 5:] = -1
    return Decode(
        query=normal(batch, HEADS, WIDTH),
        records=records,
        indices=indices,
        window=window_records(batch * WINDOW),
        window_indices=window_indices,
        sink=normal(HEADS, dtype=torch.float32),
    )


def mxfp4_values(*shape: int) -> Tensor:
    """Values that E2M1 with power-of-two scales can hold, exact in bf16 and in E4M3; fp32."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda")
    scale = torch.exp2(torch.randint(-3, 1, (*shape[:-1], shape[-1] // 32), device="cuda").float())
    return table[torch.randint(0, 16, shape, device="cuda")] * scale.repeat_interleave(32, -1)


def gathered_attention(query: Tensor, table: Tensor, rows: Tensor, sink: Tensor) -> Tensor:
    """The peer: gather rows, two batched products and a softmax with the sink as a column."""
    parts = []
    for q, i in zip(query.split(512), rows.split(512), strict=True):
        keys = table[i.clamp(min=0).long()]
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * SCALE
        scores = scores.masked_fill((i < 0)[:, None], float("-inf"))
        scores = torch.cat([scores, sink[None, :, None].expand(len(q), -1, 1)], 2)
        parts.append(torch.bmm(torch.softmax(scores, 2)[..., :-1].to(q.dtype), keys))
    return torch.cat(parts)
