"""`python -m benchmarks.sanitize`: every kernel of `model/ops` under compute-sanitizer, memory and races.

Needs a card, torch, Triton and `compute-sanitizer` on the PATH. One line a tool, case and kernel. Ends with
1 on a report, on a kernel that no case launched, and where memcheck misses a write past the end on purpose.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck")
GROUPS = (
    ("attention", "site"),
    ("attention_plain", "attention_exact", "attention_few_heads", "site_exact"),
    ("decode_few", "decode_many", "decode_exact"),
    ("decode_few_heads", "decode_inputs", "packing"),
    ("choices", "candidates", "index_decode"),
    ("head", "positions", "memory", "exact_linear"),
    ("boundary", "experts", "packed_experts"),
    ("index_loss", "index_loss_few_heads"),
    ("sampling", "verification"),
    ("beyond",),
)
"""Cases that share a process: starting one costs more than most cases."""

EXPECTED = {("memcheck", "beyond"): "a write past the end, made on purpose"}
"""Reports without which the run fails."""

KNOWN = {
    "_forward": ("attention", "site"),
    "_kept_query_gradient": ("attention", "site", "site_exact"),
    "_decode": ("decode_few", "decode_many", "decode_exact"),
    "_specialised": ("experts",),
    "_window_backward": ("positions",),
}
"""Kernels, and the cases in which what racecheck reports of them is no error.

It does not follow the barriers that one thread signals for its warpgroup in kernels with specialised warps;
in the last one several lanes write one word, each the same value: a sum that all of them hold.
"""

_SUMMARY = re.compile(r"^========= (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.M)
_PLACE = re.compile(r"^=+ .*?\bat (?:0x[0-9a-f]+ in )?([A-Za-z_]\w*)", re.M)
_LAUNCHED = re.compile(r"^launched (\w+) (\S+) (\d+)$", re.M)


@dataclass(frozen=True)
class Found:
    """What a process printed: launches by (case, kernel), errors, and how often each kernel is named."""

    launched: dict[tuple[str, str], int]
    errors: int | None
    kernels: Counter[str]
    text: str


def read(text: str) -> Found:
    """Take the output of a process apart; `errors` is None where the tool printed no summary."""
    summaries = [int(a or b) for a, b in _SUMMARY.findall(text)]
    launched = {(case, kernel): int(count) for case, kernel, count in _LAUNCHED.findall(text)}
    return Found(launched, sum(summaries) if summaries else None, Counter(_PLACE.findall(text)), text)


def kernels_of(package: str) -> set[str]:
    """Full names of all kernels that a module of a package launches, as in `_kernel[grid](...)`."""
    names = set()
    for path in (ROOT / package.replace(".", "/")).rglob("*.py"):
        tree = list(ast.walk(ast.parse(path.read_text())))
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        imported = {a.name: n.module for n in tree if isinstance(n, ast.ImportFrom) for a in n.names}
        for node in tree:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                kernel = node.func.value
                if isinstance(kernel, ast.Name):
                    names.add(f"{imported.get(kernel.id, module)}.{kernel.id}")
    return names


def run_cases(names: list[str]) -> None:
    """Run cases in this process and print what they launched."""
    import torch
    from triton.runtime.jit import JITFunction

    from benchmarks.sanitize_cases import CASES

    run, launched = JITFunction.run, Counter[str]()

    def counted(self: JITFunction, *args: object, **kwargs: object) -> object:
        launched[f"{self.fn.__module__}.{self.__name__}"] += 1
        return run(self, *args, **kwargs)

    JITFunction.run = counted
    for name in names:
        torch.manual_seed(0)
        launched.clear()
        CASES[name]()
        torch.cuda.synchronize()
        for kernel, count in launched.items():
            print(f"launched {name} {kernel} {count}", flush=True)


def _checked(tool: str, cases: tuple[str, ...], deadline: float) -> Found:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if tool == "memcheck":
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20"]
    command += [sys.executable, "-m", "benchmarks.sanitize", "--run", *cases]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline - time.time()
        )
        text = done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        text = "".join(t.decode() for t in (stopped.stdout, stopped.stderr) if t) + "\nout of time"
    return read(text)


def report(tool: str, cases: tuple[str, ...], found: Found, seconds: float) -> bool:
    """Print a line for each kernel; whether all is well."""
    expected = [EXPECTED[tool, c] for c in cases if (tool, c) in EXPECTED]
    known = {k for k, where in KNOWN.items() if tool == "racecheck" and {*where} & {*cases}}
    ours = {kernel.rpartition(".")[2] for _, kernel in found.launched}
    foreign = set(found.kernels) - ours
    if expected:
        good = bool(found.errors)
    else:
        excused = bool(found.errors and found.kernels) and set(found.kernels) <= known | foreign
        good = (found.errors == 0 or excused) and {case for case, _ in found.launched} == set(cases)
    for (case, kernel), count in found.launched.items():
        told = found.kernels[kernel.rpartition(".")[2]]
        result = f"{told} reports" if told else "no report"
        print(f"{tool} {case} {kernel} launched {count}: {result}", flush=True)
    notes = [f"expected: {reason}" for reason in expected] + [f"known: {name}" for name in known & ours]
    notes += [f"in a library: {name}" for name in foreign]
    errors = "no summary" if found.errors is None else f"{found.errors} errors"
    print(f"{tool} {' '.join(cases)}: {errors} in {seconds:.0f} s {'; '.join(notes)}".rstrip(), flush=True)
    if not good:
        print(f"FAILED {tool} {' '.join(cases)}:\n{found.text[-6000:]}", flush=True)
    return good


def main() -> int:
    """Run groups of cases side by side, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs="+", help="run these cases in this process, without a tool")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--cases", nargs="+", help="only groups with one of these cases")
    parser.add_argument("--workers", type=int, default=6, help="processes at once")
    parser.add_argument("--seconds", type=float, default=1800.0, help="after which what runs is stopped")
    options = parser.parse_args()
    if options.run:
        run_cases(options.run)
        return 0
    begin = time.time()
    wanted = set(options.cases or ())
    jobs = [(t, g) for g in GROUPS for t in options.tools if not wanted or wanted & set(g)]
    jobs = [(t, g) for t, g in jobs if g != ("beyond",) or t == "memcheck"]
    launched, good = set(), True

    def check(job: tuple[str, tuple[str, ...]]) -> tuple[Found, float]:
        started = time.time()
        return _checked(*job, begin + options.seconds), time.time() - started

    with ThreadPoolExecutor(options.workers) as pool:
        for job, (found, seconds) in zip(jobs, pool.map(check, jobs), strict=True):
            good &= report(*job, found, seconds)
            launched |= {kernel for _, kernel in found.launched}
    if not wanted and (missing := kernels_of("model.ops") - launched):
        print(f"FAILED no case launches {', '.join(sorted(missing))}")
        good = False
    print(
        f"sanitize: {'no report' if good else 'FAILED'}, {len(launched)} kernels, {time.time() - begin:.0f} s"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
