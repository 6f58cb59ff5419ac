"""Tensors of a policy and its optimisers in one folder, whatever number of processes wrote or reads it.

Each process writes what it holds (torch's distributed checkpoint format). Names are those of a policy with
spread experts, so that a folder does not say how many processes there were: parts are cut anew on reading.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from model.policies import AnyPolicy
from rl.trainers import shards
from rl.trainers.experts import split_stacks, stacked_name
from rl.trainers.ranks import Ranks

FOLDER = "shards"
"""Of a checkpoint that several processes wrote."""
_SEPARATOR = "|"


def take_optimizers(own: dict[str, Any]) -> dict[str, Any]:
    """Takes the optimisers' tensors out of the trainers' states, for `save`."""
    tree: dict[str, Any] = {}
    for kind in ("sft", "learning"):
        trainer = own[kind]
        for name, state in ((kind, trainer), (f"{kind}_draft", (trainer or {}).get("draft"))):
            if state is not None:
                tree[name] = state.pop("optimizer")
    return tree


def put_optimizers(own: dict[str, Any], tree: Mapping[str, Any]) -> None:
    """Puts back what `take_optimizers` took."""
    empty = {"adamw": {}, "muon": {}, "balanced": {}, "tables": {}, "masters": {}}
    for kind in ("sft", "learning"):
        trainer = own[kind]
        for name, state in ((kind, trainer), (f"{kind}_draft", (trainer or {}).get("draft"))):
            if state is not None:
                state["optimizer"] = {**empty, **tree.get(name, {})}


def save(folder: Path, tree: Mapping[str, Any], policy: AnyPolicy, ranks: Ranks) -> None:
    """Writes the tensors of nested mappings (collective). Those of parameters are named after them."""
    flat = dict(_flat(split_stacks(tree, policy.config.n_routed_experts)))
    with _quiet():
        save_distributed(flat, checkpoint_id=folder, no_dist=ranks.alone)


def load(folder: Path, policy: AnyPolicy, ranks: Ranks) -> dict[str, Any]:
    """Reads what `save` wrote, laid out as the parameters of `policy` are now (collective).

    Raises:
        CheckpointException: The folder is damaged.
    """
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    parameters = dict(policy.named_parameters())
    flat: dict[str, Any] = {}
    for key, stored in metadata.items():
        assert isinstance(stored, TensorStorageMetadata), f"{key} is a tensor"
        flat[key] = _room(key, stored, parameters)
    with _quiet():
        load_distributed(flat, checkpoint_id=folder, no_dist=ranks.alone)
    tree = _nested(flat)
    spread = any(shards.is_spread(parameter) for parameter in parameters.values())
    return tree if spread else _stacked(tree)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a process alone is a process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _room(key: str, stored: TensorStorageMetadata, parameters: Mapping[str, Tensor]) -> Tensor:
    """A tensor to read into."""
    dtype = stored.properties.dtype
    for name in key.split(_SEPARATOR):
        parameter = parameters.get(name)
        if parameter is not None and shards.is_spread(parameter) and parameter.shape == stored.size:
            return shards.laid_out_as(parameter, torch.zeros_like(shards.part(parameter), dtype=dtype))
    return torch.empty(stored.size, dtype=dtype)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, name + _SEPARATOR)
        else:
            yield name, value


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(_SEPARATOR)
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _stacked(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Joins what `split_stacks` cut."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        stack, second = stacked_name(key)
        if stack == key:
            out[key] = _stacked(value) if isinstance(value, Mapping) else value
        elif not second:
            shared = tree[key.replace("spread.routed.", "spread.shared.")]
            out[stack] = _joined(value, shared)
    return out


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, Mapping):
        return {key: _joined(first[key], second[key]) for key in first}
    return torch.cat([first, second]) if first.ndim else first
