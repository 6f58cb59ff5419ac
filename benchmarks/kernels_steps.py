"""Rows of the kernels' benchmark for what a step adds to attention: sampling, losses, the n-gram memory."""

from collections.abc import Callable

import torch
import torch.utils.checkpoint
from torch import Tensor

from benchmarks import kernel_data as data
from benchmarks import kernels_peers as peers
from benchmarks.kernel_data import HEADS, SCALE, TOPK, WIDTH
from benchmarks.kernel_timing import Row, error, peak, replayed, timed
from model.ops.engram_gate import engram_gate
from model.ops.engram_gate import reference as gate_definition
from model.ops.index_loss import index_loss
from model.ops.index_loss import reference as index_definition
from model.ops.linear_logprob import linear_logprob
from model.ops.linear_logprob import reference as logprob_definition
from model.ops.linear_reverse_kl import linear_reverse_kl
from model.ops.linear_reverse_kl import reference as kl_definition
from model.ops.row_sums import reference as sums_definition
from model.ops.row_sums import row_sums
from model.ops.sampling import Rules, sampling
from model.ops.sampling import reference as sampling_definition
from model.ops.sampling.triton import launch, packed
from model.ops.sparse_attention import invert, sparse_attention
from model.ops.verification import reference as verification_definition
from model.ops.verification import verification

COPY_BANDWIDTH = 4.27e12  # bytes a second, read and write, measured on this kind of card
VOCABULARY = 129280


def log_probability() -> list[Row]:
    """Log-probability and entropy of 8192 tokens over 129,280 words, forward and backward."""
    count, vocabulary, width = 8192, 129280, 5120
    hidden, weight = data.normal(count, width), data.normal(vocabulary, width, scale=0.02)
    labels = torch.randint(0, vocabulary, (count,), device="cuda")
    grads = torch.randn(count, device="cuda"), torch.randn(count, device="cuda") * 0.1
    some = torch.randint(0, count, (48,), device="cuda")
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def both(run: Callable) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, w, labels)[:2], (x, w), grads)

    wide = hidden[some].double().requires_grad_()
    expected = logprob_definition.linear_logprob(wide, weight.double(), labels[some], temperature=1.0)
    (gradient,) = torch.autograd.grad(expected[:2], wide, [g[some].double() for g in grads])
    got = linear_logprob(hidden, weight, labels)
    worst = max(error(a[some], b) for a, b in zip(got[:2], expected[:2], strict=True))
    backward_error = error(both(linear_logprob)[0][some], gradient)
    del expected, gradient
    memory, peer_memory = (peak(lambda run=run: both(run)) for run in (linear_logprob, _peer_logprob))
    forward = timed(lambda: linear_logprob(hidden, weight, labels), 150)
    total = timed(lambda: both(linear_logprob), 400)
    peer = timed(lambda: _peer_logprob(hidden, weight, labels), 150)
    peer_total = timed(lambda: both(_peer_logprob), 400)
    others = peers.liger_cross_entropy(hidden, weight, labels, got[0])
    flops = 2 * count * vocabulary * width
    return [
        Row(
            "linear log-probability and entropy, forward",
            flops / forward / 1e6,
            "TFLOP/s",
            forward,
            worst,
            None,
            "torch logits by chunks of 1024",
            peer,
        ),
        Row(
            "the same, forward and backward (4 products counted)",
            4 * flops / total / 1e6,
            "TFLOP/s",
            total,
            backward_error,
            (600, 640, 670),
            "torch logits by chunks, checkpointed",
            peer_total,
            f"workspace with the gradients {memory:.2f} GiB, torch {peer_memory:.2f} GiB",
            others,
        ),
    ]


