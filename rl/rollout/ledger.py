"""Exactly-once accounting: a dispatched sample ends as trained, filtered or failed (why), or is carried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class MemberState(StrEnum):
    """Where one sample of an open group stands. `WAITING` samples are to be handed out (again)."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(slots=True)
class Member:
    """One sample of an open group: its current attempt, its state, and why it failed."""

    state: MemberState = MemberState.WAITING
    attempt: int = 0
    why: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in (MemberState.FINISHED, MemberState.FAILED)


@dataclass(slots=True)
class OpenGroup:
    """A group that was started and is neither trained nor dropped; `version` is the policy's at its start."""

    environment: str
    version: int
    members: list[Member]

    @property
    def complete(self) -> bool:
        """Whether every member ended."""
        return all(member.ended for member in self.members)

    def state_dict(self) -> dict[str, Any]:
        """The group as JSON."""
        members = [[str(m.state), m.attempt, m.why] for m in self.members]
        return {"environment": self.environment, "version": self.version, "members": members}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> OpenGroup:
        """Restores a group; samples that were running are waiting again, as their process is gone."""
        members = [Member(MemberState(s), attempt, why) for s, attempt, why in state["members"]]
        for member in members:
            if member.state is MemberState.RUNNING:
                member.state = MemberState.WAITING
        return cls(state["environment"], state["version"], members)


@dataclass(frozen=True, slots=True)
class Account:
    """The balance: `dispatched` equals trained + all filtered + all failed + carried."""

    dispatched: int
    trained: int
    filtered: Mapping[str, int]
    failed: Mapping[str, int]
    carried: int

    @property
    def balanced(self) -> bool:
        """Whether every dispatched sample is in exactly one place."""
        ended = self.trained + sum(self.filtered.values()) + sum(self.failed.values())
        return self.dispatched == ended + self.carried


@dataclass(slots=True)
class Ledger:
    """Counts of samples that left the open groups, by how they left."""

    dispatched: int = 0
    trained: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def close(self, members: Sequence[Member], dropped: str = "") -> None:
        """Books the members of a closed group: trained, or filtered for the reason `dropped`."""
        for member in members:
            assert member.ended, "a group is closed only when all its members ended"
            if member.state is MemberState.FAILED:
                self.failed[member.why] += 1
            elif dropped:
                self.filtered[dropped] += 1
            else:
                self.trained += 1

    def account(self, carried: int) -> Account:
        """Returns the balance, with `carried` samples still in open groups."""
        return Account(self.dispatched, self.trained, dict(self.filtered), dict(self.failed), carried)

    def state_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "dispatched": self.dispatched,
            "trained": self.trained,
            "filtered": dict(self.filtered),
            "failed": dict(self.failed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        self.dispatched, self.trained = state["dispatched"], state["trained"]
        self.filtered, self.failed = Counter(state["filtered"]), Counter(state["failed"])
