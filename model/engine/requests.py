"""What goes into the engine and what comes out of it: requests and finished turns."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor

from model.choices import SamplingMask
from model.engine.columns import Columns
from model.engine.errors import (
    ContextOverflowError,
    EmptyPromptError,
    ImageError,
    RequestError,
    SamplingError,
    TokenRangeError,
)
from model.engine.replay import Floor, Past
from model.engine.sampler import SamplingParams
from model.vision import ImageTokens, TokenType

LOWEST_TEMPERATURE = 1e-6
"""Logits are divided by it in float32."""
_INT64 = 2**63


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to sample.

    Attributes:
        session: Whose caches to use and to keep; one request of a session is served at a time.
        token_ids: The whole history before the turn.
        sampling: How to sample. `max_tokens` counts `completed` too.
        completed: Tokens of this very turn that were sampled before an interruption.
        continues: The history may hold tokens that were sampled before in this session. An engine that does
            not know the session, and with it where their windows started, flags what follows as replayed.
        images: The images in the history: a type for each token of it, and the rows of an encoding engine.
    """

    session: str
    token_ids: Sequence[int] | np.ndarray
    sampling: SamplingParams
    completed: Columns = field(default_factory=Columns)
    continues: bool = False
    images: ImageTokens | None = None

    def same_images(self, other: Request, size: int) -> bool:
        """Whether another request has the same images among its first `size` tokens."""
        mine, theirs = _images_within(self.images, size), _images_within(other.images, size)
        return all(torch.equal(one, another) for one, another in zip(mine, theirs, strict=True))

    def image_bytes(self) -> bytes:
        """What stands for the images in a key of the history."""
        if self.images is None:
            return b""
        return self.images.types.numpy().tobytes() + self.images.rows.float().cpu().numpy().tobytes()


def _images_within(images: ImageTokens | None, size: int) -> tuple[Tensor, Tensor]:
    """Types and rows of the images among the first `size` tokens; no images are types that say text."""
    if images is None:
        return torch.full((size,), int(TokenType.TEXT)), torch.zeros(0)
    types = torch.full((size,), int(TokenType.TEXT))
    held = images.types[:size]
    types[: held.shape[0]] = held
    rows = images.rows[: int((held == TokenType.IMAGE).sum())]
    return types, rows if rows.shape[0] else torch.zeros(0)


