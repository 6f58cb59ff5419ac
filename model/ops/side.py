"""A second stream for kernels that few others wait for, counters that kernels share, and processors."""

import threading
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_COUNT = 1 << 13
_counters: dict[torch.device, Tensor] = {}
_here = threading.local()


class SideStream:
    """Queues work beside what follows on the current stream; on a processor everything runs in turn."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, for use after `join`.

        `work` waits for all queued before. What it reads must be held until `join`: so neither stream is
        handed memory that the other still uses.
        """
        if self._stream is None:
            return work()
        self._stream.wait_stream(torch.cuda.current_stream())
        _here.beside = True
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:
            _here.beside = False

    def join(self) -> None:
        """Let the current stream wait for all work."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def arrivals(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for a kernel whose last program to arrive finishes; it leaves zeros.

    Kernels of one stream take turns with them, those of a side stream have their own.
    """
    assert count <= _COUNT, f"{count} counters are asked for, there are {_COUNT}"
    if device not in _counters:
        with torch.inference_mode(False):
            _counters[device] = torch.zeros((2, _COUNT), dtype=torch.int32, device=device)
    return _counters[device][int(getattr(_here, "beside", False))]


@cache
def processors(device: torch.device) -> int:
    """How many processors a card has; an H200's where kernels are only chosen or interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
