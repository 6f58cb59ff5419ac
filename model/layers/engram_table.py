"""The tables of the n-gram memory: where their rows lie, and how rows come to where they are needed.

A table is by far the largest tensor of a large policy, and a token reads a few rows of it, which are known as
soon as its id is. So a table may stay in host memory or in the checkpoint file, and its rows are gathered in
a background thread while the layers before run. Gradients are of the rows that were read, never of the table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.ops.row_sums import Distinct, distinct, row_sums
from model.quant.blocks import WIDE_BLOCK
from model.quant.weights import decode_fp8

TableStorage = Literal["resident", "host", "mmap"]
"""A parameter with the others; a parameter in host memory (pinned where there is an accelerator); or what the
checkpoint's file holds, mapped, never copied, and so never trained."""

_executor: ThreadPoolExecutor | None = None


def _background() -> ThreadPoolExecutor:
    """The thread that gathers, one a process: rows are needed in the order in which they are asked for."""
    global _executor
    if _executor is None:
        _executor = ThreadPoolExecutor(1, thread_name_prefix="engram")
    return _executor


def _forget_background() -> None:
    global _executor
    _executor = None


# The thread does not live on in a forked process.
os.register_at_fork(after_in_child=_forget_background)


@dataclass(slots=True)
class Traffic:
    """What a table outside the accelerator has been asked for."""

    lookups: int = 0
    prefetched: int = 0
    """Lookups whose rows had been asked for before."""
    bytes: int = 0
    """Bytes of table rows read, as stored."""
    gather_seconds: float = 0.0
    """Time to read and decode rows, in the background or not."""
    wait_seconds: float = 0.0
    """Time for which the layer that needed the rows stood still."""

    @property
    def hidden(self) -> float:
        """The share of the gathering that took place behind other work, 0 .. 1."""
        return max(0.0, 1 - self.wait_seconds / self.gather_seconds) if self.gather_seconds else 0.0


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Rows as a checkpoint stores them: plain floats, or float8 codes with a scale byte for each block."""

    rows: Tensor
    scale: Tensor | None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row with its scales."""
        parts = [self.rows] if self.scale is None else [self.rows, self.scale]
        return sum(part.shape[1] * part.element_size() for part in parts)

    def gather(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [n, width] of `ids` [n], decoded."""
        if self.scale is None:
            return self.rows.index_select(0, ids).to(dtype)
        codes = self.rows.view(torch.uint8).index_select(0, ids).view(torch.float8_e4m3fn)
        return decode_fp8(codes, self.scale.view(torch.uint8).index_select(0, ids), (1, WIDE_BLOCK)).to(dtype)


@dataclass(frozen=True, slots=True)
class _Job:
    ids: Tensor
    values: Future[Tensor]


class EngramTable(nn.Module):
    """A table of `rows` x `width`. `weight` is None when it is mapped: `map_rows` then says from where."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, storage: TableStorage = "resident") -> None:
        super().__init__()
        if storage not in get_args(TableStorage):
            known = ", ".join(get_args(TableStorage))
            raise ValueError(f"unknown storage {storage!r} of n-gram tables: choose one of {known}")
        self.storage, self.shape, self.dtype = storage, torch.Size((rows, width)), dtype
        self.traffic = Traffic()
        self._mapped: MappedRows | None = None
        self._job: _Job | None = None
        self.register_parameter("weight", self._parameter())
        self.weight: nn.Parameter | None

    def _parameter(self) -> nn.Parameter | None:
        if self.storage == "mmap":
            return None
        empty = torch.empty(0)
        if self.storage == "resident" or empty.is_meta:
            return nn.Parameter(torch.empty(self.shape, dtype=self.dtype))
        pinned = torch.cuda.is_available()
        return nn.Parameter(torch.empty(self.shape, dtype=self.dtype, device="cpu", pin_memory=pinned))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EngramTable:
        """A table outside the accelerator stays where it is when the policy moves."""
        return super()._apply(fn, recurse) if self.storage == "resident" else self  # pyright: ignore

    def map_rows(self, mapped: MappedRows) -> None:
        """Read from here on out of `mapped`. Raises ValueError when its shape is another one."""
        if self.storage != "mmap":
            raise ValueError(f"this n-gram table is {self.storage}, not mapped: make the policy with 'mmap'")
        if mapped.rows.shape != self.shape:
            raise ValueError(f"the mapped table is {list(mapped.rows.shape)}, not {list(self.shape)}")
        self._mapped = mapped

    @property
    def mapped(self) -> MappedRows:
        """What a mapped table reads from. Raises ValueError before `map_rows`."""
        if self._mapped is None:
            raise ValueError(
                "this n-gram table is to be mapped and has no file yet: load the policy with "
                "load_policy(folder, tables='mmap')"
            )
        return self._mapped

    def prefetch(self, ids: Tensor) -> None:
        """Begin to gather the rows of `ids` [T, columns]; the next call with these very ids will use them."""
        if self.storage != "resident" and not ids.is_meta:
            self._job = _Job(ids, _background().submit(self._gather, ids.to("cpu"), ids.is_cuda))

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [T, columns, width] of `ids` [T, columns], on their device."""
        weight = self.weight
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return _RowLookup.apply(weight, ids, self._rows)  # pyright: ignore[reportReturnType]
        return self._rows(ids)

    def _rows(self, ids: Tensor) -> Tensor:
        if self.storage == "resident":
            assert self.weight is not None
            return F.embedding(ids, self.weight.detach())
        job, self._job = self._job, None
        begin = time.perf_counter()
        if job is not None and _same(job.ids, ids):
            values = job.values.result()
            self.traffic.prefetched += 1
        else:
            values = self._gather(ids.to("cpu"), ids.is_cuda)
        self.traffic.wait_seconds += time.perf_counter() - begin
        self.traffic.lookups += 1
        return values.to(ids.device, non_blocking=True)

    def _gather(self, ids: Tensor, pin: bool) -> Tensor:
        """Rows in host memory. Grad mode belongs to a thread, so it is set here."""
        begin = time.perf_counter()
        with torch.no_grad():
            flat = ids.flatten()
            if self.weight is not None:
                values, row_bytes = (
                    self.weight.index_select(0, flat),
                    self.shape[1] * self.weight.element_size(),
                )
            else:
                values, row_bytes = self.mapped.gather(flat, self.dtype), self.mapped.row_bytes
            values = values.unflatten(0, ids.shape)
            values = values.pin_memory() if pin else values
        self.traffic.bytes += flat.numel() * row_bytes
        self.traffic.gather_seconds += time.perf_counter() - begin
        return values


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are one view of the same memory (of which the first holds on to)."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.device == second.device
    )


class _RowLookup(torch.autograd.Function):
    """A lookup whose gradient is a sparse tensor: the rows that were read, each once, in ascending order."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of `ids`.

        Which of them are equal is found now: the device has little to do yet, and a wait for it in the middle
        of the backward would leave it idle.
        """
        ctx.save_for_backward(ids, *distinct(ids.flatten()))
        ctx.table = (weight.shape, weight.device, weight.dtype)
        return rows(ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Sums over the lookups of each row, in float32."""
        ids, *found = ctx.saved_tensors
        shape, device, dtype = ctx.table
        rows, total = row_sums(grads[0].flatten(0, -2), ids.flatten(), Distinct(*found))
        sparse = torch.sparse_coo_tensor(
            rows.unsqueeze(0).to(device),
            total.to(device, dtype),
            shape,
            is_coalesced=True,
            check_invariants=False,
        )
        return sparse, None, None
