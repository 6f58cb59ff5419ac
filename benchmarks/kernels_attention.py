"""Rows of the kernels' benchmark for sparse attention: forward, backward and decoding."""

import torch
from torch import Tensor

from benchmarks import kernel_data as data
from benchmarks import kernels_peers as peers
from benchmarks.kernel_data import HEADS, SCALE, TOPK, WIDTH, WINDOW, gathered_attention
from benchmarks.kernel_timing import Peer, Row, error, measured, replayed, timed
from model.ops.records import unpack
from model.ops.sparse_attention import Selected, invert, sparse_attention, table_attention
from model.ops.sparse_attention import reference as attention_definition
from model.ops.sparse_decode import reference as decode_definition
from model.ops.sparse_decode import sparse_decode
from model.ops.unpack_keys import unpack_keys

ENTRIES = 32768


def _rows(x: data.Attention) -> Tensor:
    last = torch.arange(len(x.query), dtype=torch.int32, device="cuda")
    window = attention_definition.window_rows(x.first, last, WINDOW)
    return torch.cat([x.indices, torch.where(window >= 0, window + len(x.entries), -1)], 1)


def attention_forward() -> list[Row]:
    """Forward at 8K and 32K queries; random picks and picks that drift."""
    rows = []
    for count in (8192, 32768):
        for kind in ("random", "drift"):
            x = data.attention(count, ENTRIES, kind)
            arguments = (x.query, x.entries, x.indices, x.window, x.first, x.sink)
            with torch.no_grad():
                out, _ = sparse_attention(*arguments, scale=SCALE)
                some = torch.cat([torch.arange(8), torch.randint(0, count, (24,))]).cuda()
                expected, _ = attention_definition.forward(
                    x.query[some].double(),
                    x.entries,
                    x.indices[some],
                    x.window,
                    x.first[some],
                    some.int(),
                    x.sink,
                    scale=SCALE,
                    window_size=WINDOW,
                )
                time = timed(lambda a=arguments: sparse_attention(*a, scale=SCALE))
                exact = timed(lambda a=arguments: sparse_attention(*a, scale=SCALE, exact=True))
                table, joint = torch.cat([x.entries, x.window]), _rows(x)
                others = [peers.tilelang_attention(x.query, table, joint, x.sink, out)]
                peer = 0.0
                if count == 8192:
                    peer = timed(lambda x=x, t=table, j=joint: gathered_attention(x.query, t, j, x.sink))
                    others.insert(0, _gather_sdpa(x, table, joint, out))
                if count == 8192 and kind == "random":
                    others += peers.flex_forward(x, out)
            flops = 4 * HEADS * WIDTH * (TOPK + WINDOW) * count
            rows.append(
                Row(
                    f"sparse attention forward, {count} queries, {kind}",
                    flops / time / 1e6,
                    "TFLOP/s",
                    time,
                    error(out[some], expected),
                    (300, 350, 450),
                    "torch gather + bmm" if peer else "",
                    peer,
                    f"exact mode {flops / exact / 1e6:.0f} TFLOP/s",
                    others,
                )
            )
    return rows


def _gather_sdpa(x: data.Attention, table: Tensor, rows: Tensor, ours: Tensor) -> Peer:
    def time() -> float:
        with torch.no_grad():
            peers.checked(peers.sdpa_attention(x.query, table, rows, x.sink), ours)
            return timed(lambda: peers.sdpa_attention(x.query, table, rows, x.sink))

    return measured("torch gather + SDPA", time)


def attention_backward() -> list[Row]:
    """Backward at 8K queries, all four gradients, deterministic."""
    rows = []
    for kind in ("random", "drift"):
        count = 8192
        x = data.attention(count, ENTRIES, kind)
        leaves = [t.clone().requires_grad_() for t in (x.query, x.entries, x.window, x.sink)]
        inverse = invert(x.indices, ENTRIES)

        def run(leaves=leaves, x=x, inverse=inverse) -> Tensor:
            q, e, w, s = leaves
            return sparse_attention(q, e, x.indices, w, x.first, s, scale=SCALE, inverse=inverse)[0]

        out = run()
        got = torch.autograd.grad(out, leaves, x.grad, retain_graph=True)
        again = torch.autograd.grad(out, leaves, x.grad, retain_graph=True)
        same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
        expected = _attention_gradients(x)
        worst = max(error(a, b) for a, b in zip(got, expected, strict=True)) if same else float("inf")
        others = peers.flex_backward(x, got[0]) if kind == "random" else []
        del expected, got, again
        time = timed(lambda o=out, v=leaves, x=x: torch.autograd.grad(o, v, x.grad, retain_graph=True), 200)
        sort = timed(lambda x=x: invert(x.indices, ENTRIES))
        flops = 10 * HEADS * WIDTH * (TOPK + WINDOW) * count
        peer = _peer_backward(x)
        rows.append(
            Row(
                f"sparse attention backward, {count} queries, {kind}",
                flops / time / 1e6,
                "TFLOP/s",
                time,
                worst,
                (190, 230, 280),
                "autograd of torch gather + bmm",
                peer * count,
                "two runs equal bit for bit; five products counted, of which the forward kept one; "
                f"inverse of the selection {sort:.0f} us, shared by its layers",
                others,
            )
        )
    return rows


