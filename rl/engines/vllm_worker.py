"""What runs inside vLLM's workers: the weights' way in.

Weights are fetched and checked in a thread while the model goes on sampling; only the swap, between two
steps, holds it up. Every argument and answer is plain data, as vLLM's collective calls want it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rl.collective import Group
from rl.device_weights import DeviceSnapshot
from rl.engines.vllm_weights import Notice
from rl.transports import Rendezvous, Snapshot
from rl.weights import WeightsError, WeightSnapshot


class WeightsExtension:
    """Mixed into vLLM's worker class, whose `model_runner` and `device` it uses."""

    model_runner: Any
    device: torch.device

    def temper_join(self, address: str, rank: int, world: int, deadline_s: float) -> None:
        """Begins to meet the learner and the other engines for broadcasts."""
        place = Rendezvous(address, rank, world, deadline_s)
        self._temper_job = _Job(lambda: Group(place, self.device))

    def temper_fetch(self, notice: Mapping[str, Any]) -> None:
        """Begins to fetch weights and to check them."""
        told, group = Notice.from_plain(notice), getattr(self, "_temper_group", None)

        def fetch() -> Snapshot:
            snapshot = told.open(group, self.device)
            snapshot.verify()
            return snapshot

        self._temper_job = _Job(fetch)

    def temper_ended(self) -> bool:
        """Whether what was begun is done. Raises what went wrong with it."""
        if not self._temper_job.ended():
            return False
        if isinstance(result := self._temper_job.result, Group):
            self._temper_group = result
        return True

    def temper_swap(self, clean: bool) -> dict[str, int]:
        """Puts the fetched weights into the model; returns version, checksum, and what was read back.

        Raises:
            WeightsError: The model has other weights than those that were given.
        """
        snapshot = self._temper_job.result
        assert snapshot is not None, "temper_ended says when"
        self._temper_job.result = None
        tensors = snapshot.tensors(verify=False)
        self.model_runner.reload_weights(weights_iterator=iter(tensors.items()))
        for cache in self.model_runner.kv_caches if clean else ():
            cache.nan_to_num_()  # or a block that is used again spreads what broken weights left
        model = self.model_runner.get_model()
        _refresh_tied_head(model)
        read = _read_back(model, tensors)
        return {"version": snapshot.version, "checksum": _checksum(snapshot), "read_back": read}


class _Job(threading.Thread):
    """Work beside the model's steps; it begins at once."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="weights", daemon=True)
        self.result: Any = None
        self._work = work
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Does the work."""
        try:
            self.result = self._work()
        except BaseException as error:  # whatever it is, who asks for the weights must learn of it
            self._failure = error

    def ended(self) -> bool:
        """Whether there is a result; raises the work's error."""
        if self._failure is not None:
            raise self._failure
        return self.result is not None


def _refresh_tied_head(model: torch.nn.Module) -> None:
    """Repacks an output layer that shares the embedding: on a CPU it keeps a packed copy of the old one."""
    head = getattr(model, "lm_head", None)
    if head is None or not hasattr(head, "cpu_linear"):
        return
    layers = import_module("vllm.model_executor.layers.utils")
    layers.dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _read_back(model: torch.nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """Compares the parameters that the model holds as they were given; returns how many."""
    count = 0
    for name, parameter in model.named_parameters():
        given = tensors.get(name)
        if given is None or given.shape != parameter.shape:
            continue
        if not torch.equal(_bytes(parameter.detach()), _bytes(given.to(parameter.device, parameter.dtype))):
            raise WeightsError(
                f"vLLM's {name} is not what was published: this version of vLLM loads it otherwise; "
                "restart the replica"
            )
        count += 1
    return count


def _bytes(tensor: Tensor) -> Tensor:
    """Its bytes, by which a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _checksum(snapshot: WeightSnapshot | DeviceSnapshot) -> int:
    return snapshot.crc32 if isinstance(snapshot, WeightSnapshot) else snapshot.checksum