def _peer_logprob(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    def chunk(x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logp = torch.log_softmax((x @ weight.T).float(), -1)
        return logp.gather(1, label[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, x, label, use_reentrant=False)
        for x, label in zip(hidden.split(1024), labels.split(1024), strict=True)
    ]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def reverse_kl() -> list[Row]:
    """Reverse KL of 4096 tokens over 129,280 words, student and teacher 5120 wide."""
    count, width = 4096, 5120
    hidden, other = data.normal(count, width), data.normal(count, width)
    weight, head = (data.normal(VOCABULARY, width, scale=0.02) for _ in range(2))
    grad, some = torch.rand(count, device="cuda"), torch.randint(0, count, (48,), device="cuda")
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def both(run: Callable) -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(x, w, other, head), (x, w), grad)

    wide = hidden[some].double().requires_grad_()
    arguments = (wide, weight.double(), other[some].double(), head.double())
    expected = kl_definition.linear_reverse_kl(*arguments, temperature=1.0)
    (gradient,) = torch.autograd.grad(expected, wide, grad[some].double())
    worst = error(linear_reverse_kl(hidden, weight, other, head)[some], expected)
    backward_error = error(both(linear_reverse_kl)[0][some], gradient)
    del arguments, expected, gradient
    memory, peer_memory = (peak(lambda run=run: both(run)) for run in (linear_reverse_kl, _peer_kl))
    forward = timed(lambda: linear_reverse_kl(hidden, weight, other, head), 100)
    total = timed(lambda: both(linear_reverse_kl), 250)
    peer = timed(lambda: _peer_kl(hidden, weight, other, head), 100)
    peer_total = timed(lambda: both(_peer_kl), 250)
    with torch.no_grad():
        ours = linear_reverse_kl(hidden, weight, other, head)
    liger = peers.liger_reverse_kl((hidden, weight), (other, head), ours)
    flops = 2 * count * VOCABULARY * width
    chunks = "torch logits of both by chunks of 1024"
    note = f"workspace with the gradients {memory:.2f} GiB, torch {peer_memory:.2f} GiB"
    rate, all_rate = 2 * flops / forward / 1e6, 6 * flops / total / 1e6
    name = "linear reverse KL, forward (2 products)"
    return [
        Row(name, rate, "TFLOP/s", forward, worst, (450, 550, 650), chunks, peer),
        Row(
            "the same, forward and backward (6 products counted)",
            all_rate,
            "TFLOP/s",
            total,
            backward_error,
            (450, 550, 650),
            chunks + ", checkpointed",
            peer_total,
            note,
            [liger],
        ),
    ]


def _peer_kl(hidden: Tensor, weight: Tensor, other: Tensor, head: Tensor) -> Tensor:
    def chunk(x: Tensor, y: Tensor) -> Tensor:
        log_p = torch.log_softmax((x @ weight.T).float(), -1)
        return (log_p.exp() * (log_p - torch.log_softmax((y @ head.T).float(), -1))).sum(-1)

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, x, y, use_reentrant=False)
        for x, y in zip(hidden.split(1024), other.split(1024), strict=True)
    ]
    return torch.cat(parts)  # pyright: ignore[reportArgumentType]


def sampling_step() -> list[Row]:
    """One token for each of 64 rows and of one, over 129,280 words; tokens as the definition draws them."""
    rows = []
    for batch, top_p, top_k, targets in (
        (64, 1.0, 0, (40, 25, 18)),
        (64, 0.95, 0, (200, 120, 60)),
        (64, 0.95, 50, (200, 120, 60)),
        (1, 0.95, 0, None),
    ):
        sets = [torch.randn(batch, VOCABULARY, device="cuda") * 3 for _ in range(4)]
        worst, calls, peers = 0.0, [], []
        for logits in sets:
            seeds, places = torch.randint(0, 2**62, (batch,)), torch.randint(0, 2**20, (batch,))
            filled = torch.ones(batch, dtype=torch.float64)
            rules = Rules(filled * 0.8, filled * top_p, torch.full((batch,), top_k), seeds, places)
            got, expected = sampling(logits, rules), sampling_definition.sampling(logits, rules)
            same = torch.equal(got.tokens, expected.tokens)
            if expected.ids is not None and got.ids is not None:
                same = same and torch.equal(got.ids, expected.ids)
            wide = (logits.double() / 0.8).log_softmax(1).cpu().gather(1, got.tokens[:, None])[:, 0]
            worst = max(worst, error(got.full, wide) if same else float("inf"))
            table = packed(rules, logits.device)
            calls.append(lambda x=logits, r=table, t=top_p < 1: launch(x, r, truncate=t))
            noise = torch.empty_like(logits).exponential_()
            peers.append(lambda x=logits, n=noise, p=top_p, k=top_k: _peer_sampling(x, n, p, k))
        time, kind = replayed(calls), f"top-p {top_p:g}" + (f", top-k {top_k}" if top_k else "")
        name = f"sampling, batch {batch}" + (f", {kind}" if top_p < 1 else "")
        rows.append(
            Row(name, time, "us", time, worst, targets, "torch sort + softmax + cumsum", replayed(peers))
        )
    return rows


