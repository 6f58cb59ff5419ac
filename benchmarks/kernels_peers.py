"""What other libraries offer for our kernels' work, called as their users call it.

FlexAttention comes with PyTorch; Liger and tilelang are optional (`pip install 'tempering[peers]'`), and a
row names the one that is missing. A result is compared with ours before it is timed.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from benchmarks import kernel_data as data
from benchmarks import kernel_tilelang
from benchmarks.kernel_data import SCALE, WINDOW
from benchmarks.kernel_timing import Peer, error, measured, peak, timed

FLEX_OPTIONS = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 1,
    "fwd_num_warps": 8,
    "BLOCK_M1": 32,
    "BLOCK_N1": 32,
    "BLOCK_M2": 32,
    "BLOCK_N2": 32,
    "bwd_num_stages": 2,
    "bwd_num_warps": 8,
}
"""The fastest of the tiles tried at 512 channels; in the backward far faster than PyTorch's own choice."""


def checked(got: Tensor, expected: Tensor, tolerance: float = 2e-2) -> None:
    """Raises ValueError when a peer's result is not ours."""
    found = error(got, expected)
    if not found < tolerance:
        raise ValueError(f"its result differs by {found:.1e}")


def sdpa_attention(query: Tensor, table: Tensor, rows: Tensor, sink: Tensor) -> Tensor:
    """Gather rows, then PyTorch's SDPA; the sink is a key of zeros whose bias is its logit."""
    parts, (keys, heads) = [], (rows.shape[1], query.shape[1])
    for q, i in zip(query.split(512), rows.split(512), strict=True):
        gathered = F.pad(table[i.clamp(min=0).long()], (0, 0, 0, 8))[:, None]
        bias = torch.full((len(q), heads, keys + 8), float("-inf"), device=q.device, dtype=q.dtype)
        bias[..., :keys].masked_fill_((i >= 0)[:, None], 0.0)
        bias[..., keys] = sink.to(q.dtype)
        out = F.scaled_dot_product_attention(q[:, None], gathered, gathered, bias[:, None], scale=SCALE)
        parts.append(out[:, 0])
    return torch.cat(parts)


def tilelang_attention(query: Tensor, table: Tensor, rows: Tensor, sink: Tensor, ours: Tensor) -> Peer:
    """Forward over the same rows by a kernel written in tilelang."""

    def time() -> float:
        rows_int = rows.int().contiguous()
        checked(kernel_tilelang.sparse_attention(query, table, rows_int, sink, SCALE), ours)
        return timed(lambda: kernel_tilelang.sparse_attention(query, table, rows_int, sink, SCALE))

    return measured("tilelang", time)


def _flex() -> Callable[..., Tensor]:
    """Compiled attention of [T, H, D] over a table [R, D] with a mask and a sink, by FlexAttention."""

    def attend(query: Tensor, table: Tensor, mask: BlockMask, sink: Tensor) -> Tensor:
        key = table[None, None]
        out, more = flex_attention(  # pyright: ignore[reportGeneralTypeIssues]
            query.transpose(0, 1)[None],
            key,
            key,
            block_mask=mask,
            scale=SCALE,
            enable_gqa=True,
            kernel_options=FLEX_OPTIONS,
            return_aux=AuxRequest(lse=True),
        )
        seen = torch.sigmoid(more.lse - sink[:, None])[..., None]
        return (out * seen.to(out.dtype))[0].transpose(0, 1)

    torch._dynamo.reset()
    return torch.compile(attend, dynamic=False)


def _causal(x: data.Attention) -> BlockMask:
    count, device = len(x.query), str(x.query.device)
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, count, count, device=device)


def _selected(x: data.Attention, count: int) -> BlockMask:
    """Mask of the first queries over all entries, then over their window."""
    entries = len(x.entries)
    chosen = torch.zeros(count, entries + 1, dtype=torch.bool, device=x.query.device)
    indices = x.indices[:count].long()
    chosen.scatter_(1, torch.where(indices >= 0, indices, entries), True)
    first = x.first

    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        main, row = k < entries, k - entries
        near = (row <= q) & (row > q - WINDOW) & (row >= first[q])
        return torch.where(main, chosen[q, torch.where(main, k, 0)], near)

    return create_block_mask(mask, None, None, count, entries + count, device=str(x.query.device))


def flex_forward(x: data.Attention, ours: Tensor, part: int = 1024) -> list[Peer]:
    """FlexAttention of all queries, dense causal; and with our selection, from the first `part` queries.

    Its time with a selection grows with the queries: the mask leaves out no block of 128 x 128.
    """
    count = len(x.query)

    def dense() -> float:
        attend, mask = _flex(), _causal(x)
        with torch.no_grad():
            return timed(lambda: attend(x.query, x.window, mask, x.sink))

    def sparse() -> float:
        attend, mask = _flex(), _selected(x, part)
        given = x.query[:part], torch.cat([x.entries, x.window[:part]]), mask, x.sink
        with torch.no_grad():
            checked(attend(*given), ours[:part])
            return timed(lambda: attend(*given)) * count / part

    return [
        measured("FlexAttention, dense causal (other keys)", dense),
        measured("FlexAttention, BlockMask of the selection", sparse),
    ]


def flex_backward(x: data.Attention, gradient: Tensor, part: int = 1024) -> list[Peer]:
    """Backward of `flex_forward`; `gradient` is ours of the query."""
    count = len(x.query)

    def backward(query: Tensor, table: Tensor, mask: BlockMask, grad: Tensor) -> Callable[[], tuple]:
        leaves = [t.clone().requires_grad_() for t in (query, table)]
        out = _flex()(*leaves, mask, x.sink)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

    def dense() -> float:
        return timed(backward(x.query, x.window, _causal(x), x.grad))

    def sparse() -> float:
        table = torch.cat([x.entries, x.window[:part]])
        run = backward(x.query[:part], table, _selected(x, part), x.grad[:part])
        checked(run()[0], gradient[:part])
        return timed(run) * count / part

    return [
        measured("FlexAttention, dense causal (other keys)", dense),
        measured("FlexAttention, BlockMask of the selection", sparse),
    ]


