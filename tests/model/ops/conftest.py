"""Two ways to check a kernel without a GPU.

`interpreted` runs it on CPU tensors under Triton's interpreter, which has to be chosen before Triton is
imported: in a second process. `compiled` lets a launcher compile everything it would launch for sm_90 and
reads the resources.
"""

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_SERVER = """
import importlib, pickle, sys, traceback, torch
torch.set_num_threads(1)
from tests.model.ops import interpreted_products
interpreted_products.put()
stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
while True:
    try:
        module, name, args, kwargs = pickle.load(stdin)
    except EOFError:
        break
    try:
        result = getattr(importlib.import_module(module), name)(*args, **kwargs)
    except Exception:
        result = RuntimeError(traceback.format_exc())
    pickle.dump(result, stdout)
    stdout.flush()
"""


@pytest.fixture
def poisoned_memory() -> None:
    """Fills what a card's allocator will hand out with NaN, so that an element left unwritten shows."""
    import torch

    torch.manual_seed(0)
    blocks = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(10, 29)]
    del blocks


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable]:
    """`interpreted("model.ops.topk.triton", "topk", *args, **kwargs)` on CPU tensors."""
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(root), *sys.path]),
    }
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        cwd=root,
    )
    assert process.stdin is not None and process.stdout is not None

    def call(module: str, name: str, *args, **kwargs):
        pickle.dump((module, name, args, kwargs), process.stdin)
        process.stdin.flush()
        result = pickle.load(process.stdout)
        if isinstance(result, Exception):
            raise result
        return result

    yield call
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=30)


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on sm_90: registers a thread, bytes of stack (spills), bytes of shared memory."""

    kernel: str
    registers: int
    stack: int
    shared: int


class _Hopper:
    """Stands in for a CUDA driver so that kernels compile on a machine without one."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self):
        import torch

        return torch.cuda


def read_resources(name: str, kernel) -> Resources:
    """Registers and stack from the machine code, shared memory from the compiler's metadata."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return Resources(name, int(registers), int(stack), kernel.metadata.shared)


@pytest.fixture(scope="module")
def compiled_kernels() -> Iterator[Callable]:
    """`compiled_kernels(launcher, *meta_tensors, **kwargs)`: name and code of each kernel it would launch."""
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    assert not triton.knobs.runtime.interpret, "the compile gate needs TRITON_INTERPRET unset"
    kernels: list = []
    run = JITFunction.run

    def warmup(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append((self.__name__.lstrip("_"), kernel))
        return kernel

    def call(launcher: Callable, *args, **kwargs) -> list:
        kernels.clear()
        launcher(*args, **kwargs)
        return list(kernels)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.setattr(JITFunction, "run", warmup)
        patch.setattr(driver, "_active", _Hopper())
        yield call


@pytest.fixture(scope="module")
def compiled(compiled_kernels) -> Callable:
    """`compiled(launcher, *meta_tensors, **kwargs)`: the resources of each kernel it would launch."""

    def call(launcher: Callable, *args, **kwargs) -> list[Resources]:
        return [read_resources(name, kernel) for name, kernel in compiled_kernels(launcher, *args, **kwargs)]

    return call
