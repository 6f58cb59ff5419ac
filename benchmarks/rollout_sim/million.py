"""A million samples in flight: the product's dispatcher and the simulator in bounded memory.

`python -m benchmarks.rollout_sim --million`. Memory holds what is in flight and nothing of what ended: the
peak must not grow between the first step and the end of the run, after as many samples again have ended. The
last line is `million M MB, G% growth`; exit status 1 above 5 % growth or 4 GB.
"""

from __future__ import annotations

import resource
import sys
import time

from benchmarks.rollout_sim.costs import Costs
from benchmarks.rollout_sim.schedulers import RULES
from benchmarks.rollout_sim.simulate import Simulation
from benchmarks.rollout_sim.trace import LongTailTrace

SAMPLES = 1_000_000
_GROWTH, _MEGABYTES = 0.05, 4000.0


def run(samples: int) -> tuple[float, float, int]:
    """Returns peak megabytes with `samples` in flight, those at the end, and how many ended in between."""
    costs = Costs(
        replicas=64,
        slots=samples // 256,
        groups_per_step=samples // 64,
        group_size=8,
        in_flight=samples,
        staleness=16,
        kv_tokens=1 << 40,
    )
    simulation = Simulation(costs, LongTailTrace(0), RULES["ours"](costs), steps=8, warm_up=0)
    simulation.start()
    assert simulation.live == samples, f"{simulation.live} samples are in flight, not {samples}"
    while simulation.version < 1:
        simulation.step()
    before, first = _peak_mb(), simulation.result.samples
    while simulation.version < 8:
        simulation.step()
    return before, _peak_mb(), simulation.result.samples - first


def main(samples: int = SAMPLES) -> int:
    """Prints the figures; returns the exit status."""
    began, worked = time.perf_counter(), time.process_time()
    before, after, ended = run(samples)
    growth = after / before - 1.0
    seconds, processor = time.perf_counter() - began, time.process_time() - worked
    print(
        f"{samples} samples in flight, {ended} trained in between, {seconds:.0f} s, "
        f"{processor:.0f} s of processor time"
    )
    print(f"million {after:.0f} MB, {100 * growth:.1f}% growth")
    return 0 if growth <= _GROWTH and after <= _MEGABYTES else 1


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
