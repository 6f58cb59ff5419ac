"""What did not pass: counted by kind, so that a million attempts fill neither memory nor log."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace

from sandbox.policy import Denial, DenialReason

_KINDS, _LINES, _TEXT = 512, 100, 253
_REST = "(others)"
_LOG = logging.getLogger("sandbox.egress")
_Key = tuple[str, DenialReason, str, str, int]


class Ledger:
    """The denials of one sandbox."""

    def __init__(self, box: str):
        self._box = box
        self._kinds: dict[_Key, Denial] = {}
        self.reasons: Counter[DenialReason] = Counter()

    def add(self, phase: str, reason: DenialReason, method: str, host: str, port: int) -> None:
        """Counts a denial; the first ones, and then one in a hundred, go into the node's log."""
        method, host, now = _clean(method), _clean(host), time.time()
        key = (phase, reason, method, host, port)
        if key not in self._kinds and len(self._kinds) >= _KINDS:
            key = (phase, reason, "", _REST, 0)
        if key not in self._kinds:
            self._kinds[key] = Denial(*key, count=0, first=now, last=now)
        known = self._kinds[key]
        self._kinds[key] = replace(known, count=known.count + 1, last=now)
        self.reasons[reason] += 1
        total = self.reasons.total()
        if total <= _LINES or total % _LINES == 0:
            where = f"{method or '?'} {host or '?'}:{port}"
            _LOG.warning("denied %s in phase %s: %s (%s, no. %d)", self._box, phase, where, reason, total)

    def denials(self) -> list[Denial]:
        """Returns them, the latest last."""
        return sorted(self._kinds.values(), key=lambda denial: denial.last)


def _clean(text: str) -> str:
    """Returns text that a hostile proxy gave, fit for a log."""
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in text[:_TEXT])
