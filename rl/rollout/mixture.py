"""Several environments in one run: which of them group g belongs to, and the task it draws there.

Shares are kept at every moment, not only on average, and by counting alone: the g-th group goes to the
environment that is furthest behind its share of g + 1 groups. So the order is the same in every run and after
every resume, needs no state, and does not depend on how fast an environment's samples end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any, Protocol, TypeVar

from envs.types import Group, Task, TrajectoryKey

T = TypeVar("T")


class Source(Protocol):
    """The tasks of one environment, by its own count of groups."""

    def draw(self, group: int) -> tuple[Task, int]:
        """Returns the task and the effort of its group number `group` (0-based)."""
        ...

    def observe(self, number: int, group: Group) -> None:
        """Learns how its group number `number` ended; each group is told once."""
        ...

    def pin(self, number: int, task: str) -> None:
        """Makes its group number `number` have this task: samples of it exist."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it learned, as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        ...


class Interleave:
    """A fixed order of names by shares; after any n places each has its share of n, within 1 for two names.

    Args:
        shares: By name, each above 0; what counts is their proportion, not their order.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        self.names = sorted(shares)
        self._shares = [shares[name] / total for name in self.names]
        self._counts = [0] * len(self.names)
        self._who = array("H")
        self._number = array("L")

    def at(self, place: int) -> tuple[str, int]:
        """Returns the name at a place (0-based), and how many places it had before."""
        while len(self._who) <= place:
            self._append()
        return self.names[self._who[place]], self._number[place]

    def _append(self) -> None:
        places = len(self._who) + 1
        behind = [share * places - count for share, count in zip(self._shares, self._counts, strict=True)]
        who = max(range(len(behind)), key=behind.__getitem__)
        self._who.append(who)
        self._number.append(self._counts[who])
        self._counts[who] += 1


class Order(Protocol):
    """Which environment a group belongs to; `names` are all of them, sorted."""

    @property
    def names(self) -> Sequence[str]:
        """The environments, sorted."""
        ...

    def at(self, place: int) -> tuple[str, int]:
        """Returns the environment of a group, and how many groups that had before."""
        ...


class MixedStream:
    """The tasks of a run by group number: of one environment, or of several by their shares.

    Args:
        sources: By the environment's name in this run.
        order: Of the same names.
    """

    def __init__(self, sources: Mapping[str, Source], order: Order) -> None:
        assert sorted(sources) == list(order.names), "every environment has a place in the order"
        self._sources = dict(sources)
        self._order = order

    @property
    def environments(self) -> list[str]:
        """The names of all environments, sorted."""
        return list(self._order.names)

    def environment(self, group: int) -> str:
        """Returns the environment that group number `group` belongs to."""
        return self._order.at(group)[0]

    def draw(self, group: int) -> tuple[Task, int]:
        """Returns the task and the effort of group number `group`."""
        name, number = self._order.at(group)
        return self._sources[name].draw(number)

    def observe(self, group: Group) -> None:
        """Tells the group's environment how it ended: once for each, trained or dropped."""
        name, number = self._order.at(group.id)
        self._sources[name].observe(number, group)

    def pin(self, keys: Iterable[TrajectoryKey]) -> None:
        """Lets the groups of samples that a token log holds have the tasks that they began with."""
        for key in keys:
            name, number = self._order.at(key.group)
            self._sources[name].pin(number, key.task)

    def state_dict(self) -> dict[str, Any]:
        """What the environments' sources learned, as JSON."""
        return {name: source.state_dict() for name, source in self._sources.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` gave."""
        for name, source in self._sources.items():
            source.load_state_dict(state[name])


def interleaved(parts: Mapping[str, Iterator[T]], shares: Mapping[str, float]) -> Iterator[T]:
    """Yields items in the order of their parts' shares, until a part ends; empty parts are left out."""
    found: dict[str, Iterator[T]] = {}
    for name, items in parts.items():
        for first in items:
            found[name] = chain([first], items)
            break
    order = Interleave({name: shares[name] for name in found})
    for place in count() if found else ():
        for item in islice(found[order.at(place)[0]], 1):
            yield item
            break
        else:
            return
