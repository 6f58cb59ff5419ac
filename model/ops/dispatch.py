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
    kernel = tensor.is_cuda and not _only_reference and not needs_gradient
    if kernel and importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            f"{op} needs Triton on a CUDA device and it is not installed. Install it with "
            "`pip install 'tempering[gpu]'`, or run under `model.ops.dispatch.reference_only()`."
        )
    path = "triton" if kernel else "reference for the gradient" if needs_gradient else "reference"
    if _paths.get(op) != path:
        _paths[op] = path
        _log.info("%s runs its %s path on %s", op, path, tensor.device)
    return kernel


def paths() -> dict[str, str]:
    """The path ("triton" or "reference...") that each operation called so far took last."""
    return dict(_paths)


@contextlib.contextmanager
def reference_only() -> Iterator[None]:
    """Run the definitions on every device, to measure what the kernels give or to look for an error."""
    global _only_reference
    before, _only_reference = _only_reference, True
    try:
        yield
    finally:
        _only_reference = before
