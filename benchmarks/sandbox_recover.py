"""The client that starts over after a kill: same sandbox, same commands, and what has come of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.sandbox_story import COMMANDS, LOG, SPEC, Account, shown, steps, upload
from sandbox.client import Fleet
from sandbox.errors import LostError, SandboxError, UnknownOutcomeError
from sandbox.journal_file import scan
from sandbox.recovery import Decision
from sandbox.remote import RemoteBox

PATIENCE_S = 20.0
_NEVER_FINISHES = frozenset({"exec.running"})
_NOT_FINISHED_BY_A_DEAD_NODE = frozenset({"exec.intended", "exec.running", "exec.ended", "exec.torn"})


@dataclass(slots=True)
class Found:
    """What a recovery showed.

    Attributes:
        twice: Commands that ran more than once in a generation.
        lost: Results that had been heard or recorded, and came back otherwise.
        in_flight: Commands that were under way.
        unknown: Those of them that were reported as unknown.
        problems: All that was wrong, in words.
    """

    twice: int = 0
    lost: int = 0
    in_flight: int = 0
    unknown: int = 0
    problems: list[str] = field(default_factory=list[str])

    @property
    def holds(self) -> bool:
        """Whether all is as it should be."""
        return not self.problems and self.in_flight == self.unknown

    def wrong(self, text: str, *, twice: int = 0, lost: int = 0) -> None:
        """Counts a problem."""
        self.problems.append(text)
        self.twice += twice
        self.lost += lost


@dataclass(slots=True)
class Heard:
    """What the first client had heard: its sandbox, results by number, and the error at its end."""

    box: str = ""
    results: dict[int, str] = field(default_factory=dict[int, str])
    error: str = ""


@dataclass(slots=True)
class Recovery:
    """What is known before: the account of the first client, and whether its sandbox is gone for certain."""

    account: Account
    state: Path
    gone: bool
    node_died: bool
    found: Found = field(default_factory=Found)
    asked: list[int] = field(default_factory=list[int])

    async def make(self, *, release: bool) -> Found:
        """Recovers, compares, and ends: by releasing the owner, or by leaving it to its lease."""
        fleet = await self._connect()
        try:
            heard = self._heard()
            if self.account.operation == "create":
                await self._create(fleet)
            elif not heard.box:
                self.found.wrong(f"the client never had its sandbox: {heard.error}")
            else:
                await self._attach(fleet, heard.box, heard.results)
        except SandboxError as error:
            self.found.wrong(f"the recovery failed: {type(error).__name__}: {error}", lost=1)
        finally:
            await fleet.close(release=release)
        return self.found

    async def release(self) -> None:
        """Deletes what journals the lease left."""
        await (await self._connect()).close()

    async def _connect(self) -> Fleet:
        account = self.account
        return await Fleet.connect(
            account.url, state_dir=self.state, owner=account.owner, backend=account.backend,
            lease_s=account.lease_s, token=account.token,
        )  # fmt: skip

    def _heard(self) -> Heard:
        heard = Heard()
        path = self.account.records
        for line in path.read_text().splitlines() if path.exists() else ():
            record = json.loads(line)
            if record["what"] == "box":
                heard.box = record["id"]
            elif record["what"] == "result":
                heard.results[record["number"]] = record["shown"]
            elif record["what"] == "error":
                heard.error = record["text"]
        return heard

    async def _create(self, fleet: Fleet) -> None:
        box = await fleet.create(SPEC, key="story")
        results = {number: shown(await step(box)) for number, step in enumerate(steps(self.account.place))}
        if results[0] != "0 b'1\\n' b''":
            self.found.wrong(f"a command of a new sandbox gave {results[0]}", twice=1)
        if len(await fleet.boxes()) != 1:
            self.found.wrong(f"one creation by key made {len(await fleet.boxes())} sandboxes", twice=1)
        await self._look(box)

    async def _attach(self, fleet: Fleet, box_id: str, heard: dict[int, str]) -> None:
        before = self._journal(box_id)
        deleted = self.account.operation == "delete"
        try:
            box, results = await self._settled(fleet, box_id)
        except LostError as error:
            if not deleted:
                self.found.wrong(f"the sandbox is lost: {error}", lost=1)
            return
        self._compare(heard, results, before)
        # A short lease may have ended by itself on a busy machine; what is deleted may have been.
        if self.account.lease_s > PATIENCE_S and not (self.gone or deleted) and box.generation > 1:
            self.found.wrong(f"a sandbox that lived is in its generation {box.generation}")
        if self.account.operation == "pause" and not self.gone:
            await box.resume()
        await self._look(box)
        await self._operation(fleet, box)
        if deleted:
            await box.close()

    async def _settled(self, fleet: Fleet, box_id: str) -> tuple[RemoteBox, dict[int, str]]:
        """Gives the same commands again; once more while the dead client's last one is being ended."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.asked.clear()
            try:
                box = await fleet.attach(box_id, unknown="ask", ask=self._ask, replay=True)
                return box, await self._again(box)
            except UnknownOutcomeError as error:
                if error.reason != "running" or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def _again(self, box: RemoteBox) -> dict[int, str]:
        known = steps(self.account.place)
        recorded = len(self._journal(box.id))
        again = known if recorded > COMMANDS or not self._blocks else known[:COMMANDS]
        results = {number: shown(await step(box)) for number, step in enumerate(again)}
        if self.account.operation == "upload":
            await upload(box, self.account)
        return results

    @property
    def _blocks(self) -> bool:
        return self.account.place == "exec.running"

    async def _ask(self, seq: int, error: UnknownOutcomeError) -> Decision:
        self.asked.append(seq)
        return "rerun" if error.reason == "idempotent" else "accept"

    def _compare(self, heard: dict[int, str], results: dict[int, str], before: dict[int, bool]) -> None:
        for number, text in heard.items():
            if results.get(number) != text:
                self.found.wrong(f"command {number} gave {text} and now {results.get(number)}", lost=1)
        for seq, finished in before.items():
            if finished and seq in self.asked:
                self.found.wrong(f"command {seq} had finished and was reported as unknown", lost=1)
        under_way = {seq for seq, finished in before.items() if not finished}
        place = self.account.place
        certain = place in _NEVER_FINISHES or (self.node_died and place in _NOT_FINISHED_BY_A_DEAD_NODE)
        self.found.in_flight += (
            len(under_way) if self.node_died or certain else len(under_way & {*self.asked})
        )
        self.found.unknown += len(under_way & {*self.asked})
        if certain and not under_way:
            self.found.wrong("the command under way has a result, or no intent")

    async def _look(self, box: RemoteBox) -> None:
        """Counts the words that the commands left in the sandbox."""
        words = Counter((await box.read_file(LOG)).decode().split())
        for word, count in words.items():
            if count > 1:
                self.found.wrong(f"the command of {word} ran {count} times", twice=count - 1)
        if missing := {f"w{number}" for number in (0, 3)} - {*words}:
            self.found.wrong(f"what {sorted(missing)} did is not there", lost=len(missing))

    async def _operation(self, fleet: Fleet, box: RemoteBox) -> None:
        """Looks at what the operation under way has left: nothing, or all of it."""
        if self.account.operation == "upload":
            sizes = [len(await box.read_file(f"/workspace/tree/{name}")) for name in ("a", "b")]
            if sizes != [4 << 20] * 2:
                self.found.wrong(f"the uploaded files have {sizes} bytes", lost=1)
        if self.account.operation == "fork" and len(await fleet.boxes()) not in (1, 3):
            self.found.wrong(f"a fork into two left {len(await fleet.boxes()) - 1} children")
        for name in await fleet.snapshots():
            if self.account.operation != "snapshot":
                self.found.wrong(f"there is a snapshot {name} that nobody asked for")
            async with await fleet.create(SPEC, snapshot=name) as copy:
                await self._look(copy)

    def _journal(self, box_id: str) -> dict[int, bool]:
        """Returns the commands that the journal has, and whether they have finished."""
        path = self.state / "journals" / box_id.rpartition(".")[2]
        known: dict[int, bool] = {}
        for found in scan(path) if path.exists() else ():
            if found.record["kind"] == "intent":
                known[found.record["seq"]] = False
            elif found.record["kind"] in ("result", "error"):
                known[found.record["seq"]] = True
        return known
