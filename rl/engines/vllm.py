"""vLLM behind the rollout's interface: token ids in and out, interrupted and updated between two steps.

vLLM's asynchronous front runs in this process's event loop, its core in a process of its own (more with
parallel settings). What the core draws is heard before anyone gets it, with the version of the weights that
drew it, so the token log holds every token of a replica that is killed. A core that dies ends this engine:
`on_death` is called first, and a replica's process then ends too, so that its successor goes on from the log.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Literal

from envs.types import FinishReason
from model.engine.columns import Columns
from model.engine.errors import BusySessionError, NonFiniteLogitsError, RequestError, StateError
from model.engine.requests import Request, already_finished, check_request
from model.engine.sampler import SamplingParams
from rl.engines.base import Completion, EngineError, GenerateRequest, StepListener
from rl.engines.native import EngineClosedError
from rl.engines.turns import columns, engine_error
from rl.engines.vllm_end import PARENT
from rl.engines.vllm_installed import EngineStartError, check_installed
from rl.engines.vllm_model import ModelFolder
from rl.engines.vllm_settings import VllmSettings
from rl.engines.vllm_steps import Turn, read_step
from rl.engines.vllm_weights import Shelf, notice_of
from rl.transports import Parcel, Rendezvous
from rl.weights import TransferTimeoutError, WeightsError

_POLL_S = 0.005
_END_S = 1.0


class VllmEngine:
    """Implements `rl.engines.base.Engine` over vLLM. Make it with `start`, in the event loop that uses it.

    Args:
        llm: vLLM's `AsyncLLM`.
        model: What it serves.
        max_requests: How many requests are served at the same time; others wait in vLLM.
        max_tokens: The context of a sequence.
        on_step: Called in the event loop with the tokens of each step, before anyone gets them.
        version: The version of the weights.
        caches: What a weight swap does with the caches of running requests.
        deadline_s: Seconds that weights may take.
        on_death: Called when vLLM's core has died, before anyone who waits learns of it.
    """

    def __init__(
        self,
        llm: Any,
        model: ModelFolder,
        *,
        max_requests: int,
        max_tokens: int,
        on_step: StepListener | None = None,
        version: int = 0,
        caches: Literal["keep", "recompute"] = "keep",
        deadline_s: float = 120.0,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.version = version
        self._llm, self._model = llm, model
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._on_step, self._on_death = on_step, on_death
        self.caches, self.deadline_s = caches, deadline_s
        self._numbers = count()
        self._turns: dict[int, Turn] = {}
        self._one_update = asyncio.Lock()
        self._shelf = Shelf()
        self._paused = False
        self._closed = self._broken = False
        self._failure: BaseException | None = None
        self._idle_since: float | None = time.perf_counter()
        self._last_step = 0.0
        self._counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        self._next_outputs = llm.engine_core.get_output_async
        llm.engine_core.get_output_async = self._hear

    @classmethod
    async def start(
        cls, folder: Path, settings: VllmSettings, *, threads: int = 1, version: int = 0, **options: Any
    ) -> VllmEngine:
        """Starts vLLM on the model in `folder`, a Hugging Face one; blocks the event loop until it is there.

        `options` are this class's.

        Raises:
            EngineStartError: vLLM is not installed, or does not take this model or these settings.
            ModelFolderError: The folder holds nothing that vLLM serves, or too short a context.
        """
        model = ModelFolder.read(folder)
        model.check_context(options["max_tokens"])
        check_installed()
        llm = _start(model, settings, threads, options["max_requests"], options["max_tokens"])
        try:
            engine = cls(llm, model, version=version, **options)
            await llm.update_weight_version(str(version))
        except BaseException:  # whoever waits was told to stop: nobody else ends what was started
            await asyncio.to_thread(llm.shutdown, _END_S)
            raise
        return engine

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one turn; cancelling the call aborts the turn.

        Raises:
            EngineError: The request itself is at fault; its cause is a typed error.
            EngineClosedError: The engine is closed or broken.
        """
        self._check_open()
        number = next(self._numbers)
        try:
            turn, ended = self._accept(number, request)
        except RequestError as error:
            raise engine_error(error) from error
        if ended is not None:
            return ended
        self._turns[number] = turn
        if self._idle_since is not None:
            self._last_step, self._idle_since = time.perf_counter(), None
        turn.task = asyncio.create_task(self._consume(number, turn, request))
        try:
            await self._outcome(turn)
        finally:
            self._turns.pop(number, None)
            if not self._turns:
                self._idle_since = time.perf_counter()
        if any(logprob != logprob for logprob in turn.logprobs):
            self._broken = True
            raise engine_error(
                NonFiniteLogitsError(
                    f"the policy gave NaN for session {turn.session!r}: its weights are broken; load others"
                )
            )
        return turn.completion()

    async def abort(self, session: str) -> None:
        """Ends the turn that a session is sampling, if any, with `ABORT`; cached beginnings stay."""
        self._check_open()
        self._stop_turns(session)

    async def release(self, session: str) -> None:
        """Forgets a trajectory; a running request of it ends with `ABORT`.

        Caches are vLLM's own, by contents: nothing of a session is left to free.
        """
        if not self._closed:
            self._check_open()
            self._stop_turns(session)

    async def pause(self) -> None:
        """Stops all requests; returns when the step that is being computed is over."""
        self._check_open()
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        self._paused = True

    async def resume(self) -> None:
        """Continues after `pause`."""
        self._check_open()
        self._paused = False
        await self._llm.resume_generation()

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        """Swaps the weights between two tokens; running requests continue under `version`.

        Raises:
            EngineError: The tensors do not fit the model; the old weights stay.
            WeightsError: They did not arrive whole or in time.
        """
        self._check_open()
        self._check_fit({name: tuple(getattr(t, "shape", ())) for name, t in tensors.items()})
        await self.receive(await asyncio.to_thread(self._shelf.put, tensors, version))

    async def join(self, place: Rendezvous) -> None:
        """Lets vLLM's worker meet the sender of broadcasts. Raises TransferError when nobody comes."""
        self._check_open()
        async with self._one_update, asyncio.timeout(2 * place.deadline_s):
            plain = (place.address, place.rank, place.world, place.deadline_s)
            await self._let_workers("temper_join", *plain)

    async def receive(self, parcel: Parcel) -> None:
        """Loads weights that the workers fetch themselves; sampling goes on until they are there and whole.

        Raises:
            WeightsError: They did not arrive whole, in time, or are not what the model holds now.
        """
        self._check_open()
        async with self._one_update:
            notice = await asyncio.to_thread(notice_of, parcel, self._shelf, self.deadline_s)
            self._check_fit({entry.name: entry.shape for entry in notice.entries})
            try:
                async with asyncio.timeout(self.deadline_s):
                    await self._let_workers("temper_fetch", notice.plain())
                    await self._swap(notice.version, notice.checksum)
            except TimeoutError:
                raise TransferTimeoutError(
                    f"vLLM did not take the weights of version {notice.version} within "
                    f"{self.deadline_s:g} s: raise launcher.weights_deadline_s, or see its log"
                ) from None
            self._counts["weights_bytes"] = float(notice.size)

    async def close(self) -> None:
        """Ends vLLM; running requests end with `ABORT`. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        turns = list(self._turns.values())
        self._stop_turns()
        await asyncio.gather(*(turn.task for turn in turns if turn.task), return_exceptions=True)
        await asyncio.to_thread(self._llm.shutdown, _END_S)

    async def healthy(self) -> bool:
        """Whether vLLM's core lives."""
        return not self._closed and self._failure is None and not self._llm.errored

    def stats(self) -> dict[str, float]:
        """Counters since start: steps, tokens generated, prefilled and cached, busy seconds; requests now.

        `pause_seconds` is how long the last swap of weights held the engine up, `weights_bytes` its size.
        """
        begun = sum(1 for turn in self._turns.values() if turn.tokens)
        return {
            **self._counts,
            "running": float(min(max(begun, 0), self._max_requests)),
            "waiting": float(len(self._turns) - begun),
            "healthy": float(self._failure is None and not self._closed and not self._llm.errored),
        }

    # A turn.

    def _accept(self, number: int, request: GenerateRequest) -> tuple[Turn, Completion | None]:
        """Checks a request; returns its turn, and what became of it when it had ended already."""
        if request.images is not None and request.images.images:
            raise RequestError("engine vllm takes no images: use engine=native, or leave them out")
        if any(turn.session == request.session for turn in self._turns.values()):
            raise BusySessionError(f"session {request.session!r} is being served: one request at a time")
        before = request.completed or Completion()
        done = Columns() if request.completed is None else columns(request.completed)
        pending = check_request(
            number,
            Request(request.session, request.token_ids, request.sampling, done),
            vocab_size=self._model.vocab_size,
            context=self._max_tokens,
        )
        turn = Turn(request.session, request.turn, pending.start, before)
        ended = already_finished(pending, self._max_tokens)
        if ended is None:
            return turn, None
        turn.finish = FinishReason(str(ended))
        return turn, turn.completion()

    async def _consume(self, number: int, turn: Turn, request: GenerateRequest) -> None:
        """Lets vLLM work on a turn until it is done; its tokens are heard on their way."""
        tokens = [int(t) for t in (*request.token_ids, *turn.before.token_ids)]
        prompt = import_module("vllm.inputs.engine").tokens_input(
            tokens, cache_salt=f"weights-{self.version}"
        )
        room = self._max_tokens - len(tokens)
        params = _params(request.sampling, len(turn.before.token_ids), room)
        async for _ in self._llm.generate(prompt, params, str(number)):
            pass

    async def _outcome(self, turn: Turn) -> None:
        assert turn.task is not None
        try:
            await asyncio.shield(turn.task)
        except asyncio.CancelledError:
            turn.task.cancel()
            if not turn.stopped:
                raise
        except Exception as error:
            if self._failure is not None or self._llm.errored:
                raise self._closed_error() from error
            raise EngineError(f"vLLM refused the request: {error}") from error

    def _stop_turns(self, session: str | None = None) -> None:
        for number, turn in list(self._turns.items()):
            if session in (None, turn.session) and turn.task is not None and not turn.task.done():
                del self._turns[number]  # what the core still says of it is not heard
                turn.stopped = True
                turn.task.cancel()

    # What the core says.

    async def _hear(self) -> Any:
        try:
            outputs = await self._next_outputs()
        except Exception as error:
            self._fail(error)
            raise
        if outputs.outputs:
            try:
                self._book(outputs)
            except Exception as error:
                self._fail(error)
                raise
        return outputs

    def _book(self, outputs: Any) -> None:
        """Hands a step's tokens to the listener, before vLLM's front hands them to anyone."""
        version = int(outputs.weight_version)
        frame, prefilled, cached = read_step(outputs.outputs, version, self._turns)
        counts = self._counts
        counts["prefilled_tokens"] += prefilled
        counts["cached_tokens"] += cached
        if frame is None:
            return
        now = time.perf_counter()
        counts["steps"] += 1
        counts["generated_tokens"] += frame.token_ids.size
        counts["busy_seconds"] += now - self._last_step
        self._last_step = now
        if self._on_step is not None:
            self._on_step(frame)

    # Weights.

    def _check_fit(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        if wrong := self._model.misfit(shapes):
            error = StateError(f"the tensors do not fit the model that vLLM serves: {wrong}")
            raise EngineError(str(error)) from error

    async def _swap(self, version: int, checksum: int) -> None:
        begin, paused = time.perf_counter(), self._paused
        if not paused:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            for report in await self._call_workers("temper_swap", self._broken):
                if (report["version"], report["checksum"]) != (version, checksum):
                    raise WeightsError(f"vLLM has weights {report}, not version {version} of {checksum}")
            if self.caches == "recompute":
                await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.update_weight_version(str(version))
            self.version = version
            self._broken = False
            self._counts["updates"] += 1
        finally:
            if not paused and not self._paused:
                await self._llm.resume_generation()
        self._counts["pause_seconds"] = time.perf_counter() - begin

    async def _let_workers(self, name: str, *arguments: Any) -> None:
        """Lets every worker begin something beside its steps, and waits until it is done."""
        await self._call_workers(name, *arguments)
        while not all(await self._call_workers("temper_ended")):  # noqa: ASYNC110  another process
            await asyncio.sleep(_POLL_S)

    async def _call_workers(self, name: str, *arguments: Any) -> list[Any]:
        """Calls every worker. Raises WeightsError with what the worker said."""
        try:
            return await self._llm.collective_rpc(name, args=arguments)
        except Exception as error:
            if self._failure is not None or self._llm.errored:
                raise self._closed_error() from error
            raise WeightsError(f"vLLM's worker: {error}") from error

    # The end.

    def _check_open(self) -> None:
        if self._closed or self._failure is not None or self._llm.errored:
            raise self._closed_error()

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None or self._closed:
            return
        self._failure = error
        logging.critical("vLLM ended: %s: %s", type(error).__name__, error)
        if self._on_death is not None:
            self._on_death(error)

    def _closed_error(self) -> EngineClosedError:
        if self._closed:
            return EngineClosedError("the engine is closed: make a new one")
        why = self._failure or "its process ended"
        error = EngineClosedError(f"vLLM's core died ({why}); it serves nobody until it is remade")
        error.__cause__ = self._failure
        return error


_COUNTERS = (
    "steps", "generated_tokens", "prefilled_tokens", "cached_tokens", "busy_seconds", "pause_seconds",
    "weights_bytes", "updates",
)  # fmt: skip


def _start(
    model: ModelFolder, settings: VllmSettings, threads: int, max_requests: int, max_tokens: int
) -> Any:
    settings.set_environment(threads)
    os.environ[PARENT] = str(os.getpid())
    try:
        make_arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
        front = import_module("vllm.v1.engine.async_llm").AsyncLLM
    except ImportError as error:
        raise EngineStartError(
            f"vLLM is installed and cannot be imported ({error}): install it anew with `make vllm` (CPU) or "
            "`pip install tempering[vllm]` (GPU), or take engine=native"
        ) from error
    settings = settings.of_model(model.dtype)
    arguments = settings.engine_arguments(model.folder, max_requests=max_requests, max_tokens=max_tokens)
    try:
        return front.from_engine_args(make_arguments(**arguments))
    except (TypeError, ValueError, RuntimeError, OSError, AssertionError) as error:
        raise EngineStartError(
            f"vLLM does not start with the model in {model.folder} ({type(error).__name__}: {error}); see "
            "engine.vllm.* and its own messages above"
        ) from error


def _params(sampling: SamplingParams, done: int, room: int) -> Any:
    parameters = import_module("vllm.sampling_params")
    return parameters.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=min(sampling.max_tokens - done, room),
        stop_token_ids=sorted(sampling.stop_ids),
        ignore_eos=True,
        seed=stream_seed(sampling.seed, done),
        logprobs=0,
        detokenize=False,
        output_kind=parameters.RequestOutputKind.FINAL_ONLY,
    )


def stream_seed(seed: int, done: int) -> int:
    """The seed of what is left of a turn after `done` tokens: vLLM's draws start anew."""
    if not done:
        return seed % 2**63
    digest = hashlib.blake2b(f"{seed % 2**64} {done}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63
