"""New weights beside the old ones: copied while the engine decodes, so that the swap moves no bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from model.engine.policy import Policy, as_tensors, check_state


class StagedWeights:
    """A policy's next weights, on its devices and in its dtypes.

    Making one copies, in any thread, and takes as much memory as the policy; `swap` exchanges the tensors'
    memory. After it this object holds the old weights, so that whoever drops it pays for freeing them.

    Raises:
        StateError: A tensor is missing, too many, or misshapen; nothing was changed.
    """

    def __init__(self, policy: Policy, state: Mapping[str, Tensor | np.ndarray]) -> None:
        tensors, self._own = as_tensors(state), policy.state_dict(keep_vars=True)
        check_state(self._own, tensors)
        with torch.no_grad():
            self._next = {id(own): _like(own).copy_(tensors[name]) for name, own in self._own.items()}

    def swap(self) -> None:
        """Exchanges old and new; the policy must not be computing."""
        for own in {id(own): own for own in self._own.values()}.values():
            own.data, self._next[id(own)] = self._next[id(own)], own.data


def _like(own: Tensor) -> Tensor:
    return torch.empty_like(own, requires_grad=False, pin_memory=own.device.type == "cpu" and own.is_pinned())
