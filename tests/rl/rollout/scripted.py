"""Fixtures for the environment loop: an engine that returns planned ids, a box that runs Python for real."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from envs.types import FinishReason, Message, Task, TrajectoryKey
from model.chat import nano_chat
from model.engine.sampler import SamplingParams
from rl.engines.base import Completion, GenerateRequest, StepFrame, StepListener
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.state import SandboxPlace
from sandbox.types import ExecResult

Plan = Callable[[GenerateRequest], Sequence[int]]
CHAT = nano_chat()


def ids(text: str) -> list[int]:
    """Ids of a text with nano's tags written out."""
    result: list[int] = []
    tags = {
        tag: CHAT.tokenizer.tag_id(tag)
        for tag in ("<call>", "</call>", "<obs>", "</obs>", "<answer>", "<end>")
    }
    while text:
        tag = next((tag for tag in tags if text.startswith(tag)), None)
        result += [tags[tag]] if tag else CHAT.tokenizer.encode(text[0])
        text = text[len(tag) if tag else 1 :]
    return result


def logprob(seed: int, place: int) -> float:
    """A log-probability that is a function of the seed and the place, as an engine's draw is."""
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=4).digest()
    return float(np.float32(-int.from_bytes(digest, "little") / 2**32))


class ScriptedEngine:
    """Returns the ids that `plan` gives for a request, one a step of `step_s` seconds."""

    def __init__(self, plan: Plan, on_step: StepListener | None = None, step_s: float = 0.0) -> None:
        self.version = 0
        self.requests: list[GenerateRequest] = []
        self.released: list[str] = []
        self._plan, self._on_step, self._step_s = plan, on_step, step_s
        self._going = asyncio.Event()
        self._going.set()
        self._closed = False
        self._aborted: set[str] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        planned = list(self._plan(request))[: request.sampling.max_tokens]
        done = request.completed or Completion()
        tokens, logprobs, versions = list(done.token_ids), list(done.logprobs), list(done.policy_versions)
        while len(tokens) < len(planned):
            await asyncio.sleep(self._step_s)
            await self._going.wait()
            if self._closed or request.session in self._aborted:
                self._aborted.discard(request.session)
                return Completion(tuple(tokens), tuple(logprobs), tuple(versions), FinishReason.ABORT)
            place = len(tokens)
            tokens.append(planned[place])
            logprobs.append(logprob(request.sampling.seed, place))
            versions.append(self.version)
            self._log(request, tokens[-1], logprobs[-1])
            if tokens[-1] in request.sampling.stop_ids:
                break
        stopped = bool(tokens) and tokens[-1] in request.sampling.stop_ids
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Completion(tuple(tokens), tuple(logprobs), tuple(versions), finish)

    def _log(self, request: GenerateRequest, token: int, logprob_: float) -> None:
        if self._on_step is not None:
            columns = np.array([token], np.int32), np.array([logprob_], np.float32)
            self._on_step(StepFrame([request.session], [request.turn], *columns, self.version))

    async def abort(self, session: str) -> None:
        self._aborted.add(session)

    async def release(self, session: str) -> None:
        self.released.append(session)

    async def pause(self) -> None:
        self._going.clear()

    async def resume(self) -> None:
        self._going.set()

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        self.version = version

    async def close(self) -> None:
        self._closed = True
        self._going.set()

    def stats(self) -> dict[str, float]:
        return {"requests": float(len(self.requests))}


class PythonBox:
    """Runs Python source in a process of its own; nothing more of a sandbox than calc needs."""

    id = "python-box"

    async def python(
        self, source: str, *, stdin: bytes = b"", timeout_s: float = 10.0, **_: Any
    ) -> ExecResult:
        def call() -> ExecResult:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", source],
                input=stdin,
                capture_output=True,
                timeout=timeout_s,
            )
            return ExecResult(done.returncode, done.stdout, done.stderr)

        return await asyncio.to_thread(call)


class OwnBox:
    """A box of a trajectory's own that is always there and remembers nothing."""

    place = SandboxPlace("python-box", 1, 0)

    def __init__(self, box: Any) -> None:
        self.box = box
        self.rebuilt = self.keep = False

    async def open(self, error: Exception | None = None) -> Any:
        return self.box


class Boxes:
    """Lends boxes and counts what is out; `fail` is raised instead of lending when it is set."""

    def __init__(self, box: Any = None) -> None:
        self.box = box or PythonBox()
        self.out = 0
        self.lent = 0
        self.own_sessions: list[str] = []
        self.counts: Counter[str] = Counter()
        self.fail: Exception | None = None

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[Any]:
        if self.fail is not None:
            raise self.fail
        self.out += 1
        self.lent += 1
        try:
            yield self.box
        finally:
            self.out -= 1

    @asynccontextmanager
    async def own(
        self, session: str, place: SandboxPlace | None = None, *, lasting: bool = True
    ) -> AsyncIterator[Any]:
        self.own_sessions.append(session)
        async with self.shared() as box:
            yield OwnBox(box)

    async def park(self) -> None:
        pass

    async def discard(self, place: SandboxPlace) -> None:
        pass


def calc_assignment(
    group: int = 0,
    index: int = 0,
    attempt: int = 0,
    *,
    a: int = 47,
    b: int = 86,
    purpose: Purpose = Purpose.TRAIN,
    max_tokens: int = 24,
    environment: str = "calc",
    scaffold: str = "tools",
) -> Assignment:
    """An assignment of the task a*b."""
    task = Task.ask(f"calc/{a}*{b}", f"{a}*{b}=", gold=str(a * b))
    key = TrajectoryKey(task.id, 50, scaffold, group, index, attempt)
    return Assignment(
        key=key,
        task=task,
        environment=environment,
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=11,
        purpose=purpose,
    )


def expert(request: GenerateRequest) -> list[int]:
    """Calls the tool with the prompt's product, then copies what it observed."""
    text = CHAT.tokenizer.decode(list(request.token_ids))
    if request.turn == 0:
        return ids(f"<call>{_question(text)}</call>")
    return ids(f"<answer>{_observed(request)}<end>")


def _question(text: str) -> str:
    question = text.split("=")[0]
    return question[question.rindex(">") + 3 :] if ">" in question else question[-5:]


def _observed(request: GenerateRequest) -> str:
    start, end = ids("<obs>")[0], ids("</obs>")[0]
    found = list(request.token_ids)
    last = len(found) - 1 - found[::-1].index(start)
    return CHAT.tokenizer.decode(found[last + 1 : found.index(end, last)])


def turns_of(*texts: str) -> Plan:
    """A plan that says these texts, one a turn; the last one again and again."""
    return lambda request: ids(texts[min(request.turn, len(texts) - 1)])


def text_message(role: str, text: str) -> Message:
    """A message."""
    return Message(role, text)
