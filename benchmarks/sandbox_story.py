"""What a client does in a run of `sandbox_kills` until something dies.

Run as `python -m benchmarks.sandbox_story ACCOUNT.json` it is the client that dies or sees others die: it
creates a sandbox, runs four commands, arms the place and does what leads there. What it heard it writes into
a file of records. Each command appends a word of its own to a file in the sandbox and says how often that
word is there, so a command that ran twice is seen in its result as well as in the file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.sandbox_breakpoint import Arm, install
from sandbox.client import Fleet
from sandbox.errors import SandboxError
from sandbox.remote import RemoteBox
from sandbox.types import ExecResult, Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(memory_bytes=128 << 20))
COMMANDS = 4
LOG = "/workspace/log"
_PART = 4 << 20
Call = Callable[[RemoteBox], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Account:
    """What the client is told: where the fleet is, who it is, and which place kills which process."""

    url: str
    token: str
    state_dir: str
    owner: str
    backend: str
    place: str
    pid: int
    """Of the process that dies; 0 stands for the client itself."""

    folder: str
    """Where the arm, the tree to upload and the records of this run are."""

    arm: str
    lease_s: float

    @property
    def operation(self) -> str:
        """What leads to the place."""
        return self.place.partition(".")[0]

    @property
    def records(self) -> Path:
        """What the client heard, a JSON object a line."""
        return Path(self.folder) / "records"

    def write(self) -> Path:
        """Writes it down, and the tree to upload: two files that travel in two pieces."""
        path = Path(self.folder) / "account.json"
        path.write_text(json.dumps(asdict(self)))
        tree = Path(self.folder) / "tree"
        tree.mkdir()
        for name in ("a", "b"):
            (tree / name).write_bytes(name.encode() * _PART)
        return path

    @asynccontextmanager
    async def fleet(self) -> AsyncGenerator[Fleet]:
        """Gives a connection, which does not release the owner at its end."""
        fleet = await Fleet.connect(
            self.url, state_dir=Path(self.state_dir), owner=self.owner, backend=self.backend,
            lease_s=self.lease_s, token=self.token,
        )  # fmt: skip
        try:
            yield fleet
        finally:
            await fleet.close(release=False)


def steps(place: str) -> list[Call]:
    """Returns the commands before the place, and the one at it if it is a command."""

    def once(number: int) -> str:
        return f"echo w{number} >> {LOG}; grep -c w{number} {LOG}"

    first: list[Call] = [
        lambda box: box.exec(once(0)),
        lambda box: box.python("import time; print(time.time_ns())"),
        lambda box: box.write_file("/workspace/data", b"data"),
        lambda box: box.exec(f"{once(3)}; echo no >&2; exit 3"),
    ]
    if place.startswith("exec."):
        tail = "; sleep 600" if place == "exec.running" else ""
        first.append(lambda box: _streamed(box, once(4) + tail))
    return first


async def _streamed(box: RemoteBox, command: str) -> ExecResult:
    async with box.stream(command) as stream:
        async for _ in stream:
            pass
        return stream.result


async def upload(box: RemoteBox, account: Account) -> None:
    """Uploads the tree, in two commands."""
    await box.upload(Path(account.folder) / "tree", "/workspace/tree")


def shown(result: object) -> str:
    """Returns a result as text that is the same for the same bytes."""
    if isinstance(result, ExecResult):
        return f"{result.exit_code} {result.stdout!r} {result.stderr!r}"
    return repr(result)


class Client:
    """The client of a run, as far as its death or that of what it uses."""

    def __init__(self, account: Account):
        self._account = account
        self._file = account.records.open("a", buffering=1)

    def note(self, **fields: Any) -> None:
        """Writes down what it heard; a line reaches the kernel at once."""
        self._file.write(json.dumps(fields) + "\n")

    async def live(self) -> None:
        """Does all of it."""
        account = self._account
        async with account.fleet() as fleet:
            try:
                await self._use(fleet)
            except SandboxError as error:
                self.note(what="error", kind=type(error).__name__, text=str(error))
            else:
                self.note(what="end")

    async def _use(self, fleet: Fleet) -> None:
        place, operation = self._account.place, self._account.operation
        if operation == "create":
            self._arm()
        box = await fleet.create(SPEC, key="story")
        self.note(what="box", id=box.id)
        for number, step in enumerate(steps(place)):
            if number == COMMANDS:
                self._arm()
            self.note(what="result", number=number, shown=shown(await step(box)))
        if operation in ("attach", "replay"):
            if operation == "replay":
                await _gone(fleet, box)
            self._arm()
            await fleet.attach(box.id, replay=operation == "replay")
        elif operation not in ("create", "exec"):
            self._arm()
            await _operations(box, self._account)[operation]()

    def _arm(self) -> None:
        account = self._account
        passes = 1 if account.place == "upload.between" else 0
        # The record of an intent is whole; that of the result is cut.
        passes += account.place == "exec.torn"
        Arm(account.place, account.pid or os.getpid(), passes).write(Path(account.arm))


def _operations(box: RemoteBox, account: Account) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "upload": lambda: upload(box, account),
        "pause": box.pause,
        "snapshot": box.snapshot,
        "fork": lambda: box.fork(2),
        "delete": box.close,
    }


async def _gone(fleet: Fleet, box: RemoteBox) -> None:
    """Lets the sandbox end as one that nobody uses; its journal stays."""
    await box.extend(0.05)
    while any(other.id == box.id for other in await fleet.boxes()):  # noqa: ASYNC110 (another process)
        await asyncio.sleep(0.05)


def main() -> None:
    """Lives as the account says."""
    account = Account(**json.loads(Path(sys.argv[1]).read_text()))
    install(Path(account.arm), "client")
    asyncio.run(Client(account).live())


if __name__ == "__main__":
    main()
