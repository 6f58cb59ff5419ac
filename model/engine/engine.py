"""The synchronous core of the inference engine: one `step` computes one token for every running request.

A step admits waiting requests, spends a bounded number of tokens on prefill (so that decoding never
starves), decodes one token for every running row, and samples all rows in one call. It is the caller who
calls `step` again: between two steps everything is at a token boundary, which is where requests are added,
aborted, exported and imported, weights are swapped, and a pause takes place.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from model.cache.prefix import PrefixStore
from model.choices import Capture
from model.engine.errors import BusySessionError, ImageError, NonFiniteLogitsError, RequestError
from model.engine.policy import Policy, Storage, as_tensors, check_state
from model.engine.prefixes import Prefixes
from model.engine.replay import Floor, ReplayRule
from model.engine.requests import (
    Finish,
    Finished,
    Pending,
    Request,
    StepOutput,
    already_finished,
    check_request,
)
from model.engine.roles import Role, check_role, require
from model.engine.rows import Rows
from model.engine.sampler import sample
from model.engine.scheduler import Cache, Scheduler
from model.engine.speculative import Drawn, Speculation, Speculator
from model.engine.staging import StagedWeights
from model.engine.state import RequestState, check_caches, pack, unpack
from model.engine.warm_up import late_compiles_told, warm_up
from model.replay import Replay
from model.vision import ImageTokens

Keep = Literal["keep", "recompute"]
"""What to do with caches that other weights computed."""


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
        storage: "packed" keeps keys as records on pages (the policy has to round them: `fake_quant`), "dense"
            as floats. None: packed where the policy rounds keys.
        pages: Packed only: the pages of compressed keys (default: what all sequences can need). When they
            run out, idle sessions and then the requests that came last give way.
        replay: What a prefill runs of the decoder. None: "bounded" where the policy has a decoder.
        exact: Compute in exact mode, in which no bit of a result depends on batch, chunk or interruption.
            None: as the policy is set.
        capture: Keep the expert ids of every token.
        capture_selections: Keep also the keys that every token selected; needs `capture`.
        role: The work this engine takes.
        speculate: How to draft and check several tokens a step; None draws one. The policy needs a drafter.
        prefix_store: Where requests find the beginnings of their histories, and turns leave theirs; made for
            this engine's version, configuration and replay, and its storage is packed.
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
        storage: Storage | None = None,
        pages: int | None = None,
        replay: Replay | None = None,
        exact: bool | None = None,
        capture: bool = False,
        capture_selections: bool = False,
        role: Role = "all",
        speculate: Speculation | None = None,
        prefix_store: PrefixStore | None = None,
    ) -> None:
        if max_requests < 1 or max_tokens < 2:
            raise ValueError(
                f"an engine serves at least 1 request of 2 tokens, not {max_requests} of {max_tokens}"
            )
        check_role(role)
        if storage == "packed" and not policy.fake_quant:
            raise ValueError(
                "packed storage holds rounded keys and needs fake_quant: set policy.fake_quant, or use "
                "storage='dense'"
            )
        if idle_sessions is not None and idle_sessions < 0:
            raise ValueError(f"idle_sessions is at least 0 (keep none), not {idle_sessions}")
        count = max_requests + (max_requests if idle_sessions is None else idle_sessions)
        if role == "encode":
            count, max_tokens = 1, 2  # it holds no sequences
        self.role: Role = role
        self.policy, self.version, self.context = policy, version, max_tokens
        self.storage: Storage = storage or ("packed" if policy.fake_quant else "dense")
        self.replay: Replay = replay or ("off" if policy.config.decoder_start is None else "bounded")
        self.counters = Counters()
        self.paused = False
        policy.exact = policy.exact if exact is None else exact
        config = policy.config
        self._pages, self._capture, self._selections = pages, capture, capture and capture_selections
        self._prefill_tokens = max(prefill_tokens, max_requests)
        self._device = next(iter(policy.state_dict().values())).device
        self._vocab_size = int(config.vocab_size)
        experts = (config.num_hidden_layers, config.num_experts_per_tok) if capture else None
        widths: dict[int, int] = {}
        if self._selections:
            widths = dict.fromkeys(config.index_source_layer_ids, int(config.index_topk))
        self._rows = Rows(count, max_tokens, experts, widths)
        self._cache = self._new_cache()
        self._check_pages()
        rule = ReplayRule.of(self.replay, config)
        self._store = prefix_store
        prefixes = None if prefix_store is None else self._prefixes(prefix_store, rule)
        self.scheduler = Scheduler(
            self._rows, self._cache, max_running=max_requests, rule=rule, prefixes=prefixes
        )
        self.speculator: Speculator | None = None
        if speculate is not None:
            self.speculator = Speculator.open(policy, self._cache, speculate, max_requests)
            self.scheduler.decode_tokens = self.speculator.slots + 1
        warm_up(policy, self._cache, max_requests, self._prefill_tokens, self.scheduler.decode_tokens)
        self._sessions: dict[str, int] = {}
        self._ended: list[Finished] = []
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        moving = len(self._sessions) > len(self.scheduler.ready)
        return bool(self._ended) or (moving and not self.paused)

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
            RequestError: The request is at fault, or not for an engine of this role; nothing was changed.
        """
        require(self.role, "prefill", "compute prompts")
        pending = check_request(self._next_id, request, vocab_size=self._vocab_size, context=self.context)
        self._check_images(request)
        return self._take(pending)

    def abort(self, request_id: int) -> Finished | None:
        """Ends a request with what it has; its session keeps its caches. None when it is not being served."""
        if (row := self.scheduler.row_of(request_id)) is not None:
            return self._end(row, Finish.ABORT)
        if (pending := self.scheduler.waiter(request_id)) is not None:
            self.scheduler.withdraw(pending)
            del self._sessions[pending.request.session]
            return Finished(request_id, pending.request.session, Finish.ABORT, pending.request.completed)
        return None

    def release(self, session: str) -> Finished | None:
        """Forgets a session and its caches; returns its turn when one was being served."""
        request_id = self._sessions.get(session)
        finished = None if request_id is None else self.abort(request_id)
        self.scheduler.forget(session)
        return finished

    def pause(self) -> None:
        """Stops all requests where they are, at a token boundary, until `resume`: a step computes nothing."""
        self.paused = True

    def resume(self) -> None:
        """Continues after `pause`."""
        self.paused = False

    def serves(self, request_id: int) -> bool:
        """Whether a request waits or is being sampled, so that it can be exported."""
        return self.scheduler.row_of(request_id) is not None or self.scheduler.waiter(request_id) is not None

    def export_state(self, request_id: int, *, remove: bool = False) -> RequestState:
        """Returns all of a request, caches included, to be imported elsewhere or later.

        With `remove` the request and its session leave this engine, without a `Finished`.

        Raises:
            RequestError: No such request is being served.
        """
        pending = self._snapshot(request_id)
        if pending is None:
            raise RequestError(f"request {request_id} is not being served: it ended, or was never submitted")
        extra = {"version": self.version, "policy": self._fingerprint(), "storage": self.storage}
        state = pack(pending, extra)
        if remove:
            self.release(pending.request.session)
        return state

    def import_state(self, state: RequestState, *, caches: Keep = "keep") -> int:
        """Takes over a request and returns its id here; it continues with the same draws.

        Args:
            state: What another engine, or this one, exported.
            caches: Whether to take its caches, or to compute them anew.

        Raises:
            StateError: It was exported by a policy of another configuration, or its caches are of another
                storage; nothing was changed.
            RequestError: It does not fit this engine, or is for one of another role; nothing was changed.
        """
        require(self.role, "decode", "sample the tokens of imported requests")
        _check_keep(caches)
        pending = unpack(state, self._next_id)
        self._check_images(pending.request)
        checked = check_request(
            self._next_id, pending.request, vocab_size=self._vocab_size, context=self.context
        )
        if caches == "recompute":
            pending.caches, pending.cached = None, 0
        check_caches(state, pending, self._cache, self._fingerprint(), self.storage)
        pending.history = checked.history
        pending.mixed |= pending.caches is not None and state.header.get("version") != self.version
        request_id = self._take(pending)
        self.scheduler.forget(pending.request.session)
        return request_id

    def encode_images(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """Returns the embedding rows [M, d] of each image, given as patches and their grid.

        Raises:
            RoleError: This engine does not encode images.
            ValueError: The policy has no image tower.
        """
        require(self.role, "encode", "encode images")
        with torch.inference_mode():
            return [
                self.policy.encode_image(patches.to(self._device), grid).clone() for patches, grid in images
            ]

    def load_state(
        self,
        state: Mapping[str, Tensor | np.ndarray] | StagedWeights,
        version: int,
        *,
        caches: Keep = "keep",
    ) -> None:
        """Swaps the weights between two tokens; requests go on under `version`.

        Args:
            state: All tensors of the policy's `state_dict`, in any float dtype; or these made ready, so that
                nothing is copied here.
            version: The version of the tokens to come.
            caches: Whether to keep what the old weights computed, or to compute it anew.

        Raises:
            StateError: A tensor is missing, too many, or misshapen; nothing was changed.
        """
        _check_keep(caches)
        if isinstance(state, StagedWeights):
            state.swap()
        else:
            tensors = as_tensors(state)
            check_state(self.policy.state_dict(), tensors)
            with torch.no_grad():
                self.policy.load_state_dict(tensors, strict=True)
        self.set_version(version, caches=caches)

    def set_version(self, version: int, *, caches: Keep = "keep") -> None:
        """Says that the weights are another version now: the policy's own tensors were changed in place."""
        _check_keep(caches)
        self.version = version
        if self._store is not None:
            self._store.set_version(version)
        if caches == "keep":
            self.scheduler.keep_caches()
            return
        with torch.inference_mode():
            self.scheduler.recompute()

    def step(self) -> StepOutput:
        """Computes one token for every row that is ready, and returns the tokens and the turns that ended."""
        begin = time.perf_counter()
        ended, self._ended = self._ended, []
        with torch.inference_mode(), late_compiles_told():
            parts, clean = [], True
            if not self.paused:
                self.scheduler.admit()
                parts, clean = self._compute()
            output = self._record(parts, clean, ended)
        self.counters.steps += 1
        self.counters.generated_tokens += output.token_ids.size
        self.counters.busy_seconds += time.perf_counter() - begin
        return output

    def take_starts(self) -> dict[int, tuple[Floor, ...]]:
        """The replay starts, by request, of turns whose windows were placed since the last call."""
        starts, self.scheduler.new_starts = self.scheduler.new_starts, {}
        return starts

    def _check_images(self, request: Request) -> None:
        if request.images is not None and self.policy.config.vision is None:
            raise ImageError(
                "the request has images and this policy has no image tower: its configuration lacks "
                "vision_config"
            )

    def _take(self, pending: Pending) -> int:
        session = pending.request.session
        if session in self._sessions:
            raise BusySessionError(
                f"session {session!r} is being served: wait for its turn to end, or abort it"
            )
        self._next_id += 1
        if finish := already_finished(pending, self.context):
            self._ended.append(Finished(pending.request_id, session, finish, pending.request.completed))
        else:
            self._sessions[session] = pending.request_id
            self.scheduler.enqueue(pending)
        return pending.request_id

    def _new_cache(self) -> Cache:
        options: dict[str, Any] = {"storage": self.storage}
        if self._pages is not None:
            options["pages"] = self._pages
        with torch.inference_mode():
            return self.policy.new_cache(self._rows.count, self._rows.context, **options)

    def _prefixes(self, store: PrefixStore, rule: ReplayRule) -> Prefixes:
        if store.fingerprint.version != self.version or self.storage != "packed":
            raise ValueError(
                f"a prefix store of version {store.fingerprint.version} does not fit an engine of version "
                f"{self.version} with {self.storage} storage: give both the same version, and packed storage"
            )
        return Prefixes(store, self.policy, rule)

    def _check_pages(self) -> None:
        pages = self._cache.pages
        needed = 0 if pages is None else pages.table.shape[1]
        if self._pages is not None and self._pages < needed:
            raise ValueError(
                f"one sequence of {self.context} tokens needs {needed} pages, not {self._pages}: "
                "give the engine more pages, or a shorter context"
            )

    def _compute(self) -> tuple[list[Drawn], bool]:
        """Prefills, decodes and samples; returns what was drawn, and whether all caches hold is finite.

        Rows that speculate draw several tokens: the first ones are one part, the second ones the next.
        """
        plan, parts, clean = self.scheduler.plan(self._prefill_tokens), [], True
        rows, hidden, decoding = [], [], plan.decoding
        if decoding.size and self.speculator is not None:
            parts, clean = self.speculator.step(self._rows, decoding, plan.each - 1, self._capture)
        elif decoding.size:
            rows, hidden = [decoding], [self._extend(decoding, np.ones_like(decoding))]
            self._rows.cached[decoding] += 1
        for batch, shares in plan.prefill:
            states = self._extend(batch, shares, self._decode_from(batch))
            self.counters.prefilled_tokens += int(shares.sum())
            for i in np.flatnonzero(self.scheduler.computed(batch, shares)):
                started = self.scheduler.start(int(batch[i]))
                rows.append(np.array(started, np.int64))
                hidden.append(states[i : i + 1].expand(len(started), -1))
        if rows:
            every = np.concatenate(rows)
            logits = self.policy.logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))
            drawn = sample(
                logits, self._rows.sampling.take(every), self._rows.length[every], exact=self.policy.exact
            )
            parts, clean = [*parts, Drawn(every, drawn)], clean and bool(drawn.finite.all())
        return parts, clean

    def _decode_from(self, rows: np.ndarray) -> Tensor | None:
        """[b] where the decoder starts in rows that are prefilled."""
        if self.replay == "off":
            return None
        return torch.tensor([self._rows.floor[row][1] for row in rows.tolist()], device=self._device)

    def _extend(self, rows: np.ndarray, shares: np.ndarray, decode_from: Tensor | None = None) -> Tensor:
        """Appends the next `shares` [b] tokens of each row to the cache; returns hidden states [b, d]."""
        table, options = self._rows, dict[str, Any]()
        offsets = table.cached[rows][:, None] + np.arange(int(shares.max()))
        # Past a row's share any token will do: the policy reads `lengths` of them.
        ids = table.token_ids[rows[:, None], np.minimum(offsets, table.context - 1)]
        if decode_from is not None:
            options["decode_from"] = decode_from
        if (images := table.images(rows, shares)) is not None:
            options["images"] = ImageTokens(images.types.to(self._device), images.rows.to(self._device))
        capture = Capture(selections_too=self._selections) if self._capture else None
        if capture is not None:
            options["capture"] = capture
        extend = self.policy.extend if self.speculator is None else self.speculator.extend
        hidden = extend(
            self._cache,
            self._to_device(table.slot[rows]),
            self._to_device(ids.astype(np.int64)),
            self._to_device(shares),
            **options,
        )
        if capture is not None:
            table.capture(rows, shares, capture)
        return hidden

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _record(self, parts: list[Drawn], clean: bool, ended: list[Finished]) -> StepOutput:
        outputs = [self._append(part, ended) for part in parts]
        if not clean:
            # NaN in storage outlives its sequence: a masked entry still enters products as 0 * NaN.
            self._cache = self._new_cache()
            self.scheduler.recompute(self._cache)
            if self.speculator is not None:
                self.speculator.attach(self._cache)
        return StepOutput.join(outputs, self.version, ended)

    def _append(self, part: Drawn, ended: list[Finished]) -> StepOutput:
        """Appends what was drawn, ends the turns it completes, and says what the other rows do next."""
        table, rows, drawn = self._rows, part.rows, part.drawn
        table.cached[rows] += part.advance
        if not drawn.finite.all():
            ended += [self._fail(int(row)) for row in rows[~drawn.finite]]
            rows, drawn = rows[drawn.finite], drawn.take(drawn.finite)
        states, experts, selections = table.state(rows), table.last_experts(rows), table.last_selections(rows)
        table.append(rows, drawn, self.version)
        ids = table.request_id[rows]
        stopped = table.stopped(rows)
        done = stopped | (table.length[rows] >= table.limit[rows])
        ready, going = (), rows[~done]
        if self.role == "prefill":
            ready, going = tuple(ids[~done].tolist()), going[:0]
            self.scheduler.ready += rows[~done].tolist()
        self.scheduler.go_on(going)
        for row, stop in zip(rows[done].tolist(), stopped[done].tolist(), strict=True):
            ended.append(self._end(row, Finish.STOP if stop else Finish.LENGTH))
        columns = (ids, drawn.token_ids, drawn.logprobs, drawn.full_logprobs)
        return StepOutput(*columns, self.version, ended, states, experts, drawn.kept, ready, selections)

    def _end(self, row: int, finish: Finish, error: RequestError | None = None) -> Finished:
        session = self._rows.session[row]
        finished = Finished(int(self._rows.request_id[row]), session, finish, self._rows.turn(row), error)
        del self._sessions[session]
        self.scheduler.end(row, keep=error is None)
        return finished

    def _fail(self, row: int) -> Finished:
        error = NonFiniteLogitsError(
            f"the policy gave NaN or infinite logits at position {self._rows.length[row]} of session "
            f"{self._rows.session[row]!r} (weights of version {self.version}); check the weights"
        )
        return self._end(row, Finish.ERROR, error)

    def _snapshot(self, request_id: int) -> Pending | None:
        """A request as it is now, with its caches."""
        row = self.scheduler.row_of(request_id)
        if row is None:
            return self.scheduler.waiter(request_id)
        pending, slot = self.scheduler.suspended(row), int(self._rows.slot[row])
        if self._rows.cached[row] > 0:
            pending.caches, pending.cached = self._cache.export_slot(slot), int(self._rows.cached[row])
            pending.mixed = bool(self._rows.mixed[row])
        return pending

    def _fingerprint(self) -> str:
        """What a policy has to have in common with another for caches to mean the same."""
        described = f"{self.policy.config!r} fake_quant={self.policy.fake_quant}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]


def _check_keep(caches: str) -> None:
    if caches not in ("keep", "recompute"):
        raise ValueError(f"caches is keep or recompute, not {caches!r}")
