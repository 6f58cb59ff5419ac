"""Commands by way of the journal: each runs once, a repeated one gets its recorded result.

A caller that starts over after a crash gives every command its number in the sequence (`Claim.seq`). What
finished is answered from the journal. What was under way is UNKNOWN: it fails, unless the caller says to run
it once more or to take it as done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sandbox.errors import (
    InfrastructureError,
    JournalMismatchError,
    PolicyError,
    RefusedError,
    UnknownOutcomeError,
)
from sandbox.journal import Journal, words
from sandbox.outcome import Outcome
from sandbox.types import ExecResult

Decision = Literal["fail", "rerun", "accept"]
READS = frozenset({"read", "list", "stat", "poll", "processes"})
"""Operations that change nothing in a sandbox."""

_DID_NOT_RUN = (RefusedError, PolicyError, InfrastructureError)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a caller says of a command: its number (0: the next), and what to do when it is unknown."""

    seq: int = 0
    idempotent: bool = False
    unknown: Decision = "fail"


class Recorder:
    """The journal of a living sandbox and the commands that run in it."""

    def __init__(self, journal: Journal):
        self.journal = journal
        self._running: set[int] = set()

    async def run(
        self,
        command: Mapping[str, Any],
        body: bytes,
        claim: Claim,
        perform: Callable[[], Awaitable[Outcome]],
        settled: Callable[[], Awaitable[None]],
    ) -> Outcome:
        """Runs a command that is new; answers one that has finished.

        Args:
            command: What is to be done, with `body` as its input.
            body: The bytes that go with it.
            claim: What the caller says of it.
            perform: Does it.
            settled: Returns when nothing of cancelled commands runs any more.

        Raises:
            JournalMismatchError: The caller replays another command than the journal has there.
            UnknownOutcomeError: It was under way at a crash, and the claim says to fail then.
        """
        if not 0 <= claim.seq <= self.journal.last + 1:
            raise JournalMismatchError(f"the journal has {self.journal.last} commands, not {claim.seq - 1}")
        if claim.seq in (0, self.journal.last + 1):
            seq = self.journal.intend(command, body, idempotent=claim.idempotent)
        else:
            seq = claim.seq
            if (known := self._known(claim, command, body)) is not None:
                return known
            await settled()
            self.journal.rerun(seq)
        return await self._perform(seq, perform)

    def _known(self, claim: Claim, command: Mapping[str, Any], body: bytes) -> Outcome | None:
        entry = self.journal.match(claim.seq, command, body)
        if entry.result:
            return self.journal.result(claim.seq)
        what = f"command {claim.seq} ({words(command)})"
        if claim.seq in self._running:
            raise UnknownOutcomeError(f"{what} is still running for another client", "running")
        if claim.unknown == "accept":
            self.journal.finish(claim.seq, Outcome(ExecResult(None, b"", b"")))
            return self.journal.result(claim.seq)
        if claim.unknown == "rerun" or command["op"] in READS:
            return None
        raise UnknownOutcomeError(
            f"{what} was under way when its caller or its node died, and how far it came is not known: "
            "attach with another policy for unknown commands, or start the sandbox anew",
            "idempotent" if entry.idempotent else "",
        )

    async def _perform(self, seq: int, perform: Callable[[], Awaitable[Outcome]]) -> Outcome:
        self._running.add(seq)
        try:
            result = await perform()
        except _DID_NOT_RUN as error:
            self.journal.fail(seq, error)
            raise
        finally:
            self._running.discard(seq)
        self.journal.finish(seq, result)
        return result


@dataclass(frozen=True, slots=True)
class Replay:
    """What running finished commands again in a fresh generation came to: how many, and which differed."""

    commands: int
    differed: tuple[int, ...]


async def replay(
    journal: Journal,
    run: Callable[[dict[str, Any], bytes], Awaitable[Outcome]],
    since: int,
    skip: Callable[[int], None],
) -> Replay:
    """Brings a fresh sandbox to where the journal ends: runs what finished after command `since` again.

    Commands that only read, that did not run or whose outcome is unknown are left out. Another output
    is counted, as times and process numbers differ. `skip` leaves out the numbers of so many background
    processes: a start that is left out had one.

    Raises:
        JournalMismatchError: A command ended with another exit code: the sandbox is not the one it was.
        JournalError: A command was too large to be kept.
    """
    count, differed = 0, list[int]()
    for seq, entry in journal.entries.items():
        if seq <= since:
            continue
        if not entry.result or entry.operation in READS or journal.failed(seq):
            skip(int(entry.operation == "start"))
            continue
        command, body = journal.command(seq)
        before, now = journal.result(seq).result, (await run(command, body)).result
        if before.exit_code != now.exit_code:
            raise JournalMismatchError(
                f"replayed, command {seq} ({words(command)}) gave {now.exit_code}, not {before.exit_code}: "
                "it depends on more than the sandbox; start the trajectory anew"
            )
        count += 1
        if (before.stdout, before.stderr) != (now.stdout, now.stderr):
            differed.append(seq)
    return Replay(count, tuple(differed))
