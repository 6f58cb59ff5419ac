"""Speed of the policy's kernels on one H200, each beside what PyTorch offers for the same work.

`python -m benchmarks.kernels [--only NAME ...] [--output FILE.md]`. A row is timed only after its result
agreed with the definition on fresh random inputs. Exits with 1 when an agreement fails or a figure misses
its "must".
"""

import argparse
import datetime
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import kernel_data as data
from benchmarks.kernel_data import HEADS, SCALE, TOPK, WIDTH, WINDOW, gathered_attention
from benchmarks.kernel_timing import Row, error, replayed, table, timed
from benchmarks.kernels_steps import (
    COPY_BANDWIDTH,
    index_training,
    log_probability,
    memory,
    reverse_kl,
    sampling_step,
    speculation,
)
from model.ops.hyper_boundary import hyper_boundary
from model.ops.hyper_boundary import reference as boundary_definition
from model.ops.indexer import index_topk
from model.ops.indexer import reference as indexer_definition
from model.ops.indexer.triton import index_scores
from model.ops.pack_keys import pack_keys
from model.ops.pack_keys import reference as packing_definition
from model.ops.records import unpack
from model.ops.sparse_attention import invert, sparse_attention
from model.ops.sparse_attention import reference as attention_definition
from model.ops.sparse_decode import reference as decode_definition
from model.ops.sparse_decode import sparse_decode
from model.ops.topk import reference as topk_definition
from model.ops.topk import topk
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
                peer = 0.0
                if count == 8192:
                    peer = timed(lambda x=x, t=table, j=joint: gathered_attention(x.query, t, j, x.sink))
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
                )
            )
    return rows


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
                f"two runs equal bit for bit; inverse of the selection {sort:.0f} us, shared by its layers",
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
    """One layer's decode attention from packed records, at batch 64, 16 and 1."""
    rows = []
    records = data.main_records(64 * ENTRIES)
    sets = [data.decode(64, ENTRIES, records) for _ in range(8)]
    table = unpack_keys(records[: 16 * ENTRIES])
    for batch, targets in ((64, (40, 28, 20)), (16, (21, 16, 12)), (1, None)):
        calls, peers, exact = [], [], []
        for x in sets:
            a = (x.query[:batch], records, x.indices[:batch], x.window, x.window_indices[:batch], x.sink)
            counts = torch.stack([(a[2] >= 0).sum(1), (a[4] >= 0).sum(1)], 1).int()
            calls.append(lambda a=a, c=counts: sparse_decode(*a, scale=SCALE, counts=c))
            exact.append(lambda a=a, c=counts: sparse_decode(*a, scale=SCALE, counts=c, exact=True))
            window = unpack("window", x.window).bfloat16()
            joint = torch.cat([table, window])
            index = torch.cat([a[2] % (16 * ENTRIES), torch.where(a[4] >= 0, a[4] + len(table), -1)], 1)
            peers.append(lambda a=a, j=joint, i=index: gathered_attention(a[0], j, i, a[5]))
        x = sets[0]
        expected = decode_definition.decode(
            x.query[:batch].float(),
            records,
            x.indices[:batch],
            x.window,
            x.window_indices[:batch],
            x.sink,
            scale=SCALE,
        )
        worst = max(error(calls[0](), expected), error(exact[0](), expected))
        time = replayed(calls)
        rows.append(
            Row(
                f"decode attention, batch {batch}",
                time,
                "us",
                time,
                worst,
                targets,
                "torch gather + bmm on a bf16 cache",
                replayed(peers),
                f"exact mode {replayed(exact):.1f} us",
            )
        )
        del calls, peers, exact
    return rows


