"""A model of transformers learns to use the calculator: `python -m benchmarks.hf_calc [--steps 60]`.

Runs `temper train experiment=calc policy=hf`, with the native engine over a tiny Qwen-like model made on the
spot. Its sampled score must rise by 0.3 within ten minutes of two quiet cores, and trainer and sampler must
agree. Prints the figures last and exits 1 when one is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.calc import Check
from benchmarks.learning import evaluations, train


def main() -> int:
    """Trains once and prints each figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hf_calc", description=__doc__)
    parser.add_argument("--steps", type=int, default=60, help="steps of reinforcement")
    parser.add_argument("--preset", default="hf_tiny", help="hf_tiny, or hf_tiny_moe")
    parser.add_argument("overrides", nargs="*", help="further overrides")
    given = parser.parse_args()
    chosen = ["experiment=calc", "policy=hf", f"model.preset={given.preset}", f"trainer.steps={given.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        seconds = train(Path(folder), "hf-calc", chosen + given.overrides)
        rows = evaluations(Path(folder) / "hf-calc", "calc")
    before, after = rows[0], rows[max(rows)]
    rise = after["sampled/score.mean"] - before["sampled/score.mean"]
    print(f"sampled {before['sampled/score.mean']:.3f} -> {after['sampled/score.mean']:.3f} ({given.preset})")
    print(f"greedy {before['greedy/score.mean']:.3f} -> {after['greedy/score.mean']:.3f}")
    checks = [
        Check("rise of the sampled score", rise, 0.3, at_most=False),
        Check("seconds in all", seconds, 600, at_most=True),
        Check("mean mismatch of log-probabilities", before["kl.mismatch.mean"], 1e-4, at_most=True),
    ]
    for check in checks:
        print(check)
    held = sum(check.held for check in checks)
    print(f"hf_calc: {held}/{len(checks)} figures hold")
    return 0 if held == len(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