@dataclass(frozen=True, slots=True)
class Finished:
    """A turn that ended; `turn` includes what was completed before. `error` is set when `finish` is ERROR."""

    request_id: int
    session: str
    finish: Finish
    turn: Columns
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens of one step as columns over the requests that got one, and the turns that ended.

    Attributes:
        request_ids: int64 [n].
        token_ids: int64 [n].
        logprobs: float32 [n], under the distribution that was sampled from.
        full_logprobs: float32 [n], under the tempered distribution without truncation.
        version: Of the weights that sampled them.
        finished: The turns that ended.
        states: uint8 [n], `ContextState` of each token.
        expert_ids: int16 [n, layers, k], of the token that was the input (the one before the sampled one);
            None unless the engine captures them.
        sampling_mask: The ids that each token was drawn from; None when no request truncates.
        ready: Requests whose prompt a prefill engine has computed; they wait for `export_state`.
        selections: int32 [n, K] by selecting layer, as the expert ids; None unless they are captured.
    """

    request_ids: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray
    full_logprobs: np.ndarray
    version: int
    finished: list[Finished]
    states: np.ndarray
    expert_ids: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None
    ready: tuple[int, ...] = ()
    selections: dict[int, np.ndarray] | None = None

    @staticmethod
    def join(parts: Sequence[StepOutput], version: int, finished: list[Finished]) -> StepOutput:
        """Several parts of one step as one; a request may have tokens in several, in order."""
        if len(parts) == 1:
            return parts[0]
        nothing = [np.zeros(0, kind) for kind in (np.int64, np.int64, np.float32, np.float32)]
        columns = [(p.request_ids, p.token_ids, p.logprobs, p.full_logprobs) for p in parts]
        ids, tokens, own, full = (np.concatenate(column) for column in zip(nothing, *columns, strict=True))
        states = np.concatenate([np.zeros(0, np.uint8), *(part.states for part in parts)])
        experts = [part.expert_ids for part in parts if part.expert_ids is not None]
        masks = [part.sampling_mask for part in parts]
        mask = None
        if any(one is not None for one in masks):
            mask = SamplingMask.join(
                [
                    SamplingMask.none(part.token_ids.size) if mask is None else mask
                    for mask, part in zip(masks, parts, strict=True)
                ]
            )
        ready = tuple(number for part in parts for number in part.ready)
        chosen = np.concatenate(experts) if experts else None
        selected = [part.selections for part in parts if part.selections is not None]
        selections = {
            layer: np.concatenate([part[layer] for part in selected]) for layer in (selected or [{}])[0]
        }
        return StepOutput(
            ids, tokens, own, full, version, finished, states, chosen, mask, ready, selections or None
        )


@dataclass(slots=True)
class Pending:
    """A checked request that waits for a row.

    Attributes:
        history: int32 [n], the prompt and what was sampled of the turn.
        start: Where the turn begins in it.
        floor: The floors of a sequence that was being served already; None: still to be planned.
        replayed: Whether tokens of this sequence are flagged as replayed.
        before: What the session goes back to when the turn ends before its first token.
        caches: Caches of the first `cached` tokens as a cache exports them, if they come with the request.
        mixed: Whether earlier weights computed some of these.
    """

    request_id: int
    request: Request
    history: np.ndarray
    start: int
    floor: Floor | None = None
    replayed: bool = False
    before: Past | None = None
    caches: dict[str, Tensor] | None = None
    cached: int = 0
    mixed: bool = False


def check_request(request_id: int, request: Request, *, vocab_size: int, context: int) -> Pending:
    """Checks a request and returns it ready to be served.

    Raises:
        RequestError: One of its subclasses, which says what is wrong.
    """
    _check_sampling(request.sampling)
    prompt = _as_ids(request.token_ids)
    if prompt.size == 0:
        raise EmptyPromptError("the prompt is empty: give at least one token")
    history = np.concatenate((prompt, _as_ids(request.completed.token_ids)))
    if history.min() < 0 or history.max() >= vocab_size:
        bad = history[(history < 0) | (history >= vocab_size)][0]
        raise TokenRangeError(f"token id {bad} is outside 0..{vocab_size - 1}, the policy's vocabulary")
    if prompt.size >= context:
        raise ContextOverflowError(
            f"a history of {prompt.size} tokens leaves no room in a context of {context}; "
            "shorten it or make the engine with more max_tokens"
        )
    if history.size > context or len(request.completed.token_ids) > request.sampling.max_tokens:
        raise ContextOverflowError(
            f"{len(request.completed.token_ids)} completed tokens exceed the turn's budget of "
            f"{min(request.sampling.max_tokens, context - prompt.size)}"
        )
    _check_completed(request.completed, prompt.size)
    _check_images(request.images, prompt.size)
    return Pending(request_id, request, history.astype(np.int32), prompt.size)


def already_finished(pending: Pending, context: int) -> Finish | None:
    """Returns why a turn that comes with completed tokens has ended already, or None."""
    completed = pending.request.completed
    if len(completed.token_ids) and int(completed.token_ids[-1]) in pending.request.sampling.stop_ids:
        return Finish.STOP
    limit = min(pending.start + pending.request.sampling.max_tokens, context)
    return Finish.LENGTH if pending.history.size >= limit else None


def _as_ids(ids: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(ids)
        if array.size == 0:
            return np.zeros(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TokenRangeError(
                f"token ids are a flat sequence of integers, not {array.dtype} {array.shape}"
            )
        return array.astype(np.int64)
    except (ValueError, OverflowError) as error:
        raise TokenRangeError(f"token ids are a flat sequence of integers: {error}") from error


def _check_images(images: ImageTokens | None, size: int) -> None:
    if images is None:
        return
    rows = int((images.types == TokenType.IMAGE).sum())
    if images.types.shape != (size,) or images.rows.ndim != 2 or images.rows.shape[0] != rows:
        raise ImageError(
            f"{tuple(images.types.shape)} types and {tuple(images.rows.shape)} image rows do not fit a "
            f"history of {size} tokens with {rows} image tokens: give a type for each token and a row for "
            "each image token"
        )


def _check_sampling(sampling: SamplingParams) -> None:
    _check_kinds(sampling)
    if sampling.max_tokens < 1:
        raise SamplingError(f"max_tokens is at least 1, not {sampling.max_tokens}")
    temperature = sampling.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise SamplingError(f"temperature is a number of at least 0, not {temperature}")
    if 0 < temperature < LOWEST_TEMPERATURE:
        raise SamplingError(
            f"temperature {temperature} is below {LOWEST_TEMPERATURE}, where logits overflow: take 0 (greedy)"
        )
    if not 0 < sampling.top_p <= 1:
        raise SamplingError(f"top_p is above 0 and at most 1, not {sampling.top_p}")
    if not 0 <= sampling.top_k < _INT64:
        raise SamplingError(f"top_k is at least 0 (0 switches it off), not {sampling.top_k}")


def _check_kinds(sampling: SamplingParams) -> None:
    """Refuses values of other types here, where they concern one request; a step computes all of them."""
    for name in ("max_tokens", "top_k", "seed"):
        if not isinstance(value := getattr(sampling, name), Integral):
            raise SamplingError(f"{name} is an integer, not {value!r}")
    for name in ("temperature", "top_p"):
        if not isinstance(value := getattr(sampling, name), Real):
            raise SamplingError(f"{name} is a number, not {value!r}")
    stops = sampling.stop_ids
    if not isinstance(stops, Set) or not all(isinstance(i, Integral) and 0 <= i < _INT64 for i in stops):
        raise SamplingError(f"stop_ids is a set of token ids, not {stops!r}")


def _check_completed(turn: Columns, start: int) -> None:
    """Refuses what was recorded of a turn where it does not fit a history whose turn begins at `start`."""
    size = start + len(turn.token_ids)
    bad = [pair for pair in turn.replay_starts if not all(0 <= begin < size for begin in pair)]
    if bad:
        raise RequestError(
            f"the completed turn says that windows start at {bad[0]}, outside its history of {size} tokens: "
            "give the replay_starts that were recorded with these tokens"
        )
    if (experts := turn.expert_ids) is not None and not 0 <= experts.start <= size - len(experts.ids):
        raise RequestError(
            f"the completed turn has the experts of tokens {experts.start} .. "
            f"{experts.start + len(experts.ids) - 1}, outside its history of {size} tokens: give those that "
            "were recorded with it"
        )
