"""One episode without tokens: a person, a script or a demonstration speaks in place of a policy.

It runs the real scaffold, tools and verifier, so an environment can be tried before any model exists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from envs.base import Environment, Sampled, Scaffold, ToolError
from envs.scaffolds import load as load_scaffold
from envs.types import (
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    TrajectoryKey,
    Turn,
)
from sandbox.base import Sandbox

Speaker = Callable[[Sequence[Message]], Awaitable[Sampled]]
Judge = Callable[[Task, Trajectory], Awaitable[Score | Missing]]


class PlayedEpisode:
    """An `envs.base.Episode` whose turns come from a speaker, who sees the conversation so far."""

    def __init__(
        self, env: Environment, task: Task, speaker: Speaker, *, sandbox: Sandbox | None, effort: int
    ) -> None:
        self.task = task
        self.effort = effort
        self.tools: tuple[ToolSpec, ...] = env.tools
        self.max_turns = env.max_turns
        self.conversation: list[Message] = list(task.prompt)
        self.turns: list[Turn] = []
        self._env, self._speaker, self._sandbox = env, speaker, sandbox
        self._calls = 0

    async def sample(self) -> Sampled:
        """Lets the speaker speak."""
        sampled = await self._speaker(tuple(self.conversation))
        self.conversation.append(sampled.message)
        self.turns.append(
            Turn((), (), (), (), sampled.finish, sampled.message, parse_error=sampled.parse_error)
        )
        return sampled

    async def execute(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """Runs the calls in order; a call at fault is answered by its error."""
        results: list[Message] = []
        for call in calls:
            numbered = replace(call, number=self._calls)
            self._calls += 1
            try:
                text = await self._env.call_tool(numbered, self.task, self._sandbox)
            except ToolError as error:
                text = str(error)
            results.append(Message(Role.TOOL, text, tool_call_id=call.id))
        self.observe(*results)
        return tuple(results)

    def observe(self, *messages: Message) -> None:
        """Appends messages to the conversation."""
        self.conversation += messages
        last = self.turns[-1]
        self.turns[-1] = replace(last, observations=(*last.observations, *messages))


async def play(
    env: Environment,
    task: Task,
    speaker: Speaker,
    *,
    judge: Judge | None = None,
    scaffold: Scaffold | None = None,
    sandbox: Sandbox | None = None,
    effort: int | None = None,
) -> Trajectory:
    """Plays one episode and judges it.

    Args:
        env: The environment.
        task: One of its tasks.
        speaker: Gives each turn, from the conversation so far.
        judge: The reward, for an environment that names one of the library (`rewards.load(env.reward_name)`).
        scaffold: By default `tools` for an environment with tools, else `chat`.
        sandbox: A live sandbox, when `env.sandbox` is not None.
        effort: By default the first level of the environment.

    Raises:
        ValueError: The judge or the sandbox is missing.
    """
    _check(env, judge, sandbox)
    scaffold = scaffold or load_scaffold("tools" if env.tools else "chat")
    effort = effort or env.efforts[0]
    episode = PlayedEpisode(env, task, speaker, sandbox=sandbox, effort=effort)
    try:
        await env.setup(task, sandbox)
        stop = await scaffold.run(episode)
        key = TrajectoryKey(task.id, effort, scaffold.name, 0, 0)
        ended = stop in (StopReason.ANSWER, StopReason.PARSE_ERROR)
        status = Status.FINISHED if ended else Status.TRUNCATED
        played = Trajectory(key, (tuple(episode.turns),), status, stop, Missing("not judged yet"))
        score = await (judge or env.score)(task, played)
    finally:
        await env.cleanup(task, sandbox)
    return replace(played, score=score)


def script(*turns: Message) -> Speaker:
    """Returns a speaker that says these turns one after the other, and the last one again and again."""
    assert turns, "a script needs at least one turn"
    position = 0

    async def speak(conversation: Sequence[Message]) -> Sampled:
        nonlocal position
        message = turns[min(position, len(turns) - 1)]
        position += 1
        return Sampled(message, FinishReason.STOP)

    return speak


def say(text: str) -> Message:
    """Returns an assistant's turn that answers `text`."""
    return Message(Role.ASSISTANT, text)


def _check(env: Environment, judge: Judge | None, sandbox: Sandbox | None) -> None:
    if env.reward_name and judge is None:
        raise ValueError(
            f"environment {env.name!r} is judged by the library reward {env.reward_name!r}; "
            "pass judge=rewards.load(env.reward_name)"
        )
    if env.sandbox is not None and sandbox is None:
        raise ValueError(
            f"environment {env.name!r} needs a sandbox; pass one made by `Fleet.create(env.sandbox)`"
        )
