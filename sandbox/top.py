"""`temper sandbox top`: a live table of the sandboxes of a node or a fleet, and what each uses right now."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

Row = Mapping[str, Any]
Ask = Callable[[], Awaitable[list[Row]]]
SORTS: Mapping[str, Callable[[Row, float], Any]] = {
    "cpu": lambda row, cpu: -cpu,
    "memory": lambda row, cpu: -(row["memory_bytes"] or 0),
    "processes": lambda row, cpu: -(row["processes"] or 0),
    "disk": lambda row, cpu: -(row["disk_bytes"] or 0),
    "commands": lambda row, cpu: -row["commands"],
    "age": lambda row, cpu: -row["age_s"],
    "owner": lambda row, cpu: (row["owner"], row["id"]),
    "state": lambda row, cpu: (row["state"], row["id"]),
    "id": lambda row, cpu: row["id"],
}
"""What rows can be sorted by: the largest first where it is an amount."""

_HEADS = (
    "ID", "OWNER", "STATE", "BACKEND", "AGE", "IDLE LEFT", "LEASE", "CPU %", "MEMORY", "PROCS", "DISK",
    "CMDS",
)  # fmt: skip
_LEFT_ALIGNED = 4
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"
_GLANCE_S = 0.3


async def watch(parsed: argparse.Namespace, ask: Ask) -> None:
    """Shows the table every `--every` seconds until it is interrupted; with `--once` it prints it once."""
    before = _seconds(await ask())
    if parsed.once:
        await asyncio.sleep(_GLANCE_S)
        print("\n".join(table(await ask(), before, parsed.sort)), flush=True)
        return
    await asyncio.sleep(_GLANCE_S)
    sys.stdout.write("\x1b[2J")
    while True:
        rows = await ask()
        lines = table(rows, before, parsed.sort)[: parsed.rows + 2 if parsed.rows else None]
        sys.stdout.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_REST)
        sys.stdout.flush()
        before = _seconds(rows)
        await asyncio.sleep(parsed.every)


def table(rows: list[Row], before: Mapping[str, tuple[float, float]], sort: str) -> list[str]:
    """Returns the lines of the table.

    Args:
        rows: What the nodes say of their sandboxes.
        before: An earlier look: when it was, and the CPU seconds by then, by sandbox.
        sort: A name of `SORTS`.
    """
    loads = {row["id"]: _cpu(row, before.get(row["id"])) for row in rows}
    key = SORTS[sort]
    ordered = sorted(rows, key=lambda row: key(row, loads[row["id"]]))
    cells = [_HEADS, *(_cells(row, loads[row["id"]]) for row in ordered)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    states = [row["state"] for row in rows]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted({*states}))
    memory = sum(row["memory_bytes"] or 0 for row in rows)
    total = f"{len(rows)} sandboxes{f' ({counts})' if rows else ''}, {sum(loads.values()):.0f} % of a core, "
    return [total + _bytes(memory), *(_line(row, widths) for row in cells)]


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    placed = [
        cell.ljust(width) if place < _LEFT_ALIGNED else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(placed).rstrip()


def _cells(row: Row, cpu: float) -> tuple[str, ...]:
    limit = f"/{_bytes(row['memory_limit'])}" if row["memory_bytes"] is not None else ""
    return (
        row["id"], _plain(row["owner"]) or "-", row["state"], row["backend"] or "-", _span(row["age_s"]),
        _span(row["ttl_left_s"]), _span(row["lease_left_s"]), "-" if row["cpu_s"] is None else f"{cpu:.0f}",
        _bytes(row["memory_bytes"]) + limit, "-" if row["processes"] is None else str(row["processes"]),
        _bytes(row["disk_bytes"]), str(row["commands"]),
    )  # fmt: skip


def _seconds(rows: list[Row]) -> dict[str, tuple[float, float]]:
    return {row["id"]: (row["at_s"], row["cpu_s"]) for row in rows if row["cpu_s"] is not None}


def _cpu(row: Row, before: tuple[float, float] | None) -> float:
    """Returns percent of a core since the earlier look, or since its start where that did not see it."""
    if row["cpu_s"] is None:
        return 0.0
    at, seconds = before or (row["at_s"] - row["age_s"], 0.0)
    return 100 * max(row["cpu_s"] - seconds, 0.0) / max(row["at_s"] - at, 1e-3)


def _plain(text: str) -> str:
    """Returns a name without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in text)[:60]


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _bytes(amount: int | None) -> str:
    if amount is None:
        return "-"
    for size, unit in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if amount >= size:
            return f"{amount / size:.1f}{unit}" if amount < 10 * size else f"{amount // size}{unit}"
    return str(amount)
