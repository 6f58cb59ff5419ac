"""The plainest scaffold: one turn, whose text is the answer."""

from __future__ import annotations

from envs.base import Episode
from envs.types import FinishReason, StopReason

_CUT = {FinishReason.LENGTH: StopReason.MAX_TOKENS, FinishReason.ABORT: StopReason.ABORTED}


class Chat:
    """Lets the policy speak once; no tools."""

    name = "chat"

    async def run(self, episode: Episode) -> StopReason:
        """Runs one episode."""
        sampled = await episode.sample()
        if sampled.finish in _CUT:
            return _CUT[sampled.finish]
        unreadable = sampled.parse_error or sampled.message.tool_calls
        return StopReason.PARSE_ERROR if unreadable else StopReason.ANSWER
