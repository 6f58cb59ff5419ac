"""What can go wrong with a sandbox itself. A command that fails is not an error: it is an `ExecResult`.

Only `ExecResult.check` makes an error of it, and that is of a tree of its own, as it is the policy's:

CommandError                 the command did not exit with 0
├── ExitError                it exited with another code
├── CommandTimeoutError      it was ended for its time; it has no exit code
├── DiskFullCommandError     it failed, and the sandbox had no room left on disk
├── OutOfMemoryError         the kernel ended a process of it for memory
├── KilledError              it was ended by a signal
└── UnknownExitError         how it ended is not known

SandboxError                 anything below; it says nothing about the policy that used the sandbox
├── BackendMissingError      the backend is not installed or does not answer; says how to get it
├── RefusedError             the node has no room for another sandbox or command; try later or elsewhere
├── PolicyError              the backend or the node does not offer what was asked for; asking again is no use
│   └── LayerError           a layer is not there, damaged, or cannot be built, mounted or published
│       └── PlantedAnswerError   the scan before publishing found what gives a task's answer away
├── StartTimeoutError        the sandbox did not come up in time; it has been removed
├── LostError                the sandbox or its node is gone, or was never known
│   └── SandboxOomError      the sandbox ended because the kernel ended a process of it for memory
├── ProtocolError            the sandbox answered out of shape; it has been ended
├── FileError                a file operation inside the sandbox failed
│   ├── DiskFullError        because the sandbox has no room left on disk
│   └── UnsafeTreeError      a tree or an archive that must not be unpacked
├── JournalMismatchError     a replayed command is not the one that the journal has in its place
├── UnknownOutcomeError      a command was under way when its caller or node died; what it did is not known
└── InfrastructureError      the node failed at something else
    └── JournalError         a journal is damaged, of an unknown version, or has outgrown its budget
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from sandbox.types import ExecResult

Reason = Literal[
    "sandboxes", "cpu", "memory", "pids", "disk", "start_rate", "busy", "paused", "processes", "draining",
    "quota", "pool",
]  # fmt: skip
"""Why admission was refused: no place for one more sandbox, its cores, memory, processes or disk; too many
are being started; too many commands wait, the sandbox is paused, it has too many background processes; the
node is about to end; the project's quota is used up; or no warm pool has the whole group ready."""


_MAX_TEXT = 600
"""What an error says may have come out of a sandbox: so much of it is passed on."""


def printable(text: str, most: int = _MAX_TEXT) -> str:
    """Returns a text as one that a terminal or a log can show: short, and without control characters."""
    short = text if len(text) <= most else f"{text[: most // 2]} [...] {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


class SandboxError(RuntimeError):
    """The sandbox or the fleet is at fault, never the policy. Its text can be shown, whoever wrote it."""

    def __init__(self, message: str = ""):
        super().__init__(printable(message))


class BackendMissingError(SandboxError):
    """A backend that this machine does not have."""


class RefusedError(SandboxError):
    """Admission was refused; `reason` says for want of what."""

    def __init__(self, message: str, reason: Reason = "sandboxes"):
        super().__init__(message)
        self.reason: Reason = reason


class PolicyError(SandboxError):
    """Something was asked for that is not offered here; the text says what is."""


class StartTimeoutError(SandboxError):
    """A sandbox did not answer in time after its start."""


class LostError(SandboxError):
    """The sandbox died, its lease ended, or its node is gone."""


class SandboxOomError(LostError):
    """The sandbox itself fell to its memory limit."""


class ProtocolError(SandboxError):
    """A frame of a wrong shape, size or sequence."""


class FileError(SandboxError):
    """A file operation inside the sandbox failed: the text says which and why."""


class DiskFullError(FileError):
    """A file could not be written for want of room in the sandbox."""


class UnsafeTreeError(FileError):
    """A tree or an archive leads out of its place, is a bomb, or is more than was allowed."""


class LayerError(PolicyError):
    """A layer is not there, is damaged, or cannot be built, mounted or published; the text says which."""


class PlantedAnswerError(LayerError):
    """A layer was not published, as it gives away what a task asks for; the text names the findings."""


class JournalMismatchError(SandboxError):
    """The caller's sequence of commands is not the journal's: replaying further would invent results."""


class UnknownOutcomeError(SandboxError):
    """A command was under way when its caller or its node died. `reason`: idempotent, running or none."""

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


class InfrastructureError(SandboxError):
    """Something else failed on the node."""


class JournalError(InfrastructureError):
    """A journal cannot be read, or does not hold what is asked of it."""


def _tree(kind: type[SandboxError]) -> Iterator[type[SandboxError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _tree(below)


_KINDS: dict[str, type[SandboxError]] = {kind.__name__: kind for kind in _tree(SandboxError)}


def to_wire(error: SandboxError) -> dict[str, str]:
    """Returns an error as JSON values."""
    return {"type": type(error).__name__, "message": str(error), "reason": getattr(error, "reason", "")}


def from_wire(data: dict[str, str]) -> SandboxError:
    """Returns the error that `to_wire` described."""
    kind = _KINDS.get(data["type"], InfrastructureError)
    if issubclass(kind, RefusedError | UnknownOutcomeError):
        return kind(data["message"], data["reason"])  # type: ignore[arg-type]
    return kind(data["message"])


class CommandError(RuntimeError):
    """A command did not exit with 0; `result` is all that is known of it."""

    def __init__(self, result: ExecResult):
        what = "unknown" if result.exit_code is None else result.exit_code
        last = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        said = ": " + printable(last[0]) if last else ""
        super().__init__(f"{str(type(self).__doc__).rstrip('.')} (exit code {what}){said}")
        self.result = result


class ExitError(CommandError):
    """The command failed."""


class CommandTimeoutError(CommandError):
    """The command was ended for its time."""


class DiskFullCommandError(CommandError):
    """The command failed with the sandbox's disk full."""


class OutOfMemoryError(CommandError):
    """The kernel ended a process of the command for memory."""


class KilledError(CommandError):
    """The command was ended by a signal."""


class UnknownExitError(CommandError):
    """How the command ended is not known."""


def raise_for(result: ExecResult) -> None:
    """Raises what a result stands for, unless that is an exit 0."""
    for holds, kind in (
        (result.timed_out, CommandTimeoutError),
        (result.oom, OutOfMemoryError),
        (result.disk_full, DiskFullCommandError),
        (result.signal is not None, KilledError),
        (result.exit_code is None, UnknownExitError),
        (result.exit_code != 0, ExitError),
    ):
        if holds:
            raise kind(result)
