"""A slice of the released policy at its own widths on one GPU: FP4 experts, contexts to a million tokens.

    python -m benchmarks.model_gpu_slice [--layers 12] [--experts 384] [--parts bytes,parity,decode,split]

Twelve layers of every kind with every width as published (hidden 5120, 64 heads of 512, 384 routed experts
of inner width 2304 and a shared one, vocabulary 129,280), weights random and heavy-tailed. Routed experts
are held in FP4 as a checkpoint stores them (E2M1 codes, a UE8M0 scale per 32 columns), all else in bf16; the
cache holds FP4 records (kernels read no other). Prints bytes by kind, each layer's error against the
definition in float32 with the definition's choices forced, and decode steps beside the time in which the
card could read the bytes they need. The exit status is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks import model_gpu_parity as parity
from benchmarks import model_gpu_times as times
from benchmarks.model_gpu import LONG, MILLION, SHORT, Figure
from benchmarks.model_gpu_setup import cache_of, fill, official_widths, policy_on_gpu
from model.choices import Capture
from model.ops import dispatch
from model.policy import Policy

BANDWIDTH = 4.27e12
"""Bytes a second that this card's memory gave a copy at best."""
MIDDLE = 1 << 18
STEPS = ((1, SHORT), (1, LONG), (1, MIDDLE), (1, MILLION), (16, SHORT), (16, LONG), (64, SHORT), (64, LONG))


def _clean() -> None:
    """Caches and the graphs over them hold each other: only the collector frees them."""
    gc.collect()
    torch.cuda.empty_cache()


KINDS = {
    "routed experts, FP4": ("_codes", "_scales"),
    "shared experts": ("_shared",),
    "n-gram table": ("engram.embed.",),
    "embedding and head": ("embed.weight", "head.weight"),
    "attention and indexers": (".attn.",),
}


def weight_bytes(policy: Policy) -> dict[str, int]:
    """Bytes of parameters and buffers by kind."""
    found = dict.fromkeys([*KINDS, "the rest"], 0)
    for name, tensor in [*policy.named_parameters(), *policy.named_buffers()]:
        marks = (kind for kind, marks in KINDS.items() if any(mark in name for mark in marks))
        found[next(marks, "the rest")] += tensor.nbytes
    return found


def _bytes(policy: Policy) -> Iterator[Figure]:
    kinds, gib = weight_bytes(policy), 2**30
    for kind, value in kinds.items():
        yield Figure(f"weights: {kind}", value / gib, "GiB")
    note = f"the kinds add up to {sum(kinds.values()) / gib:.2f}"
    yield Figure("weights: memory allocated", torch.cuda.memory_allocated() / gib, "GiB", note=note)
    packed = policy.blocks[0].ffn.packed
    assert packed is not None
    held = sum(s.codes.nbytes + s.scales.nbytes for s in (packed.w13, packed.w2))
    weights = sum(2 * s.codes.numel() for s in (packed.w13, packed.w2))
    yield Figure("bytes a weight of the routed experts", held / weights, "B")
    _clean()
    before = torch.cuda.memory_allocated()
    one = policy.new_cache(1, LONG, storage="packed")
    held = torch.cuda.memory_allocated() - before
    two = policy.new_cache(1, 3 * LONG, storage="packed")
    per_token = (torch.cuda.memory_allocated() - before - 2 * held) / (2 * LONG)
    del one, two
    sources = [policy.config.ratio(layer) for layer in policy.config.kv_source_layer_ids]
    note = f"records of 356 B in {len(sources)} source layers of ratios {sources}"
    what = "cache bytes a token, from allocated memory"
    yield Figure(what, per_token, "B", (890.5, 890.5, 890.5), note=note)


def _sites(errors: dict[str, float]) -> tuple[str, float, str]:
    """Worst site, its error, and all layers' errors of attention and experts."""
    sites = {k: v for k, v in errors.items() if k.endswith(("attn_out", "ffn_out"))}
    worst = max(sites, key=lambda name: sites[name])
    layers = sorted({int(name.split(".")[1]) for name in sites})
    each = [f"{sites[f'layers.{n}.attn_out']:.2g}/{sites[f'layers.{n}.ffn_out']:.2g}" for n in layers]
    return worst, sites[worst], f"worst {worst}; attention/experts by layer: {' '.join(each)}"


def _parity(policy: Policy) -> Iterator[Figure]:
    policy.fake_quant = True
    for context in (8192, MILLION):
        errors = parity.at_context(policy, context)
        _, error, note = _sites(errors)
        note = f"{note}; hidden {errors['hidden']:.2g}"
        yield Figure(f"layer error, one token at {context}", error, "", (0.03, 0.03, 0.03), note=note)
        step = errors["decode step against prefill"]
        yield Figure(f"decode step - prefill at {context}, exact mode", step, "", (0, 0, 0))
        _clean()
    for quantised, bound in ((True, 0.10), (False, 0.03)):
        policy.fake_quant = quantised
        errors = parity.forward(policy, [1500, 300, 236])
        _, error, note = _sites(errors)
        name = "keys rounded" if quantised else "keys not rounded"
        note = f"{note}; hidden {errors['hidden']:.2g}"
        bounds = (bound, bound, bound)
        yield Figure(f"layer error, pass of 2036 tokens, {name}", error, "", bounds, note=note)
    policy.fake_quant = True


