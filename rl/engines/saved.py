"""Caches of interrupted turns on disk, so that a successor goes on without computing long contexts again.

The token log holds everything that matters; these files only save time, so they are written where that pays
and a file that is missing, torn or of another history is no fault: the turn is computed anew.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from model.engine.errors import StateError
from model.engine.state import RequestState
from rl.engines.base import GenerateRequest

_SUFFIX = ".turn"


class SavedTurns:
    """A folder of turns by session.

    Args:
        folder: Made when it is missing.
        least: Turns with fewer tokens in their caches are not worth a file.
    """

    def __init__(self, folder: Path, least: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._least = folder, least
        self._known = {path.name for path in folder.glob(f"*{_SUFFIX}")}
        self.saved = self.taken = self.refused = 0

    def save(self, states: Iterable[RequestState]) -> int:
        """Writes turns, in place of all earlier ones; returns how many."""
        for path in self._folder.iterdir():
            path.unlink()
        self._known.clear()
        for state in states:
            if int(state.header["cached"]) >= self._least and not self._write(state):
                break
        self.saved += len(self._known)
        return len(self._known)

    def take(self, request: GenerateRequest) -> RequestState | None:
        """Returns the saved turn that a request goes on with, once; None when there is none of its tokens."""
        name = _name(request.session)
        if name not in self._known:
            return None
        self._known.discard(name)
        path = self._folder / name
        try:
            state = RequestState.read(path)
        except (StateError, OSError):
            self.refused += 1
            return None
        finally:
            path.unlink(missing_ok=True)
        completed = () if request.completed is None else request.completed.token_ids
        if state.tensors["token_ids"].tolist() != [*request.token_ids, *completed]:
            self.refused += 1
            return None
        self.taken += 1
        return state

    def stats(self) -> dict[str, float]:
        """Turns saved, taken up again, and refused, since opening."""
        return {
            "turns_saved": float(self.saved),
            "turns_taken": float(self.taken),
            "turns_refused": float(self.refused),
        }

    def _write(self, state: RequestState) -> bool:
        name = _name(state.header["session"])
        try:
            state.write(self._folder / name)
        except OSError as error:
            logging.warning("caches of interrupted turns are not kept, they will be recomputed: %s", error)
            return False
        self._known.add(name)
        return True


def _name(session: str) -> str:
    return hashlib.blake2b(session.encode(), digest_size=16).hexdigest() + _SUFFIX
