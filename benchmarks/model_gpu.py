"""The policy on one GPU: training, prefill, decoding, exact mode, memory, and what each kernel gives.

    python -m benchmarks.model_gpu [--parts parity,exact,turns,prefill,decode,launches,train,ablation]

The policy has official attention widths, 12 layers of every kind and 1.9 B random, heavy-tailed weights
(`benchmarks.model_gpu_setup`). The peer is a dense model of equal size from transformers, with Liger's
kernels when they are installed (`benchmarks.model_gpu_peer`; `pip install 'tempering[hf,peers]'`). The last
lines are a table of figures with what must be reached; the exit status is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import model_gpu_parity as parity
from benchmarks import model_gpu_peer as peer
from benchmarks import model_gpu_report as report
from benchmarks import model_gpu_times as times
from benchmarks import model_gpu_turns as turns
from benchmarks.model_gpu_report import LONG, MILLION, SHORT, Figure, clean, sites
from benchmarks.model_gpu_setup import cache_of, fill, policy_on_gpu
from model.diagnostics.exactness import differences
from model.ops import dispatch
from model.policy import Policy

PEAK = 989e12
"""Dense bf16 operations a second by the datasheet, which utilisation refers to."""


def _parity(policy: Policy) -> Iterator[Figure]:
    for quantised, bound in ((False, 0.03), (True, 0.10)):
        policy.fake_quant = quantised
        errors = parity.forward(policy, [1500, 300, 236])
        layers = sites(errors)
        worst = max(layers, key=lambda name: layers[name])
        name = "keys rounded" if quantised else "keys not rounded"
        note = f"worst {worst}; first layer {layers['layers.0.attn_out']:.2g}, hidden {errors['hidden']:.2g}"
        yield Figure(
            f"layer error, training pass, {name}", layers[worst], "", (bound, bound, bound), note=note
        )
    for context in (8192, MILLION):
        errors = parity.at_context(policy, context)
        step = errors["decode step against prefill"]
        note, error = f"hidden {errors['hidden']:.2g}", max(sites(errors).values())
        yield Figure(f"layer error, one token at {context}", error, "", (0.03, 0.03, 0.03), note=note)
        yield Figure(f"decode step - prefill at {context}, exact mode", step, "", (0, 0, 0))


def _exact(policy: Policy) -> Iterator[Figure]:
    for name, value in parity.exact(policy).items():
        yield Figure(f"max difference of log-probability, {name}", value, "", (0, 0, 0))
    policy.exact = True
    ids = torch.randint(0, policy.config.vocab_size, (1364,), device=policy.device)
    found = differences(policy, ids, (700, 561, 39))
    note = f"of {3 * 64} in three ways; first: {found[0]}" if found else ""
    yield Figure(
        "decoded tokens whose results differ under way from training", len(found), "", (0, 0, 0), note=note
    )
    sampler, trainer = [], []
    for exact in (False, True):
        policy.exact = exact
        sampler.append(times.sampler_step(policy, 64, SHORT))
        clean()
        trainer.append(times.train_step(policy, 8192, 8))
        clean()
    policy.exact = False
    targets = (1.25, 1.1, 1.05)
    note, ratio = f"{1000 * sampler[1]:.2f} ms, fast {1000 * sampler[0]:.2f}", sampler[1] / sampler[0]
    yield Figure("exact / fast, sampler step, batch 64", ratio, "x", targets, note=note)
    note, ratio = f"{1000 * trainer[1]:.0f} ms, fast {1000 * trainer[0]:.0f}", trainer[1] / trainer[0]
    yield Figure("exact / fast, training step", ratio, "x", targets, note=note)


def _turns(policy: Policy) -> Iterator[Figure]:
    window = policy.config.sliding_window
    results = (0, 1, window - 1, window, window + 1, 3 * window)
    for replay in ("bounded", "exact", "off"):
        for disturbance in turns.DISTURBANCES:
            found = turns.play(policy, replay, disturbance, results)
            note = f"{found.claimed} of {found.tokens} tokens claimed, {found.replays} windows began anew"
            name = f"max difference over turns, replay {replay}, {disturbance}"
            yield Figure(name, found.largest, "", (0, 0, 0), note=note)
            clean()
    policy.exact = False


def _prefill(policy: Policy) -> Iterator[Figure]:
    half, whole = times.prefill(policy, LONG, 128), times.prefill(policy, LONG, None)
    note = f"{LONG / half:.0f} against {LONG / whole:.0f} tokens/s"
    name = "prefill of 64K, all layers / encoder alone"
    yield Figure(name, whole / half, "x", (1.7, 1.85, 1.95), True, note)
    for tokens in (8192, 32768):
        found = _of_peer(policy, lambda model, tokens=tokens: peer.prefill(model, tokens))
        for decoded, name in ((128, "decoder at its end"), (None, "all layers")):
            clean()
            torch.cuda.reset_peak_memory_stats()
            seconds = times.prefill(policy, tokens, decoded)
            memory = torch.cuda.max_memory_allocated() / 2**30
            yield _against(f"prefill at {tokens}, {name}", tokens, seconds, memory, found)
    yield report.cache_bytes(policy)


def _decode(policy: Policy) -> Iterator[Figure]:
    steps = (
        (1, SHORT),
        (1, LONG),
        (1, 1 << 18),
        (1, MILLION),
        (16, SHORT),
        (16, LONG),
        (64, SHORT),
        (64, LONG),
    )
    seconds = {}
    for batch, context, step in report.decode_seconds(policy, steps):
        seconds[batch, context] = step
        name, note = f"decode from packed keys, batch {batch} at {context}", f"{1000 * step:.2f} ms a step"
        yield Figure(name, batch / step, "tokens/s", note=note)
    yield report.cost_of_context(seconds)
    yield from report.kernels_of_steps(policy, ((1, SHORT), (64, SHORT), (1, MILLION)))


def _launches(policy: Policy) -> list[Figure]:
    cache = cache_of(policy, 64, SHORT)
    step = times.step_alone(policy, cache, fill(policy, cache, 64, SHORT), SHORT)
    decoded = times.of_a_layer(times.launches(step), 7)
    del cache
    cache = cache_of(policy, 1, 8192)
    ids = torch.randint(0, policy.config.vocab_size, (1, 8192), device="cuda")

    def prefill() -> None:
        slots = torch.tensor([cache.allocate()], device="cuda")
        with torch.no_grad():
            policy.extend(cache, slots, ids, torch.tensor([8192]))
        cache.free(int(slots[0]))

    prefill()
    filled = times.of_a_layer(times.launches(prefill), 2)
    short = [" ".join(name.replace("void ", "")[:24] for name in names) for names in (filled, decoded)]
    return [
        Figure("kernels in a Reuse layer, prefill", len(filled), "", (25, 18, 15), note=short[0]),
        Figure("kernels in a Reuse layer, decode of 64", len(decoded), "", (20, 14, 11), note=short[1]),
    ]


def _train(policy: Policy) -> Iterator[Figure]:
    ours = {}
    for tokens in (8192, 32768):
        clean()
        torch.cuda.reset_peak_memory_stats()
        ours[tokens] = times.train_step(policy, tokens, 1), torch.cuda.max_memory_allocated() / 2**30
    seconds = ours[8192][0]
    rate = times.operations(policy, 8192) / seconds
    note = f"{rate / 1e12:.0f} TFLOP/s of 989, {8192 / seconds:.0f} tokens/s"
    yield Figure("training, utilisation at 8K", 100 * rate / PEAK, "%", (25, 35, 45), True, note)
    for tokens, (seconds, memory) in ours.items():
        found = _of_peer(policy, lambda model, tokens=tokens: peer.train_step(model, tokens))
        yield _against(f"training at {tokens}", tokens, seconds, memory, found)


def _against(
    what: str, tokens: int, seconds: float, memory: float, found: tuple[float, float, str]
) -> Figure:
    """Our speed and peak memory beside the peer's."""
    other, peak, name = found
    if not other:
        note = f"{tokens / seconds:.0f} tokens/s, peak {memory:.1f} GiB; {name}"
        return Figure(f"{what}, speed / dense peer's", float("nan"), "x", note=note)
    speeds = f"{tokens / seconds:.0f} against {tokens / other:.0f} tokens/s"
    note = f"{speeds}; peak {memory:.1f} against {peak:.1f} GiB; {name}"
    return Figure(f"{what}, speed / dense peer's", other / seconds, "x", note=note)