@torch.no_grad()
def experts_in_use(policy: Policy, batch: int) -> list[int]:
    """How many routed experts each layer needs for one token of `batch` sequences."""
    cache = cache_of(policy, batch, SHORT)
    slots = torch.tensor(fill(policy, cache, batch, SHORT), device="cuda")
    ids = torch.randint(0, policy.config.vocab_size, (batch, 1), device="cuda")
    capture = Capture()
    policy.extend(cache, slots, ids, torch.ones_like(slots), capture=capture)
    assert capture.expert_ids is not None
    return [len(layer.unique()) for layer in capture.expert_ids.unbind(1)]


def step_bytes(policy: Policy, batch: int, context: int, used: list[int]) -> float:
    """Bytes that a decode step must read: weights in use once, and of each sequence what its layers look at.

    The head is not part of a step.
    """
    kinds, config = weight_bytes(policy), policy.config
    read = sum(kinds[kind] for kind in ("attention and indexers", "shared experts", "the rest"))
    read += kinds["routed experts, FP4"] / config.num_hidden_layers / config.n_routed_experts * sum(used)
    blocks = config.candidate_topk_blocks * config.candidate_block_size
    for layer in range(config.num_hidden_layers):
        seen = config.sliding_window * 528
        if ratio := config.ratio(layer):
            entries = context // ratio
            seen += min(config.index_topk, entries) * 288
            if layer in config.index_source_layer_ids:
                seen += 68 * (min(blocks, entries) if config.uses_candidates(layer) else entries)
        read += batch * seen
    return read


def _decode(policy: Policy) -> Iterator[Figure]:
    used, seconds = {batch: experts_in_use(policy, batch) for batch in (1, 16, 64)}, {}
    _clean()
    for batch, context in STEPS:
        step = seconds[batch, context] = times.decode(policy, batch, context)
        _clean()
        read = step_bytes(policy, batch, context, used[batch])
        bound = read / BANDWIDTH
        note = (
            f"{batch / step:.0f} tokens/s; must read {read / 1e9:.2f} GB, {1000 * bound:.2f} ms: "
            f"{bound / step:.0%} of 4.27 TB/s; {sum(used[batch]) / len(used[batch]):.0f} experts a layer"
        )
        yield Figure(f"decode step, batch {batch} at {context}", 1000 * step, "ms", note=note)
    ratio = seconds[1, MILLION] / seconds[1, SHORT]
    yield Figure("decode step at 1M / at 4K, batch 1", ratio, "x", (2.0, 1.6, 1.35))
    hidden = torch.randn(64, policy.config.hidden_size, device="cuda").bfloat16()
    for batch in (1, 64):
        step = times.median(lambda count=batch: policy.logits(hidden[:count]), 9, 3)
        bound = policy.head.weight.nbytes / BANDWIDTH  # pyright: ignore
        note = f"{bound / step:.0%} of 4.27 TB/s; not part of the steps above"
        yield Figure(f"head, batch {batch}", 1000 * step, "ms", note=note)


def _split(policy: Policy) -> Iterator[Figure]:
    for batch, context in ((1, SHORT), (1, MILLION), (16, SHORT), (64, SHORT), (64, LONG)):
        cache = cache_of(policy, batch, context)
        step = times.step_alone(policy, cache, fill(policy, cache, batch, context), context)
        parts = times.split(times.launches(step))
        note = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        yield Figure(f"kernels of a step, batch {batch} at {context}", sum(parts.values()), "ms", note=note)
        del cache, step
        _clean()


SECTIONS: dict[str, Callable[[Policy], Iterator[Figure]]] = {
    "bytes": _bytes,
    "decode": _decode,
    "split": _split,
    "parity": _parity,
}


def main() -> int:
    """Run the sections and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="12, or 6 for a shorter policy")
    parser.add_argument("--experts", type=int, default=384, help="routed experts of a layer")
    parser.add_argument("--parts", default=",".join(SECTIONS), help="sections, separated by commas")
    given = parser.parse_args()
    names = given.parts.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"unknown part {unknown[0]!r}: choose among {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA device and there is none")
    begin = time.perf_counter()
    policy, figures = policy_on_gpu(official_widths(given.layers, given.experts), packed=True), list[Figure]()
    torch.cuda.synchronize()
    print(f"weights: {time.perf_counter() - begin:.0f} s", flush=True)
    for name in names:
        begin = time.perf_counter()
        for figure in SECTIONS[name](policy):
            figures.append(figure)
            print(figure.line(), flush=True)
        _clean()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print("paths:", ", ".join(f"{op} {path}" for op, path in dispatch.paths().items()))
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| figure | ours | must / good / stretch | reached | note |\n| --- | --- | --- | --- | --- |")
    for figure in figures:
        print(figure.line())
    missed = sum(figure.reached == "MISSED" for figure in figures)
    print(f"\nmissed {missed} of {sum(figure.targets is not None for figure in figures)}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