def top_k() -> list[Row]:
    """Exact top-k against torch.topk, which breaks ties as it likes."""
    rows = []
    for count, width, targets in (
        (64, 131072, (50, 35, 25)),
        (64, 16384, None),
        (64, 1 << 20, None),
        (1024, 32768, None),
    ):
        scores = [torch.randn(count, width, device="cuda") for _ in range(3)]
        ties = torch.randn(count, width, device="cuda")
        ties[1] = 0
        ties[2] = torch.relu(ties[2] - 3)
        ties[3] = torch.round(ties[3] * 8)
        ties[4, 9:] = float("-inf")
        equal = all(torch.equal(topk(x, TOPK), topk_definition.topk(x, TOPK)) for x in (*scores, ties))
        time = replayed([lambda x=x: topk(x, TOPK) for x in scores])
        peer = replayed([lambda x=x: x.topk(TOPK, 1) for x in scores])
        slow = replayed([lambda x=ties: topk(x, TOPK)])
        rows.append(
            Row(
                f"top-{TOPK} of {count} x {width}",
                time,
                "us",
                time,
                0.0 if equal else float("inf"),
                targets,
                "torch.topk",
                peer,
                f"with rows of long ties {slow:.0f} us",
            )
        )
        del scores, ties
    return rows


def indexer() -> list[Row]:
    """Index scores of 1024 queries against 32K keys, alone and with the exact choice."""
    rows = []
    count, heads, width = 1024, 32, 128
    flops = 2 * count * ENTRIES * heads * width
    begins = torch.zeros(count, device="cuda", dtype=torch.int32)
    ends = torch.full_like(begins, ENTRIES)
    query, keys = data.mxfp4_values(count, heads, width), data.mxfp4_values(ENTRIES, width)
    weights = torch.randn(count, heads, device="cuda") * 0.1
    expected = indexer_definition.index_scores(query[:64], keys, weights[:64])
    chosen = topk_definition.topk(expected, TOPK)
    peer = timed(lambda: _peer_indexer(query.bfloat16(), keys.bfloat16(), weights))
    peer_choice = timed(lambda: _peer_indexer(query.bfloat16(), keys.bfloat16(), weights).topk(TOPK, 1))
    for kind, targets, choice_targets in (
        (torch.bfloat16, (500, 580, 620), (400, 460, 520)),
        (torch.float8_e4m3fn, (800, 900, 1000), None),
    ):
        q, k = query.to(kind), keys.to(kind)
        out = torch.empty(count, ENTRIES, device="cuda")
        ranges = {"begins": begins, "ends": ends}
        worst = error(index_scores(q, k, weights, **ranges, out=out)[:64], expected)
        time = timed(lambda q=q, k=k, o=out: index_scores(q, k, weights, begins=begins, ends=ends, out=o))
        name = "bf16" if kind is torch.bfloat16 else "fp8"
        rows.append(
            Row(
                f"index scores, {name}",
                flops / time / 1e6,
                "TFLOP/s",
                time,
                worst,
                targets,
                "torch bf16 matmul + relu + einsum",
                peer,
            )
        )
        got = index_topk(q, k, weights, TOPK, **ranges)[:64]
        agreement = (got == chosen).float().mean().item()
        time = timed(lambda q=q, k=k: index_topk(q, k, weights, TOPK, begins=begins, ends=ends))
        rows.append(
            Row(
                f"index scores and exact top-{TOPK}, {name}",
                flops / time / 1e6,
                "TFLOP/s",
                time,
                worst,
                choice_targets,
                "the same and torch.topk",
                peer_choice,
                f"slots equal to the fp32 definition {agreement:.4%}",
            )
        )
    return rows


