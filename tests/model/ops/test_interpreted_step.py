"""Exact mode of the kernels without a card: a decode step says to the bit what a training pass says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEP = {
    "decode_rows",
    "decode_scores",
    "exact_linear",
    "exact_pair",
    "few_rows",
    "hyper_coefficients",
    "hyper_update_of_rows",
    "latents",
    "sparse_decode",
    "topk",
    "window_rows",
}


@pytest.mark.slow
def test_decode_steps_repeat_a_training_pass_bit_for_bit():
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.ops.interpreted_step", "18", "15"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    differing, kernels = done.stdout.splitlines()[-2:]
    assert differing == "differing []"
    assert set(kernels.split()[1:]) >= STEP
