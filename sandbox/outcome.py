"""What comes back of a command, on its way from agent to node, journal and client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox.types import ExecResult

FIELDS = ("exit_code", "signal", "truncated", "timed_out", "oom", "disk_full", "duration_s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A result and what an operation returns besides it: a session's state, or JSON."""

    result: ExecResult
    extra: bytes = b""

    def fields(self) -> dict[str, Any]:
        """Returns all but the bytes, as JSON values; `of` turns them back."""
        fields = {name: getattr(self.result, name) for name in FIELDS}
        return {**fields, "stdout_bytes": len(self.result.stdout), "stderr_bytes": len(self.result.stderr)}

    def body(self) -> bytes:
        """Returns the bytes, one after the other."""
        return self.result.stdout + self.result.stderr + self.extra

    @classmethod
    def of(cls, fields: Mapping[str, Any], body: bytes) -> Outcome:
        """Returns the outcome of which `fields` and `body` came."""
        out = fields["stdout_bytes"]
        end = out + fields["stderr_bytes"]
        known = {name: fields[name] for name in FIELDS}
        return cls(ExecResult(stdout=body[:out], stderr=body[out:end], **known), body[end:])
