"""Rows of the kernels' benchmark between a layer's products: hyper-connections, norm and rotation."""

import torch
from torch import Tensor

from benchmarks import kernel_bytes
from benchmarks import kernel_data as data
from benchmarks import kernels_peers as peers
from benchmarks.kernel_data import HEADS, WIDTH
from benchmarks.kernel_timing import BYTES, Row, error, timed
from benchmarks.kernels_steps import COPY_BANDWIDTH
from model.ops.hyper_boundary import hyper_boundary
from model.ops.hyper_boundary import reference as boundary_definition
from model.ops.rotary import reference as rotary_definition
from model.ops.rotary import rotary, window_keys


def boundary() -> list[Row]:
    """The hyper-connection boundary of 32K tokens: its time against an ideal one's, and its bytes."""
    row, sizes, ideal = _boundary_time()
    torch.cuda.empty_cache()
    moved, how = kernel_bytes.moved()
    if not moved:
        moved, how = {"update, and coefficients from its result": sizes}, f"by tensors' sizes ({how})"
    total = sum(moved.values())
    large = [f"{kernel[:50]} {size / 1e9:.3f} GB" for kernel, size in moved.items() if size > 0.005 * total]
    note = f"{how}: {', '.join(large)}; ideal {ideal / 1e9:.3f} GB"
    targets = (1.25, 1.1, 1.05)
    return [
        row,
        Row("the same, bytes moved", total / ideal, BYTES, row.time_us, row.error, targets, note=note),
    ]


def _boundary_time() -> tuple[Row, float, float]:
    """The row of its time, the bytes of what its two kernels read and write, and an ideal one's bytes."""
    arguments = kernel_bytes.boundary_arguments()
    count, _, width = arguments[0].shape
    part = slice(1000, 1256)
    with torch.no_grad():
        got = hyper_boundary(*arguments)
        wide = [x[part].double() for x in arguments[:3]] + [x.double() for x in arguments[3:]]
        expected = boundary_definition.hyper_boundary(*wide, eps=1e-6)
        worst = max(error(a[part], b) for a, b in zip(got, expected, strict=True))
        others = [peers.liger_boundary(arguments, got)]
        sizes = float(sum(x.nbytes for x in (*arguments[:2], *got[:2], got[0])))
        del got, expected
        time = timed(lambda: hyper_boundary(*arguments))
        small = [x[:4096] for x in arguments[:3]]
        peer = timed(lambda: boundary_definition.hyper_boundary(*small, *arguments[3:], eps=1e-6)) * 8
    ideal = 10.0 * width * 2 * count
    share = ideal / COPY_BANDWIDTH / time * 1e8
    name, targets = f"hyper-connection boundary, {count} tokens", (55, 63, 75)
    return Row(name, share, "%", time, worst, targets, "eager", peer, others=others), sizes, ideal


def rotation() -> list[Row]:
    """Norm of one key a token and rotation of it and of 64 query heads, 8192 tokens."""
    count = 8192
    values, query = data.normal(count, WIDTH), data.normal(count, HEADS, WIDTH)
    norm, angle = torch.rand(WIDTH, device="cuda") + 0.5, torch.rand(count, 32, device="cuda") * 6
    angles = angle.cos(), angle.sin()

    def run(heads: Tensor) -> tuple[Tensor, Tensor]:
        keys = window_keys(values, norm, *angles, eps=1e-6, rounded=False)
        return keys, rotary(heads, *angles, in_place=True)

    with torch.no_grad():
        got = run(query.clone())
        wide = [t.double() for t in angles]
        expected = rotary_definition.window_keys(values, norm, *angles, eps=1e-6, rounded=False)[0]
        turned = rotary_definition.rotary(query[:512].double(), *(t[:512] for t in wide))
        worst = max(error(got[0], expected), error(got[1][:512], turned))
        others = [peers.liger_norm_rotation(values, query, norm, angles, got)]
        time = timed(lambda: run(query))
        eager = timed(lambda: rotary_definition.rotary(query, *angles))
    name = f"norm and rotation of {count} keys, rotation of their {HEADS} queries"
    return [
        Row(name, time, "us", time, worst, None, "eager rotation of the queries alone", eager, others=others)
    ]
