"""The synchronous core of the inference engine: one `step` computes one token for every running request.

A step admits waiting requests, spends a bounded number of tokens on prefill (so that decoding never
starves), decodes one token for every running row, and samples all rows in one call. It is the caller who
calls `step` again: between two steps everything is at a token boundary, which is where requests are added
and aborted, weights are swapped, and a pause takes place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from model.engine.errors import BusySessionError, NonFiniteLogitsError, RequestError, StateError
from model.engine.requests import (
    Finish,
    Finished,
    Pending,
    Request,
    StepOutput,
    already_finished,
    check_request,
)
from model.engine.rows import Drawn, Rows
from model.engine.sampler import sample
from model.engine.scheduler import Cache, Scheduler
from model.engine.speculative import Speculation, Speculator

if TYPE_CHECKING:
    from model.cache.policy_cache import PolicyCache
    from model.policy import Policy as Network


class Policy(Protocol):
    """What the engine asks of a policy."""

    config: Any

    def new_cache(self, max_sequences: int, max_tokens: int) -> Any:
        """Returns a cache for so many sequences of so many tokens."""
        ...

    def extend(self, cache: Any, slots: Tensor, token_ids: Tensor, lengths: Tensor) -> Tensor:
        """Appends tokens [B, L] to sequences and returns the hidden state [B, d] of each row's last token."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns float32 logits [B, V]."""
        ...

    def state_dict(self) -> Mapping[str, Tensor]:
        """Returns the weights by name."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Copies weights in place."""
        ...


@dataclass(slots=True)
class Counters:
    """What the engine has done since it was made."""

    steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    busy_seconds: float = 0.0