def _peer_sampling(logits: Tensor, noise: Tensor, top_p: float, top_k: int) -> Tensor:
    if top_p == 1:
        return (torch.softmax(logits / 0.8, 1) / noise).argmax(1)
    ordered, order = (logits / 0.8).sort(1, descending=True)
    if top_k:
        ordered[:, top_k:] = float("-inf")
    p = torch.softmax(ordered, 1)
    p.masked_fill_(p.cumsum(1) - p > top_p, 0.0)
    return order.gather(1, (p / noise).argmax(1, keepdim=True))


def speculation() -> list[Row]:
    """Rejection sampling of 5 drafts for each of 64 requests, over 129,280 words."""
    requests, slots = 64, 5
    index = torch.arange(requests * (slots + 1), device="cuda").view(requests, slots + 1)
    calls, peers, worst = [], [], 0.0
    for _ in range(3):
        target = torch.randn(index.numel(), VOCABULARY, device="cuda") * 3
        proposed = [
            target[index[:, k]] + torch.randn(requests, VOCABULARY, device="cuda") for k in range(slots)
        ]
        noise = torch.empty(requests, VOCABULARY, device="cuda").exponential_()
        proposed = torch.stack(proposed)
        drafts = torch.stack([(q.softmax(1) / noise.roll(k, 1)).argmax(1) for k, q in enumerate(proposed)], 1)
        lengths = torch.randint(0, slots + 1, (requests,), device="cuda")
        draws = torch.rand(requests, slots, device="cuda", dtype=torch.float64)
        rest = torch.rand(requests, device="cuda", dtype=torch.float64)
        given = index, drafts, lengths, draws, rest
        got = verification(target, proposed, *given)
        expected = verification_definition.verification(target, proposed, *given)
        same = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        worst = worst if same else float("inf")
        calls.append(lambda t=target, q=proposed, g=given: verification(t, q, *g))
        peers.append(lambda t=target, q=proposed, g=given, n=noise: _peer_verification(t, q, *g[:4], n))
    time = timed(calls[0])
    size = (index.numel() + slots * requests) * VOCABULARY * 4 / 1e6
    note = f"mean of {got[0].float().mean():.1f} drafts accepted; logits of {size:.0f} MB"
    name = "verification, 64 requests, 5 drafts"
    return [Row(name, time, "us", time, worst, (500, 300, 150), "torch softmax", timed(peers[0]), note)]


def _peer_verification(
    target: Tensor,
    proposed: Tensor,
    index: Tensor,
    drafts: Tensor,
    lengths: Tensor,
    draws: Tensor,
    noise: Tensor,
) -> tuple[Tensor, Tensor]:
    p, q = torch.softmax(target, 1), torch.softmax(proposed, 2).transpose(0, 1)
    rows, width = torch.arange(len(drafts), device="cuda"), drafts.shape[1]
    passed = draws * q.gather(2, drafts[:, :, None])[:, :, 0] < p[index[:, :-1], drafts]
    passed &= torch.arange(width, device="cuda") < lengths[:, None]
    accepted = passed.long().cumprod(1).sum(1)
    last = p[index[rows, accepted]]
    rest = (last - q[rows, accepted.clamp_max(width - 1)]).clamp_min_(0)
    last = torch.where(((accepted < lengths) & (rest.sum(1) > 0))[:, None], rest, last)
    return accepted, (last / noise).argmax(1)


def index_training() -> list[Row]:
    """The indexer's loss of 8192 tokens over 512 of 32K entries each, and its gradients."""
    worst = _index_error()
    count, entries = 8192, 32768
    x = data.attention(count, entries)
    heads, keys = data.normal(count, 32, 128), data.normal(entries, 128)
    weights = torch.randn(count, 32, device="cuda") * 0.05
    with torch.no_grad():
        lse = sparse_attention(x.query, x.entries, x.indices, x.window, x.first, x.sink, scale=SCALE)[1]
    leaves = [t.requires_grad_() for t in (heads, weights, keys)]
    inverse, grad = invert(x.indices, entries), torch.rand(count, device="cuda")

    def loss(part: slice = slice(None)) -> Tensor:
        student = heads[part], weights[part], keys
        return index_loss(
            *student, x.query[part], x.entries, lse[part], x.indices[part], scale=SCALE, inverse=inverse
        )

    def peer() -> tuple[Tensor, ...]:
        part = slice(0, 256)
        teacher = x.query[part], x.entries, lse[part], x.indices[part]
        out = index_definition.index_loss(heads[part], weights[part], keys, *teacher, scale=SCALE)
        return torch.autograd.grad(out, leaves, grad[part])

    with torch.no_grad():
        forward = timed(loss)
    total = timed(lambda: torch.autograd.grad(loss(), leaves, grad))
    flops = 2 * count * TOPK * (HEADS * WIDTH + 32 * 128)
    back = 2 * count * TOPK * 32 * 128 * 3
    what = "torch gather + einsum in fp32, autograd"
    return [
        Row(
            "index loss, 8192 tokens, forward",
            flops / forward / 1e6,
            "TFLOP/s",
            forward,
            worst,
            (150, 250, 350),
        ),
        Row(
            "the same, forward and backward",
            (flops + back) / total / 1e6,
            "TFLOP/s",
            total,
            worst,
            None,
            what,
            timed(peer) * count / 256,
            f"inverse of the selection shared; {(total - forward) / 1000:.2f} ms of it backward",
        ),
    ]


