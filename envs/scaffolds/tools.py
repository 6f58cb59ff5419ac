"""The tool loop: the policy calls tools and reads their results until it answers or reaches a limit."""

from __future__ import annotations

from envs.base import Episode
from envs.types import FinishReason, Message, Role, StopReason


class Tools:
    """Sample, execute, observe, again.

    A turn that cannot be read is answered by its error, as a tool's result; after more than
    `max_parse_errors` such turns in a row the episode ends. A turn that was cut is never executed. The
    calls of the last turn are executed: they are part of the state that is judged.
    """

    name = "tools"

    def __init__(self, max_parse_errors: int = 2) -> None:
        if max_parse_errors < 0:
            raise ValueError(f"max_parse_errors is 0 or more, not {max_parse_errors}")
        self.max_parse_errors = max_parse_errors

    async def run(self, episode: Episode) -> StopReason:
        """Runs one episode."""
        unreadable = 0
        for _ in range(episode.max_turns):
            sampled = await episode.sample()
            if sampled.finish is FinishReason.LENGTH:
                return StopReason.MAX_TOKENS
            if sampled.finish is FinishReason.ABORT:
                return StopReason.ABORTED
            if sampled.parse_error:
                unreadable += 1
                if unreadable > self.max_parse_errors:
                    return StopReason.PARSE_ERROR
                episode.observe(Message(Role.TOOL, sampled.parse_error))
                continue
            unreadable = 0
            if not sampled.message.tool_calls:
                return StopReason.ANSWER
            await episode.execute(sampled.message.tool_calls)
        return StopReason.MAX_TURNS
