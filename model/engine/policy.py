"""What the engine asks of a policy, and whether weights fit it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from model.engine.errors import StateError

Storage = Literal["dense", "packed"]


class Policy(Protocol):
    """A network that extends cached sequences. `model.policy.Policy` is one."""

    config: Any

    @property
    def fake_quant(self) -> bool:
        """Whether keys are rounded as the caches store them."""
        ...

    @fake_quant.setter
    def fake_quant(self, value: bool) -> None: ...

    @property
    def exact(self) -> bool:
        """Whether a token's result is the same bits whatever is computed beside it."""
        ...

    @exact.setter
    def exact(self, value: bool) -> None: ...

    @property
    def new_cache(self) -> Callable[..., Any]:
        """Makes a cache for so many sequences of so many tokens; options: storage, pages."""
        ...

    @property
    def extend(self) -> Callable[..., Tensor]:
        """Appends tokens [B, L] to sequences: the hidden state [B, d] of each row's last token.

        Takes cache, slots, token_ids and lengths; options, given only when they are needed: decode_from,
        images, capture.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits [B, V]."""
        ...

    def look_back_ids(self, token_ids: Tensor, image: Tensor | None = None) -> Tensor:
        """Returns what n-grams see of the tokens [n] before a sequence is resumed; image: bool [n]."""
        ...

    def encode_image(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Returns the embedding rows [M, d] of an image."""
        ...

    def state_dict(self, *, keep_vars: bool = False) -> Mapping[str, Tensor]:
        """Returns the weights by name; with `keep_vars` the very tensors that it computes with."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Copies weights in place."""
        ...


def as_tensors(state: Mapping[str, Tensor | np.ndarray]) -> dict[str, Tensor]:
    """Weights as tensors; read-only arrays are copied."""
    return {name: _as_tensor(value) for name, value in state.items()}


def check_state(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Raises StateError when `given` are not the tensors of a policy whose weights are `own`."""
    missing, extra = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    wrong = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    if missing or extra or wrong:
        raise StateError(
            f"the weights do not fit the policy: missing {missing[:5]}, unknown {extra[:5]}, "
            f"misshapen {wrong[:5]} ({len(missing)}, {len(extra)}, {len(wrong)} in all); "
            "publish the state_dict of a policy of the same configuration"
        )


def _as_tensor(value: Tensor | np.ndarray) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy())