def _index_error() -> float:
    """Worst relative error of loss and gradients against fp64, over 300 tokens."""
    x = data.attention(300, 900)
    heads, keys = data.normal(300, 32, 128), data.normal(900, 128)
    weights = torch.randn(300, 32, device="cuda") * 0.05
    lse = sparse_attention(x.query, x.entries, x.indices, x.window, x.first, x.sink, scale=SCALE)[1]
    leaves = [t.requires_grad_() for t in (heads, weights, keys)]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.rand(300, device="cuda")
    got = index_loss(*leaves, x.query, x.entries, lse, x.indices, scale=SCALE)
    teacher = x.query.double(), x.entries.double(), lse.double(), x.indices
    expected = index_definition.index_loss(*wide, *teacher, scale=SCALE)
    found = torch.autograd.grad(got, leaves, grad)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    return max(error(got, expected), *(error(a, b) for a, b in zip(found, wanted, strict=True)))


def memory() -> list[Row]:
    """The n-gram memory's gate over 16K tokens of 4 streams, and the gradient of its table."""
    count, n, width = 16384, 4, 5120
    leaves = [data.normal(count, n, width), data.normal(count, (n + 1) * width)]
    leaves += [data.normal(n, width) + 1 for _ in range(2)]
    leaves = [t.requires_grad_() for t in leaves]
    grad, small = data.normal(count, n, width), [t[:256] for t in leaves[:2]] + leaves[2:]
    wide = [t.detach().double().requires_grad_() for t in small]
    expected = gate_definition.engram_gate(*wide, None, eps=1e-6)
    wanted = torch.autograd.grad(expected, wide, grad[:256].double())
    out = engram_gate(*small, None, eps=1e-6)
    found = torch.autograd.grad(out, small, grad[:256])
    worst = max(error(out, expected), *(error(a, b) for a, b in zip(found, wanted, strict=True)))
    del expected, wanted, found, wide
    part = [t[:2048] for t in leaves[:2]] + leaves[2:]
    with torch.no_grad():
        forward = timed(lambda: engram_gate(*leaves, None, eps=1e-6))
        peer = timed(lambda: gate_definition.engram_gate(*part, None, eps=1e-6)) * 8
    out = engram_gate(*leaves, None, eps=1e-6)
    backward = timed(lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))
    other = gate_definition.engram_gate(*part, None, eps=1e-6)
    peer_backward = timed(lambda: torch.autograd.grad(other, part, grad[:2048], retain_graph=True)) * 8
    rows = []
    for name, time, parts, against in (
        ("forward", forward, 3 * n + 1, peer),
        ("backward", backward, 5 * n + 2, peer_backward),
    ):
        share = parts * width * 2 * count / COPY_BANDWIDTH / time * 1e8
        targets = (55, 65, 75) if name == "forward" else (45, 55, 65)
        rows.append(
            Row(f"n-gram gate, {name}, {count} tokens", share, "%", time, worst, targets, "eager", against)
        )
    ids = (torch.rand(count * 24, device="cuda") ** 3 * 200_000).long()
    values = data.normal(len(ids), 256)
    got, right = row_sums(values, ids), sums_definition.row_sums(values.double(), ids)
    worst = error(got[1], right[1]) if torch.equal(got[0], right[0]) else float("inf")
    again = row_sums(values, ids)[1]
    worst = worst if torch.equal(again, got[1]) else float("inf")
    time = timed(lambda: row_sums(values, ids))
    peer = timed(lambda: sums_definition.row_sums(values, ids))
    note = "with the sort; two runs equal bit for bit"
    what = "torch unique + index_add"
    rows.append(Row(f"table gradient, {len(ids)} lookups", time, "us", time, worst, None, what, peer, note))
    return rows
