"""One trajectory from the inside: what a scaffold holds, made of engine, chat format, sandboxes and log.

The scaffold writes messages and decides; tokens, limits, log and typing of errors are the framework's. A
recovered sample runs through the same scaffold again: turns and tool results that are in the log are handed
to it as they were, and where the log ends the engine and the sandbox take over.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from envs.agents import Access, Agent
from envs.base import Environment, Sampled
from envs.types import Boundary, FinishReason, Images, Message, Role, StopReason, ToolCall
from model.chat import ChatFormat
from rl.engines.base import Completion, Engine, GenerateRequest
from rl.rollout.assignment import Assignment, request_seed
from rl.rollout.faults import EpisodeEnded, Fault, Interrupted, boundary
from rl.rollout.history import Draft, History
from rl.rollout.latency import Delays
from rl.rollout.messages import from_chat, to_chat, tool_to_chat
from rl.rollout.sandboxes import Sandboxes
from rl.rollout.state import LoggedTurn, SandboxPlace
from rl.rollout.tools import Tools
from rl.rollout.wal import TokenLog
from sandbox.base import Sandbox

Through = Callable[[Awaitable[Completion]], Awaitable[Completion]]
"""Awaits a turn that is being sampled, and may do something beside it."""


class Door(Protocol):
    """Opens the model to agent programs."""

    def open(self, episode: EpisodeRun) -> AbstractAsyncContextManager[Access]:
        """Lets a program speak for one episode."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What episodes of one environment share.

    `log` is None for samples that are not logged, `door` where no agent program is served.
    """

    env: Environment
    engine: Engine
    chat: ChatFormat
    sandboxes: Sandboxes | None
    log: TokenLog | None
    max_turns: int
    max_total_tokens: int
    delays: Delays | None = None
    door: Door | None = None


class EpisodeRun:
    """Implements `envs.base.Episode`. `work` runs its tool calls, in its own sandbox where it has one.

    `timings` sums seconds by `engine_s` and `tool_s`. `fault`, `interruption` and `ended` outlive a scaffold
    that swallows exceptions.
    """

    def __init__(
        self, surroundings: Surroundings, assignment: Assignment, logged: Sequence[LoggedTurn] = ()
    ) -> None:
        self._around = surroundings
        self._assignment = assignment
        self._logged = list(logged)
        self._pending: list[Message] = list(assignment.task.prompt)
        self._said: list[Message] = []
        self._fresh_branch = True
        self._calls = 0
        self.task = assignment.task
        self.effort = assignment.key.effort
        self.tools = surroundings.env.tools
        self.max_turns = surroundings.max_turns
        self.work = Tools(surroundings.env, assignment.task, surroundings.sandboxes, self._note_place)
        self.history = History()
        self.timings: defaultdict[str, float] = defaultdict(float)
        self.busy_with = Boundary.SCAFFOLD
        self.fault: Fault | None = None
        self.interruption: Interrupted | None = None
        self.ended: StopReason | None = None
        self.chat_tools = [tool_to_chat(tool) for tool in self.tools]
        self.agent: Agent | None = getattr(surroundings.env, "agent", None)

    async def sample(self) -> Sampled:
        """Lets the policy speak: one assistant turn.

        Raises:
            EpisodeEnded: A limit is reached: the episode's turns or its total of tokens.
            Fault: The engine failed.
        """
        self._check_going()
        if self.history.turns >= self.max_turns:
            self._end(StopReason.MAX_TURNS)
        logged = self._logged[self.history.turns] if self.history.turns < len(self._logged) else None
        if logged is None and self._is_rewritten():
            self.rewrite(*self._said, *self._pending)
        new_branch = logged.new_branch if logged else self._fresh_branch
        prompt_ids = logged.prompt_ids if logged else self._render()
        budget = self._around.max_total_tokens - len(prompt_ids)
        budget -= 0 if new_branch else len(self.history.ids)
        if budget < 1:
            self._end(StopReason.MAX_TOKENS)
        if new_branch:
            self.history.fork()
        self._said = [*([] if self._fresh_branch else self._said), *self._pending]
        self._fresh_branch, self._pending = False, []
        self.history.prompt(prompt_ids)
        return self._read(prompt_ids, await self._complete(logged, prompt_ids, budget, new_branch))

    async def execute(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """Runs tool calls in order and appends their results; a call's own fault is its result.

        Raises:
            EpisodeEnded: The turn was cut by a limit, so its calls may be incomplete.
            Fault: The environment or the sandbox failed.
        """
        self._check_going()
        draft = self.history.last
        assert draft is not None, "tool calls come after a turn"
        if draft.completion.finish is not FinishReason.STOP:
            self._end(StopReason.MAX_TOKENS)
        results = [await self._result(draft, call) for call in calls]
        self.observe(*results)
        return tuple(results)

    def observe(self, *messages: Message) -> None:
        """Appends messages to the conversation; the policy reads them before its next turn."""
        self._pending += messages
        if self.history.last is not None and not self._fresh_branch:
            self.history.last.observations += messages

    def rewrite(self, *messages: Message) -> None:
        """Replaces the conversation (a summary, dropped reasoning): the next turn starts a new branch."""
        self._pending, self._fresh_branch = list(messages), True

    @property
    def box(self) -> Sandbox | None:
        """The trajectory's own sandbox as it is now."""
        return self.work.box

    @property
    def logged(self) -> bool:
        """Whether another process could go on with it."""
        return self._around.log is not None

    def endpoint(self) -> AbstractAsyncContextManager[Access]:
        """Opens the model to an agent program, whose requests become the turns of this episode."""
        if self._around.door is None:
            raise ValueError("no endpoint is served here: agent programs run with scaffold=external")
        return self._around.door.open(self)

    async def speak(
        self,
        prompt_ids: tuple[int, ...],
        *,
        new_branch: bool,
        tools: Sequence[Any],
        max_tokens: int,
        through: Through,
        images: Images | None = None,
    ) -> Completion:
        """Samples one turn of an agent program, which brings prompts and tools of its own.

        `prompt_ids` are new since the turn before; all of a new branch; `images` are among them. In the log
        the turn is durable before this returns. A program that is run again after an interruption is given
        what the log has, as long as it asks for the same. A cancelled call leaves the episode as it was.

        Raises:
            EpisodeEnded: A limit is reached: the episode's turns or its total of tokens.
            Fault: The engine failed.
        """
        self._check_going()
        number, before = self.history.turns, list(self.history.ids)
        if number >= self.max_turns:
            self._end(StopReason.MAX_TURNS)
        logged = self._logged[number] if number < len(self._logged) else None
        asked = prompt_ids, new_branch, images
        if logged is not None and (logged.prompt_ids, logged.new_branch, logged.images) != asked:
            logged = None
            del self._logged[number:]
        budget = self._around.max_total_tokens - len(prompt_ids) - (0 if new_branch else len(before))
        if budget < 1:
            self._end(StopReason.MAX_TOKENS)
        if new_branch:
            self.history.fork()
        self.history.prompt(prompt_ids, images)
        self._fresh_branch, self._pending = False, []
        most = min(budget, max_tokens)
        try:
            completion = await self._complete(logged, prompt_ids, most, new_branch, through)
        except asyncio.CancelledError:
            self.history.take_back(before, new_branch=new_branch)
            del self._logged[number:]
            raise
        self._read(prompt_ids, completion, tools)
        assert self.history.last is not None
        await self._flush(self.history.last)
        if completion.finish is FinishReason.LENGTH and len(completion.token_ids) == budget:
            self.ended = StopReason.MAX_TOKENS  # the program is shown the turn, and samples no other
        return completion

    @property
    def session(self) -> str:
        """The sample's name towards engine, log and sandboxes."""
        return self._assignment.session

    def _is_rewritten(self) -> bool:
        """Whether the chat format would write the turns so far otherwise before what is to follow."""
        if self._fresh_branch or not self._said:
            return False
        before, new = ([to_chat(m) for m in messages] for messages in (self._said, self._pending))
        with self._as_fault(Boundary.SCAFFOLD):
            return self._around.chat.rewrites(before, new, tools=self.chat_tools, effort=self.effort)

    def _render(self) -> tuple[int, ...]:
        messages = [to_chat(message) for message in self._pending]
        with self._as_fault(Boundary.SCAFFOLD):
            if self._fresh_branch:
                return tuple(
                    self._around.chat.render_prompt(messages, tools=self.chat_tools, effort=self.effort)
                )
            return tuple(self._around.chat.render_observation(messages))

    async def _complete(
        self,
        logged: LoggedTurn | None,
        prompt_ids: tuple[int, ...],
        budget: int,
        new_branch: bool,
        through: Through | None = None,
    ) -> Completion:
        """A turn's completion: from the log, from the engine, or begun in the log and ended by the engine."""
        turn, session, log = self.history.turns, self._assignment.session, self._around.log
        if logged is not None and logged.finish is not None:
            return logged.completion(len(self.history.ids))
        if log is not None and logged is None:
            images = self.history.asked[1]
            log.begin(session, turn, prompt_ids, new_branch=new_branch, images=images)
        completion = await self._generate(turn, budget, logged, through)
        if log is not None:
            count, starts = len(completion.token_ids), completion.replay_starts
            log.turn(session, turn, count, completion.finish, starts)
        return completion

    async def _generate(
        self, turn: int, budget: int, logged: LoggedTurn | None, through: Through | None = None
    ) -> Completion:
        key, sampling = self._assignment.key, self._assignment.sampling
        request = GenerateRequest(
            session=self._assignment.session,
            turn=turn,
            token_ids=tuple(self.history.ids),
            sampling=replace(
                sampling,
                max_tokens=min(sampling.max_tokens, budget),
                stop_ids=self._around.chat.stop_ids,
                seed=request_seed(self._assignment.seed, key.group, key.index, turn),
            ),
            completed=(
                logged.completion(len(self.history.ids))
                if logged is not None and len(logged.tokens)
                else None
            ),
            images=self.history.images(),
        )
        with self._doing(Boundary.ENGINE, "engine_s"):
            sampling_turn = self._around.engine.generate(request)
            completion = await (sampling_turn if through is None else through(sampling_turn))
            if completion.finish is FinishReason.ABORT:
                raise Interrupted(
                    f"{self._assignment.session} was given back after {len(completion.token_ids)}"
                )
            if any(logprob != logprob for logprob in completion.logprobs):
                raise ValueError("a log-probability is NaN: the weights or the sampler are broken")
        return completion

    def _read(
        self, prompt_ids: tuple[int, ...], completion: Completion, tools: Sequence[Any] | None = None
    ) -> Sampled:
        tools = self.chat_tools if tools is None else tools
        parsed = self._around.chat.parse(completion.token_ids, tools=tools)
        message = from_chat(parsed.message)
        if completion.finish is not FinishReason.STOP:
            message = replace(message, tool_calls=())
        self._said.append(message)
        draft = Draft(prompt_ids, completion, message, parsed.parse_error, images=self.history.asked[1])
        self.history.sampled(draft)
        return Sampled(message, completion.finish, parsed.parse_error)

    async def _result(self, draft: Draft, call: ToolCall) -> Message:
        turn, place = self.history.turns - 1, draft.results
        number, self._calls, draft.results = self._calls, self._calls + 1, place + 1
        known = self._logged[turn].results if turn < len(self._logged) else ()
        call = replace(call, number=number)
        if place < len(known):
            self.work.known(call, known[place].content)
            return known[place]
        del self._logged[turn + 1 :]
        await self._flush(draft)
        with self._doing(Boundary.ENVIRONMENT, "tool_s"):
            if self._around.delays is not None:
                await asyncio.sleep(self._around.delays.seconds(self.task.id, number))
            message = Message(Role.TOOL, await self.work.call(call), tool_call_id=call.id)
        if (log := self._around.log) is not None:
            log.result(self._assignment.session, turn, place, message)
            if (at := self.work.place()) is not None:
                log.place(self._assignment.session, at)
        return message

    async def _flush(self, draft: Draft) -> None:
        """Makes the turn durable before the world sees it."""
        log, draft.flushed, done = self._around.log, True, draft.flushed
        if log is not None and not done:
            await _flush(log)

    async def _note_place(self, place: SandboxPlace) -> None:
        """Makes durable where the sandbox is, before anything is done in it."""
        if (log := self._around.log) is not None:
            log.place(self._assignment.session, place)
            await _flush(log)

    @contextmanager
    def _doing(self, where: Boundary, timing: str) -> Iterator[None]:
        started, before, self.busy_with = time.monotonic(), self.busy_with, where
        with self._as_fault(where):
            yield
        self.busy_with = before
        self.timings[timing] += time.monotonic() - started

    @contextmanager
    def _as_fault(self, where: Boundary) -> Iterator[None]:
        try:
            with boundary(where):
                yield
        except Fault as fault:
            self.fault = fault
            raise
        except Interrupted as interruption:
            self.interruption = interruption
            raise

    def _check_going(self) -> None:
        if cause := self.fault or self.interruption:
            raise cause
        if self.ended is not None:
            raise EpisodeEnded(self.ended)

    def _end(self, stop: StopReason) -> None:
        self.ended = stop
        raise EpisodeEnded(stop)


async def _flush(log: TokenLog) -> None:
    if log.waits_for_disk:
        await asyncio.to_thread(log.flush)
    else:
        log.flush()