def _of_peer(policy: Policy, run: Callable[[Any], float]) -> tuple[float, float, str]:
    """Seconds and peak GiB of the dense peer without the policy's weights, and its name; or 0 and why not."""
    clean()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        model = peer.dense(sum(p.numel() for p in policy.parameters()), policy.config.vocab_size)
        weights = sum(p.numel() for p in model.parameters())
        seconds = run(model)
        peak = (torch.cuda.max_memory_allocated() - held) / 2**30
        return seconds, peak, f"{weights / 1e9:.2f} B weights, {peer.name()}"
    except ImportError as error:
        return 0.0, 0.0, f"{error.name} is not installed"
    except torch.OutOfMemoryError:
        return 0.0, 0.0, f"out of memory: {peer.name()}"


_OPS = [
    "table_attention",
    "hyper_update",
    "hyper_coefficients",
    "route",
    "grouped",
    "activated",
    "combine",
    "latents",
    "index_heads",
    "index_topk",
    "pack_keys",
    "unpack_keys",
]


def _ablation(policy: Policy) -> Iterator[Figure]:
    full = times.prefill(policy, 4096, None)
    yield Figure("prefill of 4096 tokens, all layers", 4096 / full, "tokens/s")
    for op in _OPS:
        with dispatch.without(op):
            slower = times.prefill(policy, 4096, None)
        name, note = f"the same without the kernel of {op}", f"{full / slower:.2f}x"
        yield Figure(name, 4096 / slower, "tokens/s", note=note)


SECTIONS: report.Sections = {
    "parity": _parity,
    "exact": _exact,
    "turns": _turns,
    "prefill": _prefill,
    "decode": _decode,
    "launches": _launches,
    "train": _train,
    "ablation": _ablation,
}


def main() -> int:
    """Run the sections and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = report.options(parser, SECTIONS).parts
    figures = report.run(SECTIONS, parts, policy_on_gpu())
    return report.verdict(figures, torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
