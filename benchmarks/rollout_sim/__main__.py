"""How much faster sample-level dispatch with interruption is than other ways to schedule rollouts, simulated.

`python -m benchmarks.rollout_sim [--seeds N] [--steps N] [--trace FILE] [--costs FILE] [--picture FILE]`
runs seven rules on identical traces in virtual time, prints a table, writes a picture, and ends with the line
`speedup X idle Y% ks Z`: trained tokens/s against the synchronous barrier, the engines' idle share, and the
Kolmogorov-Smirnov distance of trained from source lengths. Exit status 1 when a target is missed, 2 for input
that cannot be used. Tokens beyond the staleness bound are masked under every rule and count for none.

All rules have the same slots and the same limit on live samples (`in_flight`). Rules that count groups hold a
place until a group's slowest member ends; that is what sample-level dispatch saves, so its lead over them
shrinks as the limit grows (printed as a second curve). The last row, for reference and outside the targets,
counts AReaL's capacity in single samples, as prime-rl's permits do: it is as fast as ours. An agent's trace
(30 appended tokens to a sampled one, 50 to 200 turns, limited caches) is a second table without targets.

`--trace FILE`: {"format": 1, "samples": [{"input": [500, 200], "output": [900, 80], "tool_s": [1.5]}, ...]}:
for each of n turns the tokens appended before it and the tokens sampled in it, and the n - 1 tools' seconds
between them. `group_size` consecutive samples make a group; a run longer than the file begins it again.
`--costs FILE`: one JSON object with fields of `benchmarks.rollout_sim.costs.Costs`, where each is explained.
With either file the agent's table is left out, and with a trace also the curve over the tail exponent.

`--validate` compares predicted with measured times on the real engine (`benchmarks.rollout_sim.validate`),
and `--million` runs a million samples in flight (`benchmarks.rollout_sim.million`); both instead of the rest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.rollout_sim.costs import Costs, InputError, load_costs
from benchmarks.rollout_sim.jobs import Job, Runner, curve, run_job
from benchmarks.rollout_sim.report import Curve, draw, judge, table
from benchmarks.rollout_sim.schedulers import RULES
from benchmarks.rollout_sim.stats import histogram, pool
from benchmarks.rollout_sim.trace import Work, load_trace

_ALPHAS = (1.2, 1.5, 2.0, 3.0)
_CURVE_RULES = ("barrier", "areal", "ours")
_AGENT_COSTS = Costs(slots=16, groups_per_step=8, in_flight=128, kv_tokens=8_000_000)


def show(run: Runner, options: argparse.Namespace, costs: Costs, file: tuple[Work, ...]) -> int:
    """Runs everything, prints and draws it; returns the exit status."""
    job = Job(
        rule="ours", costs=costs, seed=0, steps=options.steps, warm_up=options.steps * 2 // 5, file=file
    )
    seeds = range(options.seeds)
    runs = run([replace(job, rule=rule, seed=seed) for rule in RULES for seed in seeds])
    results = {rule: pool(runs[i * options.seeds : (i + 1) * options.seeds]) for i, rule in enumerate(RULES)}
    source = np.sum([histogram(replace(job, seed=seed).trace().source_lengths()) for seed in seeds], axis=0)
    print(costs)
    print(table(results, source))
    short = replace(job, steps=max(2, options.steps * 3 // 5), warm_up=options.steps * 3 // 10)
    caps = [costs.in_flight * k // 2 for k in (2, 3, 4, 6)]
    wide = [(cap, replace(short, costs=replace(costs, in_flight=cap))) for cap in caps]
    cap = curve(run, wide, ["areal"])
    _print_curve("limit on live samples", cap)
    tail: Curve = {}
    if not file:
        tail = curve(run, [(a, replace(short, alpha=a)) for a in _ALPHAS], ["barrier", "areal"])
        _print_curve("tail exponent", tail)
    if not file and options.costs is None:
        agent = Job(rule="ours", costs=_AGENT_COSTS, seed=0, steps=10, warm_up=4, alpha=0.0)
        agents = run([replace(agent, rule=rule) for rule in _CURVE_RULES])
        print("agent trace:", _AGENT_COSTS)
        print(table(dict(zip(_CURVE_RULES, agents, strict=True))))
    draw(options.picture, results, tail, cap, costs)
    print(f"picture {options.picture}")
    verdict = judge(results, source, costs.staleness)
    for text in verdict.missed:
        print(f"MISSED: {text}")
    ideal = costs.ideal_tokens_per_s / results["barrier"].tokens_per_s
    print(f"against the barrier an engine with every slot decoding all the time would reach {ideal:.2f}")
    print(
        f"against '{verdict.best_other}' {verdict.against_other:.2f}; ks of resume {verdict.ks:.4f}, of "
        f"restart {verdict.ks_restart:.4f}, sampling noise (1 %) {verdict.noise:.4f}"
    )
    print(f"speedup {verdict.speedup:.2f} idle {100 * verdict.idle:.1f}% ks {verdict.ks:.4f}")
    return 1 if verdict.missed else 0


def _print_curve(setting: str, points: Curve) -> None:
    for name, line in points.items():
        print(f"ours {name} over {setting}: " + "  ".join(f"{x:g}: {y:.2f}" for x, y in line))


def _other(validating: bool) -> int:
    if validating:
        from benchmarks.rollout_sim import validate  # needs torch

        return validate.main()
    from benchmarks.rollout_sim import million

    return million.main()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout_sim", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps a run; two fifths are warm-up")
    parser.add_argument("--trace", type=Path, help="samples of a file in place of drawn ones")
    parser.add_argument("--costs", type=Path, help="another cost table")
    parser.add_argument("--picture", type=Path, default=Path("rollout_sim.png"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--validate", action="store_true", help="compare with the real engine instead")
    parser.add_argument("--million", action="store_true", help="run a million samples in flight instead")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.steps < 4 or options.processes < 1:
        parser.error("--seeds and --processes must be at least 1, --steps at least 4")
    if options.validate or options.million:
        if options.trace or options.costs or (options.validate and options.million):
            parser.error("--validate and --million stand alone: they have a trace and costs of their own")
        return _other(options.validate)
    try:
        costs = load_costs(options.costs) if options.costs else Costs()
        file = tuple(load_trace(options.trace)) if options.trace else ()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.processes == 1:
        return show(lambda jobs: [run_job(job) for job in jobs], options, costs, file)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as workers:
        return show(lambda jobs: list(workers.map(run_job, jobs)), options, costs, file)


if __name__ == "__main__":
    sys.exit(main())
