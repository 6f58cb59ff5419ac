"""What a node admits, and for want of what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sandbox.admission import NodeLimits, admit
from sandbox.errors import (
    CommandError,
    DiskFullError,
    JournalError,
    PolicyError,
    RefusedError,
    SandboxError,
    SandboxOomError,
    UnknownOutcomeError,
    from_wire,
    to_wire,
)
from sandbox.types import Limits, SandboxSpec

ONE = SandboxSpec(limits=Limits(cpus=2, memory_bytes=64 << 20, pids=32))


@pytest.mark.parametrize(
    ("limits", "held", "starting", "reason"),
    [
        (NodeLimits(sandboxes=2), 1, 1, "sandboxes"),
        (NodeLimits(starting=2), 0, 2, "start_rate"),
        (NodeLimits(memory_bytes=128 << 20), 1, 1, "memory"),
        (NodeLimits(reserve_bytes=1 << 50), 0, 0, "memory"),
        (NodeLimits(cpus=5), 1, 1, "cpu"),
        (NodeLimits(pids=80), 2, 0, "pids"),
        (NodeLimits(reserve_disk_bytes=1 << 60), 0, 0, "disk"),
    ],
)
def test_refusals_say_for_want_of_what(
    tmp_path: Path, limits: NodeLimits, held: int, starting: int, reason: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        admit(limits, ONE, held * [ONE], starting * [ONE], tmp_path)
    assert caught.value.reason == reason
    admit(replace(NodeLimits(), cpus=6, pids=96), ONE, held * [ONE], [], tmp_path)


@pytest.mark.parametrize("limits", [NodeLimits(memory_bytes=1), NodeLimits(cpus=1), NodeLimits(pids=31)])
def test_what_never_fits_is_no_refusal(tmp_path: Path, limits: NodeLimits) -> None:
    with pytest.raises(PolicyError):
        admit(limits, ONE, [], [], tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        RefusedError("x", "cpu"),
        UnknownOutcomeError("x", "idempotent"),
        DiskFullError("x"),
        JournalError("x"),
        SandboxOomError("x"),
    ],
)
def test_errors_cross_the_wire(error: SandboxError) -> None:
    back = from_wire(to_wire(error))
    assert type(back) is type(error) and str(back) == "x"
    assert getattr(back, "reason", "") == getattr(error, "reason", "")


def test_a_command_that_failed_is_no_error_of_the_sandbox() -> None:
    assert not issubclass(CommandError, SandboxError)