def _peer_backward(x: data.Attention) -> float:
    """Microseconds a query of autograd through gather and bmm, on the first 512 queries."""
    part = slice(0, 512)
    query = x.query[part].clone().requires_grad_()
    table = torch.cat([x.entries, x.window]).requires_grad_()
    out = gathered_attention(query, table, _rows(x)[part], x.sink)
    return timed(lambda: torch.autograd.grad(out, (query, table), x.grad[part], retain_graph=True)) / 512


def _attention_gradients(x: data.Attention) -> list[Tensor]:
    """Gradients of the definition in fp64, by chunks of queries."""
    totals: list[Tensor] = []
    queries = []
    last = torch.arange(len(x.query), dtype=torch.int32, device="cuda")
    for start in range(0, len(x.query), 128):
        part = slice(start, start + 128)
        leaves = [t.double().requires_grad_() for t in (x.query[part], x.entries, x.window, x.sink)]
        out, _ = attention_definition.forward(
            leaves[0],
            leaves[1],
            x.indices[part],
            leaves[2],
            x.first[part],
            last[part],
            leaves[3],
            scale=SCALE,
            window_size=WINDOW,
        )
        gradients = torch.autograd.grad(out, leaves, x.grad[part].double())
        queries.append(gradients[0].float())
        totals = (
            [a + b for a, b in zip(totals, gradients[1:], strict=True)] if totals else list(gradients[1:])
        )
    return [torch.cat(queries), *totals]


def attention_decode() -> list[Row]:
    """One layer's decode attention at batch 64, 16 and 1, from packed records and from bf16 keys."""
    records = data.main_records(64 * ENTRIES)
    sets = [data.decode(64, ENTRIES, records) for _ in range(8)]
    windows = torch.cat([unpack("window", x.window).bfloat16() for x in sets])
    table = torch.cat([unpack_keys(records), windows])
    rows = []
    for batch, targets in ((64, (40, 28, 20)), (16, (21, 16, 12)), (1, None)):
        packed, packed_exact, dense, dense_exact, bmm, sdpa = ([] for _ in range(6))
        for number, x in enumerate(sets):
            # The last ones: the first sequence of a set is short.
            a = (x.query[-batch:], records, x.indices[-batch:], x.window, x.window_indices[-batch:], x.sink)
            counts = torch.stack([(a[2] >= 0).sum(1), (a[4] >= 0).sum(1)], 1).int()
            packed.append(lambda a=a, c=counts: sparse_decode(*a, scale=SCALE, counts=c))
            packed_exact.append(lambda a=a, c=counts: sparse_decode(*a, scale=SCALE, counts=c, exact=True))
            begin = number * 64 * WINDOW
            seen = (a[4][:, 0] + begin, a[4][:, 0] + begin + counts[:, 1] - 1)
            chosen = Selected(64 * ENTRIES, a[2], seen[0].int(), seen[1].int())
            dense.append(lambda a=a, s=chosen: table_attention(a[0], table, s, a[5], scale=SCALE))
            dense_exact.append(
                lambda a=a, s=chosen: table_attention(a[0], table, s, a[5], scale=SCALE, exact=True)
            )
            joint = torch.cat([a[2], torch.where(a[4] >= 0, a[4] + begin + 64 * ENTRIES, -1)], 1)
            bmm.append(lambda a=a, i=joint: gathered_attention(a[0], table, i, a[5]))
            sdpa.append(lambda a=a, i=joint: peers.sdpa_attention(a[0], table, i, a[5]))
        x = sets[0]
        expected = decode_definition.decode(
            x.query[-batch:].float(),
            records,
            x.indices[-batch:],
            x.window,
            x.window_indices[-batch:],
            x.sink,
            scale=SCALE,
        )
        gathered = replayed(bmm)

        def by_sdpa(calls: list = sdpa, expected: Tensor = expected) -> float:
            peers.checked(calls[0](), expected)
            return replayed(calls)

        other = [measured("torch gather + SDPA on a bf16 cache", by_sdpa)]
        for name, calls, exact, goal in (
            ("packed records (FP4, window FP8)", packed, packed_exact, targets),
            ("a bf16 cache", dense, dense_exact, None),
        ):
            worst = max(error(calls[0](), expected), error(exact[0](), expected))
            time = replayed(calls)
            note = f"exact mode {replayed(exact):.1f} us"
            what, peer = f"decode attention from {name}, batch {batch}", "torch gather + bmm on a bf16 cache"
            rows.append(Row(what, time, "us", time, worst, goal, peer, gathered, note, other))
    return rows