class Engine:
    """Continuous batching over one policy.

    Args:
        policy: The network; the engine alone calls it while it is in use.
        max_requests: How many requests are served at the same time; others wait.
        max_tokens: The context: the most tokens a sequence can have.
        idle_sessions: How many sessions keep caches while they are not served (default: `max_requests`).
        prefill_tokens: The most tokens of prefill in one step (raised to `max_requests` when below).
        version: The version of the policy's weights.
        speculate: How to draft and check several tokens a step; None draws one. The policy needs a drafter.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_requests: int,
        max_tokens: int,
        idle_sessions: int | None = None,
        prefill_tokens: int = 512,
        version: int = 0,
        speculate: Speculation | None = None,
    ) -> None:
        if max_requests < 1 or max_tokens < 2:
            raise ValueError(
                f"an engine serves at least 1 request of 2 tokens, not {max_requests} of {max_tokens}"
            )
        count = max_requests + (max_requests if idle_sessions is None else idle_sessions)
        self.policy = policy
        self.version = version
        self.counters = Counters()
        self.context = max_tokens
        self._prefill_tokens = max(prefill_tokens, max_requests)
        state = policy.state_dict()
        self._device = next(iter(state.values())).device
        self._vocab_size = int(policy.config.vocab_size)
        self._rows = Rows(count, max_tokens)
        self._cache = self._new_cache()
        self.scheduler = Scheduler(self._rows, self._cache, max_running=max_requests)
        self.speculator: Speculator | None = None
        if speculate is not None:
            with torch.inference_mode():
                cache = cast("PolicyCache", self._cache)
                self.speculator = Speculator.open(cast("Network", policy), cache, speculate, max_requests)
        self._sessions: dict[str, int] = {}
        self._ended: list[Finished] = []
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._sessions or self._ended)

    @property
    def running(self) -> int:
        """The number of requests that are being served."""
        return self.scheduler.served

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return len(self.scheduler.waiting)

    def submit(self, request: Request) -> int:
        """Takes a request and returns its id.

        Raises:
            RequestError: The request is at fault; nothing was changed.
        """
        pending = check_request(self._next_id, request, vocab_size=self._vocab_size, context=self.context)
        if request.session in self._sessions:
            raise BusySessionError(
                f"session {request.session!r} is being served: wait for its turn to end, or abort it"
            )
        self._next_id += 1
        if finish := already_finished(pending, self.context):
            self._ended.append(Finished(pending.request_id, request.session, finish, request.completed))
        else:
            self._sessions[request.session] = pending.request_id
            self.scheduler.enqueue(pending)
        return pending.request_id

    def abort(self, request_id: int) -> Finished | None:
        """Ends a request with what it has; its session keeps its caches. None when it is not being served."""
        if (row := self.scheduler.row_of(request_id)) is not None:
            return self._end(row, Finish.ABORT)
        for pending in self.scheduler.waiting:
            if pending.request_id == request_id:
                self.scheduler.waiting.remove(pending)
                return self._end_waiting(pending)
        return None

    def release(self, session: str) -> Finished | None:
        """Forgets a session and its caches; returns its turn when one was being served."""
        request_id = self._sessions.get(session)
        finished = None if request_id is None else self.abort(request_id)
        self.scheduler.forget(session)
        return finished

    def load_state(
        self,
        state: Mapping[str, Tensor | np.ndarray],
        version: int,
        *,
        caches: Literal["keep", "recompute"] = "keep",
    ) -> None:
        """Swaps the weights between two tokens; requests go on under `version`.

        Args:
            state: All tensors of the policy's `state_dict`, in any float dtype.
            version: The version of the tokens to come.
            caches: Whether to keep what the old weights computed, or to compute it anew.

        Raises:
            StateError: A tensor is missing, too many, or misshapen; nothing was changed.
        """
        if caches not in ("keep", "recompute"):
            raise ValueError(f"caches is keep or recompute, not {caches!r}")
        tensors = {name: _as_tensor(value) for name, value in state.items()}
        _check_state(self.policy.state_dict(), tensors)
        with torch.no_grad():
            self.policy.load_state_dict(tensors, strict=True)
        self.version = version
        if caches == "recompute":
            with torch.inference_mode():
                self.scheduler.recompute()

    def step(self) -> StepOutput:
        """Computes one token for every row that is ready, and returns the tokens and the turns that ended."""
        begin = time.perf_counter()
        with torch.inference_mode():
            self.scheduler.admit()
            drafted = self._speculate()
            rows, hidden = self._compute()
            output = self._sample(rows, hidden, drafted)
        self.counters.steps += 1
        self.counters.generated_tokens += output.token_ids.size
        self.counters.busy_seconds += time.perf_counter() - begin
        return output

    def _new_cache(self) -> Cache:
        with torch.inference_mode():
            return self.policy.new_cache(self._rows.count, self._rows.context)

    def _compute(self) -> tuple[np.ndarray, list[Tensor]]:
        """Prefills and decodes; returns the rows to sample [n] and their hidden states, in the same order."""
        decoding = self.scheduler.running if self.speculator is None else np.zeros(0, np.int64)
        rows, hidden = [decoding], []
        if decoding.size:
            hidden.append(self._extend(decoding, np.ones_like(decoding)))
            self._rows.cached[decoding] += 1
        if self.scheduler.prefill_is_due(self._prefill_tokens):
            for batch, shares in self.scheduler.plan(self._prefill_tokens):
                states = self._extend(batch, shares)
                self.counters.prefilled_tokens += int(shares.sum())
                for i in np.flatnonzero(self.scheduler.computed(batch, shares)):
                    started = self.scheduler.start(int(batch[i]))
                    rows.append(np.array(started, np.int64))
                    hidden.append(states[i : i + 1].expand(len(started), -1))
        return np.concatenate(rows), hidden

    def _speculate(self) -> Drawn | None:
        """Decodes with drafts, when that is asked for; returns what was drawn."""
        if self.speculator is None or not self.scheduler.running.size:
            return None
        return self.speculator.step(self._rows, self.scheduler.running)

    def _extend(self, rows: np.ndarray, shares: np.ndarray) -> Tensor:
        """Appends the next `shares` [b] tokens of each row to the cache; returns hidden states [b, d]."""
        table = self._rows
        offsets = table.cached[rows][:, None] + np.arange(int(shares.max()))
        # Past a row's share any token will do: the policy reads `lengths` of them.
        ids = table.token_ids[rows[:, None], np.minimum(offsets, table.context - 1)]
        extend = self.policy.extend if self.speculator is None else self.speculator.extend
        return extend(
            self._cache,
            self._to_device(table.slot[rows]),
            self._to_device(ids.astype(np.int64)),
            self._to_device(shares),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _sample(self, rows: np.ndarray, hidden: list[Tensor], drafted: Drawn | None) -> StepOutput:
        parts = [] if drafted is None else [drafted]
        if rows.size:
            logits = self.policy.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
            drawn = sample(logits, self._rows.sampling.take(rows), self._rows.length[rows])
            parts.append(Drawn.of_one(rows, drawn))
        ended, self._ended = self._ended, []
        self.scheduler.running = np.zeros(0, np.int64)
        taken = [self._take(part, ended) for part in parts]
        if not all(part.clean for part in parts):
            # NaN in storage outlives its sequence: a masked entry still enters products as 0 * NaN.
            self._cache = self._new_cache()
            self.scheduler.recompute(self._cache)
            if self.speculator is not None:
                self.speculator.attach(cast("PolicyCache", self._cache))
        ids, tokens, logprobs, full_logprobs = _joined(taken)
        return StepOutput(ids, tokens, logprobs, full_logprobs, self.version, ended)

    def _take(self, drawn: Drawn, ended: list[Finished]) -> tuple[np.ndarray, ...]:
        """Appends what was drawn; returns ids, tokens and log-probabilities, and adds to `ended`."""
        ended += [self._fail(int(row)) for row in drawn.rows[~drawn.finite]]
        drawn = drawn.select(drawn.finite)
        rows, counts = drawn.rows, drawn.counts
        ids = self._rows.request_id[rows]
        for place in range(int(counts.max(initial=0))):
            some = place < counts
            tokens, logprobs = drawn.token_ids[some, place], drawn.logprobs[some, place]
            self._rows.append(rows[some], tokens, logprobs, self.version)
        stopped = self._rows.stopped(rows)
        done = stopped | (self._rows.length[rows] >= self._rows.limit[rows])
        self.scheduler.running = np.concatenate((self.scheduler.running, rows[~done]))
        for row, stop in zip(rows[done].tolist(), stopped[done].tolist(), strict=True):
            ended.append(self._end(row, Finish.STOP if stop else Finish.LENGTH))
        return (np.repeat(ids, counts), *drawn.packed())

    def _end(self, row: int, finish: Finish, error: RequestError | None = None) -> Finished:
        session = self._rows.session[row]
        finished = Finished(int(self._rows.request_id[row]), session, finish, self._rows.turn(row), error)
        del self._sessions[session]
        self.scheduler.running = self.scheduler.running[self.scheduler.running != row]
        self.scheduler.end(row, keep=error is None)
        return finished

    def _end_waiting(self, pending: Pending) -> Finished:
        request = pending.request
        del self._sessions[request.session]
        return Finished(pending.request_id, request.session, Finish.ABORT, request.completed)

    def _fail(self, row: int) -> Finished:
        error = NonFiniteLogitsError(
            f"the policy gave NaN or infinite logits at position {self._rows.length[row]} of session "
            f"{self._rows.session[row]!r} (weights of version {self.version}); check the weights"
        )
        return self._end(row, Finish.ERROR, error)


def _joined(parts: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """Request ids, token ids and both log-probabilities of several parts, as columns."""
    kinds = (np.int64, np.int64, np.float32, np.float32)
    nothing = tuple(np.zeros(0, kind) for kind in kinds)
    return [np.concatenate(column) for column in zip(nothing, *parts, strict=True)]


def _as_tensor(value: Tensor | np.ndarray) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy())


def _check_state(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
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
