"""Quotas of nested projects: what a project holds is charged to it and to all above it.

A front knows what the nodes last reported and what it has admitted itself since; it never counts too little
of its own. It tells the node that it picks what is held elsewhere, and the node, which knows its own to the
last sandbox under way, has the last word. So a quota can be passed only by what other fronts had admitted on
other nodes since the last heartbeats of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sandbox.errors import RefusedError
from sandbox.placement import Room
from sandbox.shares import Share
from sandbox.tokens import Quota, within


class Ledger:
    """What the projects hold, by the nodes' reports."""

    def __init__(self, quotas: Mapping[str, Quota]):
        self._quotas = quotas
        self._reports: dict[str, Mapping[str, Room]] = {}
        self._held: dict[str, Room] = {}

    def report(self, node: str, held: Mapping[str, Room]) -> None:
        """Takes what a node says that each project holds there; replaces what it said before."""
        for project, room in self._reports.get(node, {}).items():
            self._held[project] = self._held[project].plus(room, -1)
        for project, room in held.items():
            self._held[project] = self._held.get(project, Room()).plus(room)
        self._reports[node] = held

    def nodes(self, project: str) -> set[str]:
        """Returns the nodes on which something is held that a project's quotas count."""
        top = project.partition("/")[0]
        return {node for node, held in self._reports.items() if any(within(name, top) for name in held)}

    def held(self, project: str, ahead: Callable[[str], Room], payers: set[str]) -> Room:
        """Returns what a project and all below it hold, with what is under way."""
        total = Room()
        for name in {*self._held, *payers}:
            if within(name, project):
                total = total.plus(self._held.get(name, Room())).plus(ahead(name))
        return total

    def shares(
        self, project: str, node: str, ahead: Callable[[str], Room], payers: set[str]
    ) -> list[dict[str, Any]]:
        """Returns what a node is told of the quotas of a project and of all above it, as JSON values.

        Args:
            project: Whose sandbox is asked for.
            node: Where: what is there, the node counts itself.
            ahead: What is counted on top of the reports for a project, on other nodes.
            payers: For which projects there is something.
        """
        told: list[dict[str, Any]] = []
        here = self._reports.get(node, {})
        for name in _upwards(project):
            if (quota := self._quotas.get(name)) is not None:
                elsewhere = self.held(name, ahead, payers)
                for other, room in here.items():
                    elsewhere = elsewhere.plus(room, -1) if within(other, name) else elsewhere
                told.append(Share(name, quota, elsewhere).wire())
        return told

    def check(self, project: str, room: Room, ahead: Callable[[str], Room], payers: set[str]) -> None:
        """Returns when `room` more fits into the quotas of a project and of all above it.

        Raises:
            RefusedError: It does not (`quota`).
        """
        for name in _upwards(project):
            quota = self._quotas.get(name)
            if quota and (over := quota.exceeded(self.held(name, ahead, payers).plus(room))):
                raise RefusedError(f"the quota of project {name} would be passed: {over}", "quota")


def _upwards(project: str) -> Iterator[str]:
    """Yields a project and all above it."""
    parts = project.split("/")
    for depth in range(len(parts), 0, -1):
        yield "/".join(parts[:depth])
