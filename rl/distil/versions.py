"""Versions of the mix: from which group on each was in force, and the order of environments it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.distil.mix import Mix, mix_from_json
from rl.rollout.mixture import Interleave


@dataclass(slots=True)
class _Span:
    first: int
    mix: Mix
    order: Interleave
    before: Counter[str]


@dataclass(slots=True)
class MixVersions:
    """An order of environments whose shares may change at any group; earlier groups keep their places.

    It is used in the place of one `Interleave`. Version numbers are 1, 2, ... and groups before the first
    change are of version 1.
    """

    names: Sequence[str]
    _spans: list[_Span] = field(default_factory=list)

    @property
    def version(self) -> int:
        """The newest version."""
        return len(self._spans)

    @property
    def current(self) -> Mix:
        """The newest mix."""
        return self._spans[-1].mix

    def add(self, mix: Mix, first: int) -> int:
        """Puts a mix in force from group number `first` on, and returns its version.

        A version that had no group yet keeps its number and has none.
        """
        assert not self._spans or first >= self._spans[-1].first, "versions follow each other"
        before: Counter[str] = Counter()
        if self._spans:
            last = self._spans[-1]
            before = last.before.copy()
            before.update(last.order.at(place)[0] for place in range(first - last.first))
        self._spans.append(_Span(first, mix, Interleave(mix.shares), before))
        return self.version

    def version_of(self, group: int) -> int:
        """Returns the version in force when a group began."""
        return max(number for number, span in enumerate(self._spans, 1) if span.first <= group)

    def mix_of(self, version: int) -> Mix:
        """Returns the mix of a version."""
        return self._spans[version - 1].mix

    def at(self, place: int) -> tuple[str, int]:
        """Returns the environment of a group, and how many groups that had before."""
        span = self._spans[self.version_of(place) - 1]
        name, number = span.order.at(place - span.first)
        return name, span.before[name] + number

    def state_dict(self) -> list[Any]:
        """All versions, as JSON."""
        return [[span.first, span.mix.to_json()] for span in self._spans]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        """Restores what `state_dict` gave."""
        self._spans = []
        for first, mix in state:
            self.add(mix_from_json(mix), first)
