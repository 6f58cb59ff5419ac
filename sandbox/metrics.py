"""Counters, gauges and histograms of a server, in the text format that Prometheus reads."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Values = tuple[str, ...]


@dataclass(slots=True)
class Counter:
    """Numbers that only rise, by the values of their labels."""

    name: str
    about: str
    labels: Sequence[str]
    values: dict[Values, float] = field(default_factory=dict[Values, float])

    def add(self, *values: str, by: float = 1.0) -> None:
        """Counts."""
        assert len(values) == len(self.labels)
        self.values[values] = self.values.get(values, 0.0) + by

    def lines(self) -> Iterator[str]:
        """Yields the samples."""
        yield from _family(self.name, self.about, "counter", self.labels, self.values.items())


@dataclass(slots=True)
class Gauge:
    """Numbers that are read when somebody asks."""

    name: str
    about: str
    labels: Sequence[str]
    read: Callable[[], Iterable[tuple[Values, float]]]

    def lines(self) -> Iterator[str]:
        """Yields the samples."""
        yield from _family(self.name, self.about, "gauge", self.labels, self.read())


@dataclass(slots=True)
class Histogram:
    """Distributions of seconds over `BUCKETS_S`."""

    name: str
    about: str
    labels: Sequence[str]
    counts: dict[Values, list[int]] = field(default_factory=dict[Values, list[int]])
    sums: dict[Values, float] = field(default_factory=dict[Values, float])

    def observe(self, seconds: float, *values: str) -> None:
        """Takes one duration."""
        assert len(values) == len(self.labels)
        counts = self.counts.setdefault(values, [0] * (len(BUCKETS_S) + 1))
        counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sums[values] = self.sums.get(values, 0.0) + seconds

    def lines(self) -> Iterator[str]:
        """Yields the samples."""
        yield from _family(self.name, self.about, "histogram", self.labels, ())
        for values, counts in self.counts.items():
            total = 0
            for edge, count in zip((*map(str, BUCKETS_S), "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{_labels((*self.labels, 'le'), (*values, edge))} {total}"
            yield f"{self.name}_sum{_labels(self.labels, values)} {self.sums[values]:g}"
            yield f"{self.name}_count{_labels(self.labels, values)} {total}"


class Metrics:
    """All metrics of one server. Label values come from closed sets, never from a request's text."""

    def __init__(self) -> None:
        self._families: list[Counter | Gauge | Histogram] = []

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        """Adds numbers that only rise."""
        self._families.append(made := Counter(name, about, labels))
        return made

    def gauge(
        self, name: str, about: str, read: Callable[[], Iterable[tuple[Values, float]]], *labels: str
    ) -> None:
        """Adds numbers that are read when somebody asks."""
        self._families.append(Gauge(name, about, labels, read))

    def histogram(self, name: str, about: str, *labels: str) -> Histogram:
        """Adds distributions of seconds."""
        self._families.append(made := Histogram(name, about, labels))
        return made

    def text(self) -> str:
        """Returns all of them, version 0.0.4 of the format."""
        return "".join(f"{line}\n" for family in self._families for line in family.lines())


def _family(
    name: str, about: str, kind: str, labels: Sequence[str], samples: Iterable[tuple[Values, float]]
) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for values, value in samples:
        yield f"{name}{_labels(labels, values)} {value:.12g}"


def _labels(names: Sequence[str], values: Values) -> str:
    escaped = (value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for value in values)
    inner = ",".join(f'{name}="{value}"' for name, value in zip(names, escaped, strict=True))
    return f"{{{inner}}}" if inner else ""
