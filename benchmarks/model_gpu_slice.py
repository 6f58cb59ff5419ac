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
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks import model_gpu_parity as parity
from benchmarks import model_gpu_report as report
from benchmarks import model_gpu_times as times
from benchmarks.model_gpu_report import LONG, MILLION, SHORT, Figure, clean, sites
from benchmarks.model_gpu_setup import cache_of, fill, official_widths, policy_on_gpu
from model.choices import Capture
from model.policy import Policy

BANDWIDTH = 4.27e12
"""Bytes a second that this card's memory gave a copy at best."""
MIDDLE = 1 << 18
STEPS = ((1, SHORT), (1, LONG), (1, MIDDLE), (1, MILLION), (16, SHORT), (16, LONG), (64, SHORT), (64, LONG))


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
    yield report.cache_bytes(policy)


def _by_layer(errors: dict[str, float]) -> tuple[float, str]:
    """The worst error, and a note of where it is and of all layers' errors of attention and experts."""
    found = sites(errors)
    worst = max(found, key=lambda name: found[name])
    layers = sorted({int(name.split(".")[1]) for name in found})
    each = [f"{found[f'layers.{n}.attn_out']:.2g}/{found[f'layers.{n}.ffn_out']:.2g}" for n in layers]
    note = f"worst {worst}; attention/experts by layer: {' '.join(each)}; hidden {errors['hidden']:.2g}"
    return found[worst], note


def _parity(policy: Policy) -> Iterator[Figure]:
    policy.fake_quant = True
    for context in (8192, MILLION):
        errors = parity.at_context(policy, context)
        error, note = _by_layer(errors)
        yield Figure(f"layer error, one token at {context}", error, "", (0.03, 0.03, 0.03), note=note)
        step = errors["decode step against prefill"]
        yield Figure(f"decode step - prefill at {context}, exact mode", step, "", (0, 0, 0))
        clean()
    for quantised, bound in ((True, 0.10), (False, 0.03)):
        policy.fake_quant = quantised
        errors = parity.forward(policy, [1500, 300, 236])
        error, note = _by_layer(errors)
        name = "keys rounded" if quantised else "keys not rounded"
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
    clean()
    for batch, context, step in report.decode_seconds(policy, STEPS):
        seconds[batch, context] = step
        read = step_bytes(policy, batch, context, used[batch])
        bound = read / BANDWIDTH
        note = (
            f"{batch / step:.0f} tokens/s; must read {read / 1e9:.2f} GB, {1000 * bound:.2f} ms: "
            f"{bound / step:.0%} of 4.27 TB/s; {sum(used[batch]) / len(used[batch]):.0f} experts a layer"
        )
        yield Figure(f"decode step, batch {batch} at {context}", 1000 * step, "ms", note=note)
    yield report.cost_of_context(seconds)
    hidden = torch.randn(64, policy.config.hidden_size, device="cuda").bfloat16()
    for batch in (1, 64):
        step = times.median(lambda count=batch: policy.logits(hidden[:count]), 9, 3)
        bound = policy.head.weight.nbytes / BANDWIDTH  # pyright: ignore
        note = f"{bound / step:.0%} of 4.27 TB/s; not part of the steps above"
        yield Figure(f"head, batch {batch}", 1000 * step, "ms", note=note)


def _split(policy: Policy) -> Iterator[Figure]:
    steps = ((1, SHORT), (1, MILLION), (16, SHORT), (64, SHORT), (64, LONG))
    yield from report.kernels_of_steps(policy, steps)


SECTIONS: report.Sections = {
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
    given = report.options(parser, SECTIONS)
    begin = time.perf_counter()
    policy = policy_on_gpu(official_widths(given.layers, given.experts), packed=True)
    torch.cuda.synchronize()
    print(f"weights: {time.perf_counter() - begin:.0f} s", flush=True)
    figures = report.run(SECTIONS, given.parts, policy)
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    return report.verdict(figures, torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
