"""The policy on one GPU: training, prefill, decoding, exact mode, memory, and what each kernel gives.

    python -m benchmarks.model_gpu [--parts parity,exact,turns,prefill,decode,launches,train,ablation]

The policy has official attention widths, 12 layers of every kind and 1.9 B random, heavy-tailed weights
(`benchmarks.model_gpu_setup`). The peer is a dense model of equal size from transformers, with Liger's
kernels when they are installed (`benchmarks.model_gpu_peer`; `pip install 'tempering[hf,peers]'`). The last
lines are a table of figures with what must be reached; the exit status is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import model_gpu_parity as parity
from benchmarks import model_gpu_peer as peer
from benchmarks import model_gpu_times as times
from benchmarks import model_gpu_turns as turns
from benchmarks.model_gpu_setup import cache_of, fill, policy_on_gpu
from model.ops import dispatch
from model.policy import Policy

PEAK = 989e12
"""Dense bf16 operations a second by the datasheet, which utilisation refers to."""
LONG, SHORT, MILLION = 65536, 4096, 1 << 20


@dataclass
class Figure:
    """One line of the table; `targets` are must, good and stretch."""

    what: str
    value: float
    unit: str = ""
    targets: tuple[float, float, float] | None = None
    least: bool = False
    """Whether the value must be at least the target; otherwise at most."""
    note: str = ""

    @property
    def reached(self) -> str:
        """The best target that is met."""
        if self.targets is None:
            return "-"
        met = [self.value >= t if self.least else self.value <= t for t in self.targets]
        names = [name for name, ok in zip(("must", "good", "stretch"), met, strict=True) if ok]
        return names[-1] if names else "MISSED"

    def line(self) -> str:
        """A row of the Markdown table."""
        targets = "-" if self.targets is None else " / ".join(f"{t:g}" for t in self.targets)
        return f"| {self.what} | {self.value:.4g} {self.unit} | {targets} | {self.reached} | {self.note} |"


def _clean() -> None:
    """Caches and the graphs over them hold each other: only the collector frees them."""
    gc.collect()
    torch.cuda.empty_cache()


def _parity(policy: Policy) -> list[Figure]:
    rows = []
    for quantised, bound in ((False, 0.03), (True, 0.10)):
        policy.fake_quant = quantised
        errors = parity.forward(policy, [1500, 300, 236])
        sites = {k: v for k, v in errors.items() if k.endswith(("attn_out", "ffn_out"))}
        worst = max(sites, key=lambda name: sites[name])
        name = "keys rounded" if quantised else "keys not rounded"
        note = f"worst {worst}; first layer {sites['layers.0.attn_out']:.2g}, hidden {errors['hidden']:.2g}"
        rows.append(Figure(f"layer error, training pass, {name}", sites[worst], "", (bound,) * 3, note=note))
    for context in (8192, MILLION):
        errors = parity.at_context(policy, context)
        sites = {k: v for k, v in errors.items() if k.endswith(("attn_out", "ffn_out"))}
        step = errors["decode step against prefill"]
        note = f"hidden {errors['hidden']:.2g}"
        rows += [
            Figure(f"layer error, one token at {context}", max(sites.values()), "", (0.03,) * 3, note=note),
            Figure(f"decode step - prefill at {context}, exact mode", step, "", (0, 0, 0)),
        ]
    return rows


def _exact(policy: Policy) -> list[Figure]:
    rows = [
        Figure(f"max difference of log-probability, {name}", value, "", (0, 0, 0))
        for name, value in parity.exact(policy).items()
    ]
    sampler, trainer = [], []
    for exact in (False, True):
        policy.exact = exact
        sampler.append(times.decode(policy, 64, SHORT))
        _clean()
        trainer.append(times.train_step(policy, 8192, 8))
        _clean()
    policy.exact = False
    targets = (1.25, 1.1, 1.05)
    note = f"{1000 * sampler[1]:.2f} ms, fast {1000 * sampler[0]:.2f}"
    rows.append(
        Figure("exact / fast, sampler step, batch 64", sampler[1] / sampler[0], "x", targets, note=note)
    )
    note = f"{1000 * trainer[1]:.0f} ms, fast {1000 * trainer[0]:.0f}"
    rows.append(Figure("exact / fast, training step", trainer[1] / trainer[0], "x", targets, note=note))
    return rows


def _turns(policy: Policy) -> list[Figure]:
    rows, window = [], policy.config.sliding_window
    results = (0, 1, window - 1, window, window + 1, 3 * window)
    for replay in ("bounded", "exact", "off"):
        for disturbance in turns.DISTURBANCES:
            found = turns.play(policy, replay, disturbance, results)
            note = f"{found.claimed} of {found.tokens} tokens claimed, {found.replays} windows began anew"
            name = f"max difference over turns, replay {replay}, {disturbance}"
            rows.append(Figure(name, found.largest, "", (0, 0, 0), note=note))
            _clean()
    policy.exact = False
    return rows


def _prefill(policy: Policy) -> list[Figure]:
    half, whole = times.prefill(policy, LONG, 128), times.prefill(policy, LONG, None)
    note = f"{LONG / half:.0f} against {LONG / whole:.0f} tokens/s"
    rows = [
        Figure("prefill of 64K, all layers / encoder alone", whole / half, "x", (1.7, 1.85, 1.95), True, note)
    ]
    for tokens in (8192, 32768):
        found = _of_peer(policy, lambda model, tokens=tokens: peer.prefill(model, tokens))
        for decoded, name in ((128, "decoder at its end"), (None, "all layers")):
            _clean()
            torch.cuda.reset_peak_memory_stats()
            seconds = times.prefill(policy, tokens, decoded)
            memory = torch.cuda.max_memory_allocated() / 2**30
            rows.append(_against(f"prefill at {tokens}, {name}", tokens, seconds, memory, found))
    _clean()
    before = torch.cuda.memory_allocated()
    one = policy.new_cache(1, LONG, storage="packed")
    held = torch.cuda.memory_allocated() - before
    two = policy.new_cache(1, 3 * LONG, storage="packed")
    more = torch.cuda.memory_allocated() - before - held
    per_token = (more - held) / (2 * LONG)
    del one, two
    rows.append(
        Figure(
            "cache bytes a token, from allocated memory", per_token, "B", (890.5,) * 3, note="890 are keys"
        )
    )
    return rows


def _decode(policy: Policy) -> list[Figure]:
    rows, seconds = [], {}
    for batch, contexts in ((1, (SHORT, LONG, 1 << 18, MILLION)), (16, (SHORT, LONG)), (64, (SHORT, LONG))):
        for context in contexts:
            seconds[batch, context] = times.decode(policy, batch, context)
            _clean()
            speed, step = batch / seconds[batch, context], 1000 * seconds[batch, context]
            rows.append(
                Figure(
                    f"decode from packed keys, batch {batch} at {context}",
                    speed,
                    "tokens/s",
                    note=f"{step:.2f} ms a step",
                )
            )
    ratio = seconds[1, MILLION] / seconds[1, SHORT]
    rows.append(Figure("decode step at 1M / at 4K, batch 1", ratio, "x", (2.0, 1.6, 1.35)))
    for batch, context in ((1, SHORT), (64, SHORT), (1, MILLION)):
        cache = cache_of(policy, batch, context)
        step = times.step_alone(policy, cache, fill(policy, cache, batch, context), context)
        parts = times.split(times.launches(step))
        note = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        rows.append(
            Figure(f"kernels of a step, batch {batch} at {context}", sum(parts.values()), "ms", note=note)
        )
        del cache, step
        _clean()
    return rows


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


def _train(policy: Policy) -> list[Figure]:
    rows, ours = [], {}
    for tokens in (8192, 32768):
        _clean()
        torch.cuda.reset_peak_memory_stats()
        ours[tokens] = times.train_step(policy, tokens, 1), torch.cuda.max_memory_allocated() / 2**30
    seconds = ours[8192][0]
    rate = times.operations(policy, 8192) / seconds
    note = f"{rate / 1e12:.0f} TFLOP/s of 989, {8192 / seconds:.0f} tokens/s"
    rows.append(Figure("training, utilisation at 8K", 100 * rate / PEAK, "%", (25, 35, 45), True, note))
    for tokens, (seconds, memory) in ours.items():
        found = _of_peer(policy, lambda model, tokens=tokens: peer.train_step(model, tokens))
        rows.append(_against(f"training at {tokens}", tokens, seconds, memory, found))
    return rows


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
    _clean()
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


def _ablation(policy: Policy) -> list[Figure]:
    full = times.prefill(policy, 4096, None)
    rows = [Figure("prefill of 4096 tokens, all layers", 4096 / full, "tokens/s")]
    for op in _OPS:
        with dispatch.without(op):
            slower = times.prefill(policy, 4096, None)
        rows.append(
            Figure(
                f"the same without the kernel of {op}",
                4096 / slower,
                "tokens/s",
                note=f"{full / slower:.2f}x",
            )
        )
    return rows


SECTIONS: dict[str, Callable[[Policy], list[Figure]]] = {
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
    parser.add_argument("--parts", default=",".join(SECTIONS), help="sections, separated by commas")
    names = parser.parse_args().parts.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"unknown part {unknown[0]!r}: choose among {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.error("this benchmark measures a CUDA device and there is none")
    policy, figures = policy_on_gpu(), list[Figure]()
    for name in names:
        begin = time.perf_counter()
        found = SECTIONS[name](policy)
        _clean()
        figures += found
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
        for figure in found:
            print(figure.line(), flush=True)
    print("paths:", ", ".join(f"{op} {path}" for op, path in dispatch.paths().items()))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| figure | ours | must / good / stretch | reached | note |\n| --- | --- | --- | --- | --- |")
    for figure in figures:
        print(figure.line())
    missed = sum(figure.reached == "MISSED" for figure in figures)
    print(f"\nmissed {missed} of {sum(figure.targets is not None for figure in figures)}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
