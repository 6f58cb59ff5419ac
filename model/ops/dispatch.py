"""Decides whether an operation runs its kernel or its definition, and remembers which.

A slow path taken silently is worse than an error: on a CUDA device the kernel runs or the call raises, and
`paths()` says for every operation called so far which path it took.
"""

import contextlib
import importlib.util
import logging
from collections.abc import Iterator

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_paths: dict[str, str] = {}
_only_reference = False
_everywhere = False
_left_out: set[str] = set()


def served(x: Tensor) -> bool:
    """Whether a tensor takes the path of the fused operations: bf16 on a CUDA device."""
    return x.dtype is torch.bfloat16 and (x.is_cuda or _everywhere) and not _only_reference


def note(op: str, path: str) -> None:
    """Remember, and log once, which path `op` takes."""
    if _paths.get(op) != path:
        _paths[op] = path
        _log.info("%s runs its %s path", op, path)


def use_kernel(op: str, tensor: Tensor, *, without_gradient: tuple[Tensor, ...] = ()) -> bool:
    """Whether `op` runs its Triton kernel for arguments that live where `tensor` lives.

    Args:
        op: name of the operation.
        tensor: any of its arguments.
        without_gradient: arguments for which there is no backward kernel; when one of them needs a gradient
            the (differentiable) definition runs.

    Raises:
        RuntimeError: the tensor is on a CUDA device and Triton is not installed.
    """
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in without_gradient)
    kernel = tensor.is_cuda and not _only_reference and not needs_gradient and op not in _left_out
    if kernel and importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            f"{op} needs Triton on a CUDA device and it is not installed. Install it with "
            "`pip install 'tempering[gpu]'`, or run under `model.ops.dispatch.reference_only()`."
        )
    path = "triton" if kernel else "reference for the gradient" if needs_gradient else "reference"
    note(op, path)
    return kernel


def paths() -> dict[str, str]:
    """The path ("triton" or "reference...") that each operation called so far took last."""
    return dict(_paths)


@contextlib.contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """Collects the path of each operation that is called inside; and adds them to `paths()` at the end."""
    global _paths
    before, _paths = _paths, {}
    taken = _paths
    try:
        yield taken
    finally:
        _paths = before | taken


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Run the definitions on every device, to measure what the kernels give or to look for an error."""
    global _only_reference
    before, _only_reference = _only_reference, True
    try:
        yield
    finally:
        _only_reference = before


@contextlib.contextmanager
def fused_everywhere() -> Iterator[None]:
    """Take the path of the fused operations on every device, to check it by their definitions on a CPU."""
    global _everywhere
    before, _everywhere = _everywhere, True
    try:
        yield
    finally:
        _everywhere = before


def rows_of_records(device: torch.device) -> bool:
    """Whether packed caches on `device` keep each record in one piece, as the kernels read them."""
    return device.type == "cuda" or _everywhere


@contextlib.contextmanager
def without(op: str) -> Iterator[None]:
    """Run the definition of `op` in place of its kernel, to measure what the kernel gives."""
    _left_out.add(op)
    try:
        yield
    finally:
        _left_out.discard(op)
