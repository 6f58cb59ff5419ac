"""Speed of the policy's kernels on one H200, each beside what other libraries offer for the same work.

`python -m benchmarks.kernels [--only NAME ...] [--output FILE.md]`. A row is timed only after its result
agreed with the definition on fresh random inputs. Peers beyond PyTorch need `pip install 'tempering[peers]'`
(Liger, tilelang); the table names those that are missing. Exits with 1 when an agreement fails or a figure
misses its "must".
"""

import argparse
import datetime
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import kernel_data as data
from benchmarks.kernel_data import TOPK, WIDTH
from benchmarks.kernel_timing import Row, error, replayed, table, timed
from benchmarks.kernels_attention import ENTRIES, attention_backward, attention_decode, attention_forward
from benchmarks.kernels_boundary import boundary, rotation
from benchmarks.kernels_experts import experts
from benchmarks.kernels_index import candidates
from benchmarks.kernels_steps import (
    COPY_BANDWIDTH,
    index_training,
    log_probability,
    memory,
    reverse_kl,
    sampling_step,
    speculation,
)
from model.ops.indexer import index_topk
from model.ops.indexer import reference as indexer_definition
from model.ops.indexer.triton import index_scores
from model.ops.pack_keys import pack_keys
from model.ops.pack_keys import reference as packing_definition
from model.ops.records import unpack
from model.ops.topk import reference as topk_definition
from model.ops.topk import topk
from model.ops.unpack_keys import unpack_keys


def top_k() -> list[Row]:
    """Exact top-k against torch.topk, which breaks ties as it likes."""
    rows = []
    for count, width, targets in (
        (64, 131072, (50, 35, 25)),
        (64, 16384, None),
        (64, 1 << 20, None),
        (1, 1 << 20, None),
        (1024, 32768, None),
    ):
        scores = [torch.randn(count, width, device="cuda") for _ in range(3)]
        ties = torch.randn(max(count, 5), width, device="cuda")
        ties[1] = 0
        ties[2] = torch.relu(ties[2] - 3)
        ties[3] = torch.round(ties[3] * 8)
        ties[4, 9:] = float("-inf")
        ties = ties if count > 1 else ties[2:3]
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


SECTIONS: dict[str, Callable[[], list[Row]]] = {
    "decode": attention_decode,
    "forward": attention_forward,
    "backward": attention_backward,
    "topk": top_k,
    "indexer": indexer,
    "candidates": candidates,
    "logprob": log_probability,
    "reverse_kl": reverse_kl,
    "sampling": sampling_step,
    "verification": speculation,
    "index_loss": index_training,
    "engram": memory,
    "packing": packing,
    "boundary": boundary,
    "rotation": rotation,
    "experts": experts,
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
        begin = time.perf_counter()
        try:
            found = SECTIONS[name]()
            print(f"{name}: {time.perf_counter() - begin:.0f} s\n{table(found)}", flush=True)
            rows += found
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
