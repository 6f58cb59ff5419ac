"""Bytes that the hyper-connection boundary moves to and from memory, counted by Nsight Compute.

`python -m benchmarks.kernel_bytes` runs the boundary once with the profiler on; `moved` runs it under `ncu`.
The L2 is emptied before each kernel; what a kernel leaves in it (at most 60 MB) is not counted as written.
"""

import csv
import shutil
import subprocess
import sys

import torch
from torch import Tensor

from benchmarks import kernel_data as data
from model.ops.hyper_boundary import hyper_boundary
from model.ops.hyper_boundary import reference as definition

METRICS = "dram__bytes_read.sum", "dram__bytes_write.sum"


def boundary_arguments(count: int = 32768, width: int = 5120) -> tuple[Tensor, ...]:
    """Streams, branch, coefficients, projection, base, scale and norm of `hyper_boundary`."""
    streams, branch = data.normal(count, 4, width), data.normal(count, width)
    projection = torch.randn(24, 4 * width, device="cuda") * 0.02
    base, norm = torch.randn(24, device="cuda"), torch.rand(width, device="cuda")
    scale = torch.rand(3, device="cuda") + 0.5
    coefficients = definition.coefficients(streams[:4096], projection, base, scale)
    coefficients = coefficients.repeat(-(-count // 4096), 1)[:count]
    return streams, branch, coefficients, projection, base, scale, norm


def moved(seconds: float = 120) -> tuple[dict[str, float], str]:
    """Bytes by kernel and how they were counted; none, and why, without `ncu` or its counters."""
    if shutil.which("ncu") is None:
        return {}, "ncu is not installed"
    command = [
        "ncu",
        "--profile-from-start",
        "off",
        "--metrics",
        ",".join(METRICS),
        "--clock-control",
        "none",
    ]
    command += ["--csv", "--print-units", "base", sys.executable, "-m", "benchmarks.kernel_bytes"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {}, f"ncu took longer than {seconds:.0f} s"
    found = parsed(done.stdout)
    if done.returncode or not found:
        print(f"ncu: {done.stdout[-1500:]}{done.stderr[-1500:]}", flush=True)
        return {}, "ncu could not read the counters"
    return found, "ncu, DRAM read and written"


def parsed(text: str) -> dict[str, float]:
    """Bytes by kernel from the table that `ncu --csv` prints after its messages."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, float] = {}
    for row in csv.DictReader(lines[start:]):
        if row["Metric Name"] in METRICS:
            value = float(row["Metric Value"].replace(",", ""))
            found[row["Kernel Name"]] = found.get(row["Kernel Name"], 0.0) + value
    return found


def main() -> None:
    """One boundary with the profiler on, after one without."""
    arguments = boundary_arguments()
    with torch.no_grad():
        hyper_boundary(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        hyper_boundary(*arguments)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
