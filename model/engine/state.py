"""The state of one request on its way to a file or another engine, where it goes on with the same tokens.

A state holds all that the next token depends on (tokens, caches, how to sample; the random draw's counter is
the position) and all that was recorded (log-probabilities, versions, experts, masks). Its bytes are those of
a safetensors file whose metadata holds the rest as JSON: nothing in it is ever executed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from model.choices import SamplingMask
from model.engine.columns import Columns, ExpertIds, Selections
from model.engine.errors import StateError
from model.engine.replay import Past
from model.engine.requests import Pending, Request
from model.engine.sampler import SamplingParams
from model.vision import ImageTokens

FORMAT = 1
_KEY = "tempering.request"
_SELECTION = "selections."
_CACHE = "cache."


@dataclass(frozen=True, slots=True)
class RequestState:
    """One request at a token boundary. `header` is plain JSON, `tensors` are on the host."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def to_bytes(self) -> bytes:
        """The state as the content of a file."""
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        return save(tensors, {_KEY: json.dumps(self.header)})

    @staticmethod
    def from_bytes(data: bytes) -> RequestState:
        """Reads what `to_bytes` wrote. Raises StateError for anything else, or another version's format."""
        try:
            size = int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"][_KEY])
            tensors = load(data)
        except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
            raise StateError(
                f"this is not the state of a request, or it is cut off or damaged ({error}); export it again"
            ) from error
        if not isinstance(header, dict):
            raise StateError(f"the header of a request's state is {header!r}, no table: export it again")
        if header.get("format") != FORMAT:
            raise StateError(
                f"the state has format {header.get('format')}, this version reads {FORMAT}: let the version "
                "that wrote it finish the request, or submit it again with what was sampled as `completed`"
            )
        return RequestState(header, tensors)

    def write(self, path: Path) -> None:
        """Writes a file, whole or not at all, on disk when this returns."""
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            file.write(self.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @staticmethod
    def read(path: Path) -> RequestState:
        """Reads a file. Raises StateError when it holds something else."""
        return RequestState.from_bytes(path.read_bytes())


def pack(pending: Pending, extra: dict[str, Any]) -> RequestState:
    """The state of a request, with its caches if it has any; `extra` goes into the header."""
    request, turn = pending.request, pending.request.completed
    sampling = asdict(request.sampling) | {"stop_ids": sorted(request.sampling.stop_ids)}
    header = {
        "format": FORMAT,
        "session": request.session,
        "start": pending.start,
        "counter": int(pending.history.size),
        "sampling": sampling,
        "continues": request.continues,
        "replay_starts": turn.replay_starts,
        "floor": pending.floor,
        "replayed": pending.replayed,
        "mixed": pending.mixed,
        "cached": pending.cached if pending.caches is not None else 0,
    }
    arrays = {"token_ids": pending.history, "logprobs": turn.logprobs, "versions": turn.versions}
    arrays |= {"full_logprobs": turn.full_logprobs, "states": turn.states}
    tensors = {}
    if turn.expert_ids is not None:
        header["expert_start"], arrays["expert_ids"] = turn.expert_ids.start, turn.expert_ids.ids
    if turn.selections is not None:
        header["selection_start"] = turn.selections.start
        arrays |= {f"{_SELECTION}{layer}": keys for layer, keys in turn.selections.keys.items()}
    if (mask := turn.sampling_mask) is not None:
        tensors |= {"mask.ids": mask.ids, "mask.offsets": mask.offsets}
    if (images := request.images) is not None:
        tensors |= {"image.types": images.types, "image.rows": images.rows}
    if pending.before is not None:
        header["before"] = {"floor": pending.before.floor, "replayed": pending.before.replayed}
        arrays["before.token_ids"] = pending.before.token_ids
    tensors |= {_CACHE + name: tensor for name, tensor in (pending.caches or {}).items()}
    tensors |= {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    host = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return RequestState(header | extra, host)


def unpack(state: RequestState, request_id: int) -> Pending:
    """The request of a state. Raises StateError when parts are missing or damaged."""
    header, tensors = state.header, state.tensors
    try:
        history, start = tensors["token_ids"].numpy(), int(header["start"])
        request = Request(
            header["session"],
            history[:start],
            SamplingParams(**header["sampling"] | {"stop_ids": frozenset(header["sampling"]["stop_ids"])}),
            _turn(header, tensors, history[start:]),
            header["continues"],
            ImageTokens(tensors["image.types"], tensors["image.rows"]) if "image.types" in tensors else None,
        )
        before = header.get("before")
        caches = {name.removeprefix(_CACHE): t for name, t in tensors.items() if name.startswith(_CACHE)}
        return Pending(
            request_id,
            request,
            history,
            start,
            None if header["floor"] is None else _pair(header["floor"]),
            header["replayed"],
            before and Past(tensors["before.token_ids"].numpy(), _pair(before["floor"]), before["replayed"]),
            caches or None,
            int(header["cached"]),
            header["mixed"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"the state of a request lacks a part, or has a damaged one ({error}): export it again"
        ) from error


def sampled(state: RequestState) -> Columns:
    """What a request's turn has sampled so far."""
    start = int(state.header["start"])
    return _turn(state.header, state.tensors, state.tensors["token_ids"].numpy()[start:])


def check_caches(state: RequestState, pending: Pending, cache: Any, policy: str, storage: str) -> None:
    """Raises StateError when the caches of a state do not fit an engine's policy, storage or cache."""
    if pending.caches is None:
        return
    if state.header.get("policy") != policy:
        raise StateError(
            "the request's caches were computed by a policy of another configuration or rounding: import "
            "it into an engine of the same, or with caches='recompute'"
        )
    if state.header.get("storage") != storage:
        raise StateError(
            f"the request's caches are {state.header.get('storage')}, this engine's are {storage}: make it "
            "with the same storage, or import with caches='recompute'"
        )
    try:
        held = cache.check_slot(pending.caches)
    except ValueError as error:
        raise StateError(f"{error}, or import the request with caches='recompute'") from error
    if not held == pending.cached < pending.history.size:
        raise StateError(
            f"the state of a request says that {pending.cached} of {pending.history.size} tokens are in its "
            f"caches, which hold {held}: it is damaged, export it again"
        )


def _turn(header: dict[str, Any], tensors: dict[str, Tensor], token_ids: np.ndarray) -> Columns:
    experts = mask = selections = None
    if "expert_ids" in tensors:
        experts = ExpertIds(int(header["expert_start"]), tensors["expert_ids"].numpy())
    if "selection_start" in header:
        selections = Selections(
            int(header["selection_start"]),
            {
                int(name.removeprefix(_SELECTION)): tensor.numpy()
                for name, tensor in tensors.items()
                if name.startswith(_SELECTION)
            },
        )
    if "mask.ids" in tensors:
        mask = SamplingMask(tensors["mask.ids"], tensors["mask.offsets"])
    starts = tuple(_pair(pair) for pair in header["replay_starts"])
    return Columns(
        token_ids,
        tensors["logprobs"].numpy(),
        tensors["versions"].numpy(),
        tensors["full_logprobs"].numpy(),
        tensors["states"].numpy(),
        experts,
        mask,
        starts,
        selections,
    )


def _pair(pair: list[int]) -> tuple[int, int]:
    encoder, decoder = pair
    return int(encoder), int(decoder)
