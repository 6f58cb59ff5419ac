"""Where a caller stands in the sequence of commands that a sandbox's journal holds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from sandbox.channel import Header
from sandbox.errors import PolicyError, UnknownOutcomeError
from sandbox.recovery import Claim, Decision

Unknown = Literal["fail", "rerun_if_idempotent", "ask"]
"""What becomes of a command that was under way at a crash."""

Ask = Callable[[int, UnknownOutcomeError], Awaitable[Decision]]
"""Decides on one such command, given its number and the error."""


@dataclass(slots=True)
class Past:
    """What was there before a caller came, and how many commands it has given."""

    generation: int = 1
    recorded: int = 0
    commands: int = 0
    unknown: Unknown = "fail"
    ask: Ask | None = None
    ttl_s: float = 0.0
    lease_s: float = 0.0
    given: int = 0

    @classmethod
    def known(cls, about: Header) -> Past:
        """Returns the past of a sandbox for a caller that goes on where it is."""
        return cls(
            about.get("generation", 1), ttl_s=about.get("ttl_s", 0.0), lease_s=about.get("lease_s", 0.0)
        )

    @classmethod
    def of(cls, about: Header, unknown: Unknown, ask: Ask | None) -> Past:
        """Returns the past of a sandbox by what its node says of it."""
        leased = {name: about.get(name, 0.0) for name in ("ttl_s", "lease_s")}
        return cls(about["generation"], about["recorded"], about["commands"], unknown, ask, **leased)

    def claim(self, idempotent: bool) -> Claim:
        """Returns what to say of the next command: its number while the journal has it."""
        self.given += 1
        return Claim(self.given if self.given <= self.recorded else 0, idempotent)

    async def decide(self, claim: Claim, error: UnknownOutcomeError) -> Decision:
        """Returns what to do about an unknown command, unless that is to fail.

        Raises:
            UnknownOutcomeError: It is to fail, or cannot be decided on because it still runs.
        """
        if error.reason == "running" or claim.unknown != "fail":
            raise error
        if self.unknown == "rerun_if_idempotent" and error.reason == "idempotent":
            return "rerun"
        decision = await self.ask(claim.seq, error) if self.ask else "fail"
        if decision not in ("fail", "rerun", "accept"):
            raise PolicyError(f"an unknown command can fail, rerun or accept, not {decision!r}")
        if decision == "fail":
            raise error
        return decision
