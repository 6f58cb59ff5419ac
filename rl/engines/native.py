"""Our own engine behind the asyncio interface: the model engine's loop runs in one thread of its own.

Callers put commands into a queue and await a future. The thread takes the commands between two steps, so a
pause, a weight swap or an abort always falls on a token boundary, and it wakes the event loop at most once a
step. While there is nothing to do it sleeps on a condition. An error in the loop ends the engine: everyone
who waits, and everyone who calls later, gets it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from model.cache.prefix import PrefixStore
from model.engine.columns import Columns
from model.engine.engine import Engine as ModelEngine
from model.engine.errors import RequestError
from model.engine.policy import Policy, Storage
from model.engine.requests import Finished, Request, StepOutput
from model.engine.roles import Role
from model.engine.speculative import Speculation
from model.engine.staging import StagedWeights
from model.engine.state import RequestState
from model.replay import Replay
from model.vision import ImageTokens
from rl.engines.base import (
    Completion,
    EngineError,
    GenerateRequest,
    HistoryImages,
    StepFrame,
    StepListener,
)
from rl.engines.images import ImageRows
from rl.engines.prefixes import store_stats
from rl.engines.saved import SavedTurns
from rl.engines.turns import FrameNames, columns, completion, deliver, engine_error, step_frames


class EngineClosedError(RuntimeError):
    """The engine was closed, or its loop died of the error that is the cause of this one."""


@dataclass(slots=True)
class _Waiter:
    """Who waits for a request: where to deliver, and what the step frame says of it."""

    future: asyncio.Future[Completion]
    session: str
    turn: int


T = TypeVar("T")
Prefilled = RequestState | Completion
"""A computed prompt on its way to a decode engine, or a turn that ended with its first token."""

_Delivery = tuple["asyncio.Future[Any]", Any]
_Command = tuple["asyncio.Future[Any]", Callable[[], None]]


class NativeEngine:
    """Implements `rl.engines.base.Engine` over a policy of ours.

    Args:
        policy: The network; the engine's thread alone calls it.
        max_requests: How many requests are served at the same time.
        max_tokens: The context of a sequence.
        on_step: Called in the engine's thread with the tokens of each step, before anyone gets them.
        version: The version of the policy's weights.
        idle_sessions: How many sessions keep caches between turns (default: `max_requests`).
        caches: What a weight swap does with the caches.
        stage_weights: Whether new weights are copied beside the old ones while requests go on, which takes
            their memory twice; otherwise during the pause.
        speculate: How to draft and check several tokens a step; None draws one.
        storage, pages, replay, exact, capture, capture_selections, prefix_store: As
            `model.engine.engine.Engine` takes them.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        max_requests: int,
        max_tokens: int,
        on_step: StepListener | None = None,
        version: int = 0,
        idle_sessions: int | None = None,
        caches: Literal["keep", "recompute"] = "keep",
        speculate: Speculation | None = None,
        storage: Storage | None = None,
        pages: int | None = None,
        replay: Replay | None = None,
        exact: bool | None = None,
        capture: bool = False,
        capture_selections: bool = False,
        prefix_store: PrefixStore | None = None,
        role: Role = "all",
        saved: SavedTurns | None = None,
        stage_weights: bool = True,
    ) -> None:
        self.version = version
        self._engine = ModelEngine(
            policy,
            max_requests=max_requests,
            max_tokens=max_tokens,
            idle_sessions=idle_sessions,
            version=version,
            speculate=speculate,
            storage=storage,
            pages=pages,
            replay=replay,
            exact=exact,
            capture=capture,
            capture_selections=capture_selections,
            prefix_store=prefix_store,
            role=role,
        )
        self._policy, self._stages_weights, self._loading = policy, stage_weights, asyncio.Lock()
        self._saved = saved
        self._images = ImageRows(policy)
        self._store = prefix_store
        self._caches: Literal["keep", "recompute"] = caches
        self._on_step = on_step
        self._wake = threading.Condition()
        self._commands: deque[_Command] = deque()
        self._waiters: dict[int, _Waiter] = {}
        self._names = FrameNames()
        self._outbox: list[_Delivery] = []
        self._closing = False
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pause_seconds = 0.0

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one turn; cancelling the call aborts the turn.

        Raises:
            EngineError: The request itself is at fault; its cause is the engine's typed error.
            EngineClosedError: The engine is closed or broken.
        """
        future: asyncio.Future[Completion] = self._new_future()
        self._put(future, lambda: self._submit(request, future))
        return await self._outcome(future)

    async def abort(self, session: str) -> None:
        """Ends the turn that a session is sampling, if any, with `ABORT`; its caches stay."""
        await self._call(lambda: self._abort(session))

    async def release(self, session: str) -> None:
        """Forgets a trajectory and frees its caches; a running request of it ends with `ABORT`.

        An engine that was closed has forgotten everything: then there is nothing to do.
        """
        if self._closing and self._failure is None:
            return
        await self._call(lambda: self._finish(self._engine.release(session)))

    async def pause(self) -> None:
        """Stops all requests; returns when the step that is being computed is over."""
        await self._call(self._engine.pause)

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._call(self._engine.resume)

    async def export_state(self, session: str, *, remove: bool = False) -> RequestState:
        """Returns all of the turn that a session is sampling, to go on elsewhere or later.

        With `remove` the session leaves this engine; whoever waits for the turn gets it with `ABORT`.

        Raises:
            EngineError: The session is not sampling a turn.
        """
        future = self._new_future()
        self._put(future, lambda: self._export(session, remove, future))
        return await future

    async def continue_state(
        self, state: RequestState, turn: int, *, caches: Literal["keep", "recompute"] = "keep"
    ) -> Completion:
        """Takes over a turn that another engine exported and samples the rest of it.

        Raises:
            EngineError: The turn does not fit this engine; its cause is the engine's typed error.
            StateError: Its caches do not fit this engine's.
        """
        future: asyncio.Future[Completion] = self._new_future()
        self._put(future, lambda: self._import(state, turn, caches, future))
        return await self._outcome(future)

    async def prefill(self, request: GenerateRequest, rows: ImageTokens | None = None) -> Prefilled:
        """Computes a prompt and its first token, as an engine of that role; a decode engine goes on.

        Args:
            request: The turn.
            rows: The images of its history, encoded elsewhere; None: encoded here, if there are any.

        Raises:
            EngineError: The request itself is at fault.
        """
        future: asyncio.Future[Prefilled] = self._new_future()
        self._put(future, lambda: self._submit(request, future, rows))
        return await self._outcome(future)

    async def encode(self, history: HistoryImages) -> ImageTokens | None:
        """Encodes the images of a history, between two steps. Raises EngineError without an image tower."""
        future = self._new_future()
        self._put(future, lambda: self._outbox.append((future, self._images.of(history))))
        return await future

    async def announce(self, request: GenerateRequest, sampled: Completion) -> None:
        """Tells the step listener of tokens that another engine sampled for a turn of this one."""
        await self._call(lambda: self._announce(request, sampled))

    async def persist(self) -> int:
        """Keeps the caches of turns that are being sampled on disk, where it pays; call it while paused.

        Returns how many turns. A turn that is asked for again here, or in a successor, goes on with them.
        """
        if self._saved is None:
            return 0
        saved, future = self._saved, self._new_future()

        def save() -> None:
            states = (self._engine.export_state(i) for i in list(self._waiters) if self._engine.serves(i))
            self._outbox.append((future, saved.save(states)))

        self._put(future, save)
        return await future

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        """Swaps the weights between two tokens; running requests continue under `version`.

        Raises:
            StateError: The tensors do not fit the policy; the old weights stay.
        """
        async with self._loading:
            state: Any = tensors
            if self._stages_weights:
                state = await asyncio.to_thread(StagedWeights, self._policy, state)
            await self._call(lambda: self._swap(version, lambda: self._load(state, version)))

    async def set_version(self, version: int) -> None:
        """Says that the policy's own tensors were changed in place, between `pause` and `resume`."""
        await self._call(
            lambda: self._swap(version, lambda: self._engine.set_version(version, caches=self._caches))
        )

    async def close(self) -> None:
        """Ends the engine and its thread; running requests end with `ABORT`. A second call does nothing."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def stats(self) -> dict[str, float]:
        """Counters since start: steps, tokens generated and prefilled, busy seconds; requests right now.

        `pause_seconds` is how long the last swap of weights held the engine up. With speculation also single
        requests' steps, drafts checked, and drafts accepted.
        """
        counters, scheduler = self._engine.counters, self._engine.scheduler
        speculator = self._engine.speculator
        drafts = {} if speculator is None else speculator.counters.summary()
        return {
            **drafts,
            **({} if self._store is None else store_stats(self._store)),
            "steps": float(counters.steps),
            "generated_tokens": float(counters.generated_tokens),
            "prefilled_tokens": float(counters.prefilled_tokens),
            "busy_seconds": counters.busy_seconds,
            "pause_seconds": self._pause_seconds,
            "running": float(self._engine.running),
            "waiting": float(self._engine.waiting),
            "evictions": float(scheduler.evictions),
            "forks": float(scheduler.forks),
            "preemptions": float(scheduler.preemptions),
            "healthy": float(self._failure is None and not self._closing),
            **({} if self._saved is None else self._saved.stats()),
        }

    # From here on to `_run`: called in the event loop.

    def _new_future(self) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise EngineError("an engine serves one event loop: make another engine for another loop")
        return loop.create_future()

    def _put(self, future: asyncio.Future[Any], command: Callable[[], None]) -> None:
        with self._wake:
            if self._closing or self._failure is not None:
                raise _closed_error(self._failure)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self._commands.append((future, command))
            self._wake.notify()

    async def _outcome(self, future: asyncio.Future[T]) -> T:
        """Waits for a turn; when the caller is cancelled, the turn is aborted."""
        try:
            return await future
        except asyncio.CancelledError:
            with self._wake:
                self._commands.append((future, lambda: self._abandon(future)))
                self._wake.notify()
            raise

    async def _call(self, action: Callable[[], None]) -> None:
        """Runs an action in the engine's thread, between two steps."""
        future = self._new_future()

        def command() -> None:
            action()
            self._outbox.append((future, None))

        self._put(future, command)
        await future

    # From here on: called in the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                self._take_commands()
                if self._engine.has_work:
                    self._publish(self._engine.step())
                self._flush()
            self._take_commands()
            for waiter in list(self._waiters.values()):
                self._finish(self._engine.release(waiter.session))
            if self._engine.has_work:
                self._publish(self._engine.step())
            self._flush()
        except BaseException as error:  # whatever it is, those who wait must learn of it
            self._fail(error)

    def _wait(self) -> bool:
        """Sleeps until there is something to do; returns False when the engine is to end."""
        with self._wake:
            while not (self._closing or self._commands or self._engine.has_work):
                self._wake.wait()
            return not self._closing

    def _take_commands(self) -> None:
        """Runs all commands; an error of one belongs to its caller alone."""
        with self._wake:
            commands, self._commands = self._commands, deque()
        for future, command in commands:
            try:
                command()
            except RequestError as error:
                self._outbox.append((future, engine_error(error)))
            except Exception as error:
                self._outbox.append((future, error))

    def _submit(
        self, request: GenerateRequest, future: asyncio.Future[Any], rows: ImageTokens | None = None
    ) -> None:
        if self._saved is not None and (state := self._saved.take(request)) is not None:
            try:
                same = state.header.get("version") == self.version
                return self._import(state, request.turn, "keep" if same else self._caches, future)
            except RequestError:
                self._saved.refused += 1  # of another storage, say: the turn is computed anew
        completed = Columns() if request.completed is None else columns(request.completed)
        images = rows
        if rows is None and request.images is not None:
            images = self._images.of(request.images)
        request_id = self._engine.submit(
            Request(
                request.session,
                request.token_ids,
                request.sampling,
                completed,
                continues=request.turn > 0,
                images=images,
            )
        )
        self._waiters[request_id] = _Waiter(future, request.session, request.turn)

    def _abort(self, session: str) -> None:
        for request_id, waiter in list(self._waiters.items()):
            if waiter.session == session:
                self._finish(self._engine.abort(request_id))

    def _abandon(self, future: asyncio.Future[Any]) -> None:
        for request_id, waiter in list(self._waiters.items()):
            if waiter.future is future:
                self._finish(self._engine.abort(request_id))

    def _export(self, session: str, remove: bool, future: asyncio.Future[Any]) -> None:
        found = next((i for i, waiter in self._waiters.items() if waiter.session == session), None)
        if found is None:
            raise RequestError(f"session {session!r} is not sampling a turn: there is nothing to export")
        state = self._engine.export_state(found)
        if remove:
            self._finish(self._engine.release(session))
        self._outbox.append((future, state))

    def _import(
        self,
        state: RequestState,
        turn: int,
        caches: Literal["keep", "recompute"],
        future: asyncio.Future[Completion],
    ) -> None:
        request_id = self._engine.import_state(state, caches=caches)
        self._waiters[request_id] = _Waiter(future, state.header["session"], turn)

    def _load(self, state: Any, version: int) -> None:
        self._engine.load_state(state, version, caches=self._caches)

    def _swap(self, version: int, change: Callable[[], None]) -> None:
        begin = time.perf_counter()
        change()
        if self._caches == "recompute":
            self._images.forget()
        self.version = version
        self._pause_seconds = time.perf_counter() - begin

    def _publish(self, output: StepOutput) -> None:
        """Hands a step's tokens to the listener, then puts the turns that ended into the outbox."""
        self._names.note(self._engine.take_starts(), self._waiters)
        if self._on_step is not None and output.token_ids.size:
            self._on_step(
                StepFrame(
                    *self._names.of(output.request_ids, self._waiters),
                    output.token_ids.astype(np.int32),
                    output.logprobs.astype(np.float32),
                    output.version,
                    output.states,
                    output.expert_ids,
                    output.sampling_mask,
                    output.selections,
                    self._names.take_starts(),
                )
            )
        for request_id in output.ready:
            waiter = self._waiters.pop(request_id)
            self._outbox.append((waiter.future, self._engine.export_state(request_id, remove=True)))
        for finished in output.finished:
            self._finish(finished)

    def _announce(self, request: GenerateRequest, sampled: Completion) -> None:
        known = 0 if request.completed is None else len(request.completed.token_ids)
        for frame in step_frames(request.session, request.turn, sampled, len(request.token_ids), known):
            if self._on_step is not None:
                self._on_step(frame)

    def _finish(self, finished: Finished | None) -> None:
        if finished is None:
            return
        waiter = self._waiters.pop(finished.request_id)
        result = completion(finished) if finished.error is None else engine_error(finished.error)
        self._outbox.append((waiter.future, result))

    def _flush(self) -> None:
        """Wakes the event loop once for everything in the outbox. A loop that is gone ends the engine."""
        if not self._outbox or self._loop is None:
            return
        deliveries, self._outbox = self._outbox, []
        try:
            self._loop.call_soon_threadsafe(deliver, deliveries)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            with self._wake:
                self._closing = True

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            commands, self._commands = self._commands, deque()
        futures = [future for future, _ in commands] + [w.future for w in self._waiters.values()]
        self._outbox += [(future, _closed_error(error)) for future in futures]
        self._waiters.clear()
        self._flush()


def _closed_error(failure: BaseException | None) -> EngineClosedError:
    if failure is None:
        return EngineClosedError("the engine is closed: make a new one")
    error = EngineClosedError(
        f"the engine's loop died of {type(failure).__name__}: {failure}; it serves nobody until it is remade"
    )
    error.__cause__ = failure
    return error
