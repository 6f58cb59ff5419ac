"""What can go wrong with a sandbox itself. A command that fails is not an error: it is an `ExecResult`.

SandboxError                 anything below; it says nothing about the policy that used the sandbox
├── BackendMissingError      the backend is not installed or does not answer; says how to get it
├── RefusedError             the node has no room for another sandbox or command; try later or elsewhere
├── PolicyError              the backend or the node does not offer what was asked for; asking again is no use
├── StartTimeoutError        the sandbox did not come up in time; it has been removed
├── LostError                the sandbox or its node is gone, or was never known
├── ProtocolError            the sandbox answered out of shape; it has been ended
├── FileError                a file operation inside the sandbox failed
├── JournalMismatchError     a replayed command is not the one that the journal has in its place
├── UnknownOutcomeError      a command was under way when its caller or node died; what it did is not known
└── InfrastructureError      the node failed at something else
    └── JournalError         a journal is damaged, of an unknown version, or has outgrown its budget
"""

from __future__ import annotations

from collections.abc import Iterator


class SandboxError(RuntimeError):
    """The sandbox or the fleet is at fault, never the policy."""


class BackendMissingError(SandboxError):
    """A backend that this machine does not have."""


class RefusedError(SandboxError):
    """Admission was refused; `reason` is one of `sandboxes`, `memory`, `start_rate`, `busy`, `draining`."""

    def __init__(self, message: str, reason: str = "sandboxes"):
        super().__init__(message)
        self.reason = reason


class PolicyError(SandboxError):
    """Something was asked for that is not offered here; the text says what is."""


class StartTimeoutError(SandboxError):
    """A sandbox did not answer in time after its start."""


class LostError(SandboxError):
    """The sandbox died, its lease ended, or its node is gone."""


class ProtocolError(SandboxError):
    """A frame of a wrong shape, size or sequence."""


class FileError(SandboxError):
    """A file operation inside the sandbox failed: the text says which and why."""


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
        return kind(data["message"], data["reason"])
    return kind(data["message"])
