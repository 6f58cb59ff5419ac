"""An agent program as scaffold: it drives the conversation, through an OpenAI client of its own."""

from __future__ import annotations

from typing import cast

from envs.agents import AgentEpisode
from envs.base import Episode
from envs.types import Message, Role, StopReason


class External:
    """Runs the environment's agent with the model behind an endpoint, until it ends or a limit is reached."""

    name = "external"

    async def run(self, episode: Episode) -> StopReason:
        """Runs one episode."""
        held = cast(AgentEpisode, episode)
        if held.agent is None:
            raise ValueError("this environment has no agent program: see envs.agents")
        async with held.endpoint() as access:
            result = await held.agent.run(held.task, access, held.box)
        held.observe(Message(Role.TOOL, result))
        return StopReason.ANSWER
