"""The journals of a node: those of its living sandboxes, and those that outlive theirs for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox.errors import JournalError, LostError
from sandbox.journal import SYNC_S, Journal
from sandbox.journal_file import begun, scan

FOLDER = "journals"
KEEP_S = 86400.0
"""How long the journal of a sandbox that is gone is kept after its last record."""

_SWEEP_S = 300.0
_LOG = logging.getLogger("sandbox.node")


class Journals:
    """One file a sandbox, `<state folder>/journals/<sandbox>`. The node that holds the folder writes them."""

    def __init__(self, state_dir: Path):
        self._folder = state_dir / FOLDER
        self._open: dict[str, Journal] = {}

    async def create(
        self, box_id: str, head: Mapping[str, Any], past: Journal | None = None, until: int = 0
    ) -> Journal:
        """Starts the journal of a new sandbox, for a fork with the past of another up to command `until`.

        Returns when its first record is on disk.
        """
        making = asyncio.create_task(
            asyncio.to_thread(Journal.create, self._folder / box_id, head, past, until)
        )
        try:
            journal = await asyncio.shield(making)
        except asyncio.CancelledError:
            (await making).remove()
            raise
        self._open[box_id] = journal
        return journal

    def drop_unbegun(self) -> None:
        """Removes journals without their start, which a crash left: nobody ever heard of their sandboxes."""
        for path in [path for path in self._folder.glob("*") if path.is_file() and not begun(path)]:
            _LOG.warning("the journal of %s was never begun; it is removed", path.name)
            path.unlink(missing_ok=True)

    def has(self, box_id: str) -> bool:
        """Whether there is a journal of a sandbox."""
        return (self._folder / box_id).is_file()

    async def reopen(self, box_id: str, owner: str) -> Journal:
        """Opens the journal of a sandbox that is gone.

        Raises:
            LostError: There is none, or it is somebody else's.
            JournalError: It is damaged, or of a version that is not read here.
        """
        path = self._folder / box_id
        lost = LostError(f"{owner} has neither a sandbox {box_id} nor a journal of one")
        if box_id in self._open or Path(box_id).name != box_id or not path.is_file():
            raise lost
        journal = await asyncio.to_thread(Journal.open, path)
        if journal.head["owner"] != owner:
            journal.close()
            raise lost
        if journal.torn:
            _LOG.warning("cut %d bytes of a torn record off the journal of %s", journal.torn, box_id)
        self._open[box_id] = journal
        return journal

    def leave(self, box_id: str) -> None:
        """Closes the journal of a sandbox that has ended; the file stays."""
        if journal := self._open.pop(box_id, None):
            journal.sync()
            journal.close()

    async def remove(self, box_id: str, owner: str) -> None:
        """Deletes the journal of a sandbox of `owner`, living or gone."""
        if (held := self._open.get(box_id)) is not None and held.head["owner"] != owner:
            return
        if (journal := self._open.pop(box_id, None)) is None:
            with contextlib.suppress(LostError, JournalError):
                journal = await self.reopen(box_id, owner)
                del self._open[box_id]
        if journal is not None:
            journal.remove()

    def of(self, owner: str) -> list[str]:
        """Returns the names of an owner's journals whose sandboxes are gone."""
        gone = [path for path in self._folder.glob("*") if path.name not in self._open]
        return sorted(path.name for path in gone if _owner_of(path) == owner)

    async def tend(self) -> None:
        """Brings records to disk within `SYNC_S`, and removes journals that nobody came back for."""
        swept = 0.0
        while True:
            for journal in [journal for journal in self._open.values() if journal.dirty]:
                await asyncio.to_thread(self._sync, journal)
            if time.monotonic() - swept > _SWEEP_S or not swept:
                swept = time.monotonic()
                await asyncio.to_thread(self.sweep, KEEP_S)
            await asyncio.sleep(SYNC_S)

    def _sync(self, journal: Journal) -> None:
        try:
            journal.sync()
        except OSError as error:
            if journal.path.exists():
                _LOG.error("the journal %s could not be brought to disk: %s", journal.path, error)

    def sweep(self, keep_s: float) -> list[str]:
        """Removes journals without a sandbox whose last record is older than `keep_s`; returns names."""
        old: list[str] = []
        for path in self._folder.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.name not in self._open and time.time() - path.stat().st_mtime > keep_s:
                    path.unlink()
                    old.append(path.name)
        return sorted(old)


def _owner_of(path: Path) -> str | None:
    """Returns whose journal a file is; None of one that is none, is damaged, or has gone."""
    with contextlib.suppress(FileNotFoundError, JournalError):
        for found in scan(path):
            return found.record.get("owner")
    return None