def _peer_indexer(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    out = torch.empty(len(query), len(keys), device="cuda")
    for start in range(0, len(query), 128):
        q = query[start : start + 128]
        dots = torch.relu((q.flatten(0, 1) @ keys.T).view(*q.shape[:2], -1))
        out[start : start + 128] = torch.einsum("ths,th->ts", dots.float(), weights[start : start + 128])
    return out


def packing() -> list[Row]:
    """Pool, norm, rotation, quantisation and packing of 32K entries; and unpacking them."""
    rows = []
    for kind, width, ratio in (
        ("main", WIDTH, 2),
        ("main", WIDTH, 1),
        ("index", 128, 1),
        ("window", WIDTH, 1),
    ):
        values = torch.randn(ENTRIES * ratio, width, device="cuda")
        gates = torch.randn_like(values) if ratio == 2 else None
        starts = torch.arange(ENTRIES, device="cuda", dtype=torch.int32) * ratio
        angle = torch.rand(ENTRIES, 32, device="cuda") * 6
        options = {"norm": torch.rand(width, device="cuda"), "rope": (angle.cos(), angle.sin())}
        arguments = {"gates": gates, "ratio": ratio, "starts": starts, **options}
        latent, records = pack_keys(kind, values, **arguments)
        expected = packing_definition.pack_keys(
            kind, values, gates, ratio, starts, options["norm"], 1e-6, options["rope"]
        )
        worst = error(unpack(kind, records), unpack(kind, expected[1]))
        time = replayed([lambda k=kind, v=values, a=arguments: pack_keys(k, v, **a)])
        peer = timed(
            lambda k=kind, v=values, a=arguments: packing_definition.pack_keys(
                k, v, a["gates"], a["ratio"], a["starts"], a["norm"], 1e-6, a["rope"]
            )
        )
        size = values.numel() * 4 * ratio + latent.numel() * 2 + records.numel()
        share = size / COPY_BANDWIDTH / time * 1e8
        note = f"{share:.0f} % of the copy bandwidth"
        rows.append(
            Row(f"pack {kind} records, ratio {ratio}", time, "us", time, worst, None, "eager", peer, note)
        )
    records = data.main_records(ENTRIES)
    worst = 0.0 if torch.equal(unpack_keys(records).float(), unpack("main", records)) else float("inf")
    time = replayed([lambda: unpack_keys(records)])
    peer = timed(lambda: unpack("main", records).bfloat16())
    rows.append(Row("unpack main records", time, "us", time, worst, None, "eager", peer))
    return rows


def boundary() -> list[Row]:
    """The hyper-connection boundary of 32K tokens, against the bytes that an ideal one moves."""
    count, width = 32768, 5120
    streams, branch = data.normal(count, 4, width), data.normal(count, width)
    projection = torch.randn(24, 4 * width, device="cuda") * 0.02
    base, scale, norm = (
        torch.randn(24, device="cuda"),
        torch.rand(3, device="cuda") + 0.5,
        torch.rand(width, device="cuda"),
    )
    coefficients = boundary_definition.coefficients(streams[:4096], projection, base, scale).repeat(8, 1)
    arguments = (streams, branch, coefficients, projection, base, scale, norm)
    part = slice(1000, 1256)
    with torch.no_grad():
        got = hyper_boundary(*arguments)
        wide = [x[part].double() for x in arguments[:3]] + [x.double() for x in arguments[3:]]
        expected = boundary_definition.hyper_boundary(*wide, eps=1e-6)
        worst = max(error(a[part], b) for a, b in zip(got, expected, strict=True))
        del got, expected
        time = timed(lambda: hyper_boundary(*arguments))
        small = [x[:4096] for x in arguments[:3]]
        peer = timed(lambda: boundary_definition.hyper_boundary(*small, *arguments[3:], eps=1e-6)) * 8
    ideal = 10 * width * 2 * count
    share = ideal / COPY_BANDWIDTH / time * 1e8
    return [
        Row("hyper-connection boundary, 32768 tokens", share, "%", time, worst, (55, 63, 75), "eager", peer)
    ]


SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "decode": attention_decode,
    "forward": attention_forward,
    "backward": attention_backward,
    "topk": top_k,
    "indexer": indexer,
    "logprob": log_probability,
    "reverse_kl": reverse_kl,
    "sampling": sampling_step,
    "verification": speculation,
    "index_loss": index_training,
    "engram": memory,
    "packing": packing,
    "boundary": boundary,
}


def main() -> int:
    """Run the sections, print the table, and say what was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    failed: list[str] = []
    for name in options.only:
        torch.manual_seed(int(datetime.datetime.now().timestamp()) % 100_000)
        try:
            rows += SECTIONS[name]()
            print(f"{name} done", flush=True)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        torch.cuda.empty_cache()
    import triton

    setting = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    text = f"{datetime.date.today()}, {setting}\n\n{table(rows)}\n"
    print(text)
    if options.output:
        options.output.write_text(text)
    wrong = [r.what for r in rows if r.error > 5e-3]
    missed = [r.what for r in rows if r.level == "MISSED"]
    if failed:
        print("failed:", "; ".join(failed))
    if wrong:
        print("wrong:", "; ".join(wrong))
    if missed:
        print("below must:", "; ".join(missed))
    counted = [r for r in rows if r.targets]
    print(f"{sum(r.level != 'MISSED' for r in counted)} of {len(counted)} figures reach their must")
    return 1 if failed or wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())