def liger_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, ours: Tensor) -> list[Peer]:
    """Forward and backward of the mean negative log-probability; Liger makes both in its forward.

    The second one gives entropy too, as ours does; on a Hopper card it needs NVIDIA's CuTe DSL.
    """
    x, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    memory = 0.0

    def plain() -> float:
        nonlocal memory
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def run() -> tuple:
            return torch.autograd.grad(liger_fused_linear_cross_entropy(x, w, labels), (x, w))

        with torch.no_grad():
            checked(-liger_fused_linear_cross_entropy(x, w, labels), ours.mean())
        memory = peak(run)
        return timed(run, 400)

    def with_entropy() -> float:
        from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as Scaled

        ones = torch.ones(len(x), device=x.device)

        def run() -> tuple:
            return torch.autograd.grad(Scaled.apply(x, w, labels, return_entropy=True), (x, w), (ones, ones))

        with torch.no_grad():
            checked(-Scaled.apply(x, w, labels, return_entropy=True)[0], ours)
        return timed(run, 400)

    fused = measured("Liger fused linear cross entropy (no entropy)", plain)
    if memory:
        fused.name = f"Liger fused linear cross entropy (no entropy, {memory:.2f} GiB)"
    return [fused, measured("Liger scaled cross entropy with entropy", with_entropy)]


def liger_reverse_kl(student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], ours: Tensor) -> Peer:
    """Forward and backward of the mean reverse KL by Liger's fused linear JSD at beta 1."""
    x, w = (t.detach().requires_grad_() for t in student)
    memory = 0.0

    def time() -> float:
        nonlocal memory
        from liger_kernel.transformers.functional import liger_fused_linear_jsd

        def run() -> tuple:
            return torch.autograd.grad(liger_fused_linear_jsd(x, w, *teacher, jsd_beta=1.0), (x, w))

        with torch.no_grad():
            checked(liger_fused_linear_jsd(x, w, *teacher, jsd_beta=1.0), ours.mean())
        memory = peak(run)
        return timed(run, 250)

    found = measured("Liger fused linear JSD, beta 1", time)
    if memory:
        found.name = f"Liger fused linear JSD, beta 1 ({memory:.2f} GiB)"
    return found


def liger_boundary(arguments: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> Peer:
    """Update, input mix, RMSNorm and coefficients by Liger's hyper-connections and norm."""

    def time() -> float:
        from liger_kernel.ops import mhc
        from liger_kernel.transformers import functional as liger

        streams, branch, coefficients, projection, base, scale, norm = arguments
        pre, post, mix = coefficients.split([4, 4, 16], 1)
        mix = mix.unflatten(1, (4, 4)).transpose(1, 2).contiguous()
        pre, post = pre.contiguous(), post.contiguous()
        phi, weight = projection.T.to(streams.dtype).contiguous(), norm.to(streams.dtype)
        given = {"tmax": 20, "pre_eps": 1e-6, "sinkhorn_eps": 1e-6, "post_mult": 2.0}

        def run() -> tuple[Tensor, Tensor, Tensor]:
            updated = liger.liger_mhc_post_res(streams, branch, post, mix)
            entered = liger.liger_rms_norm(liger.liger_mhc_pre(updated, pre), weight, 1e-6)
            # Its own tiles unroll 80 steps at this width, and compile for minutes.
            logits, _ = mhc.mhc_mm_norm_fwd(updated.flatten(1), phi, 1e-20, block_k=1024, num_warps=8)
            return updated, entered, mhc.mhc_split_sinkhorn_fwd(logits, base, *scale.unbind(), **given)[2]

        updated, entered, next_mix = run()
        checked(updated, ours[0])
        checked(entered, ours[1])
        checked(next_mix, ours[2][:, 8:].unflatten(1, (4, 4)), 5e-2)  # its projection is bf16
        return timed(run)

    return measured("Liger mHC + RMSNorm", time)


def liger_norm_rotation(
    values: Tensor, query: Tensor, norm: Tensor, angles: tuple[Tensor, Tensor], ours: tuple[Tensor, Tensor]
) -> Peer:
    """RMSNorm of keys [T, D], rotation of them and of queries [T, H, D].

    Liger turns the first channels of a head and pairs them by halves, ours turns the last ones in adjacent
    pairs: the work is the same, and results are compared with the channels in Liger's order.
    """

    def time() -> float:
        from liger_kernel.transformers import functional as liger

        width, turned = values.shape[1], 2 * angles[0].shape[1]
        weight = norm.to(values.dtype)
        cosine, sine = (torch.cat([t, t], 1)[None] for t in angles)
        last = torch.arange(width - turned, width, device=values.device).view(-1, 2).T.flatten()
        order = torch.cat([last, torch.arange(width - turned, device=values.device)])
        heads = query[..., order].transpose(0, 1)[None]

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            key = liger.liger_rms_norm(x, weight, 1e-6, in_place=False)
            return liger.liger_rope(heads, key[None, None], cosine, sine)

        weight = weight[order]
        turned_heads, key = run(values[:, order].contiguous())
        checked(key[0, 0], ours[0][:, order])
        checked(turned_heads[0].transpose(0, 1), ours[1][..., order])
        return timed(lambda: run(values))

    return measured("Liger RMSNorm + rope", time)
