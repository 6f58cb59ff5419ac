"""What a verification found."""

from __future__ import annotations

from dataclasses import dataclass, field

from sandbox.types import Verdict


@dataclass(frozen=True, slots=True)
class Flag:
    """A trace of a known way to cheat, for a person to look at; `sandbox.verify.flags.KINDS` has the kinds.

    It does not decide: honest work can look the same. `Plan.fatal_kinds` names kinds that do.
    """

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file of the agent's box that was not taken over, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class CaseResult:
    """How one test ended: `pass`, or `fail`, `skip`, `timeout` and so on, which all count as failed."""

    id: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The verdict of a verification, and all that led to it.

    Attributes:
        verdict: Infrastructure says nothing about the candidate and must not become a score.
        reason: Why it is not a pass; empty for one.
        tests: Outcomes by test.
        flags: Traces of known ways to cheat.
        changed: The files that were taken over from the agent's box.
        left_out: Those that were not; `more_left_out` counts those beyond the first hundreds.
        output: What the candidate printed, head and tail. Nothing is read from it.
        attempts: How many verifier boxes it took.
        duration_s: Wall time of all.
    """

    verdict: Verdict
    reason: str = ""
    tests: tuple[CaseResult, ...] = ()
    flags: tuple[Flag, ...] = ()
    changed: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    more_left_out: int = 0
    output: str = field(default="", repr=False)
    attempts: int = 0
    duration_s: float = 0.0

    @property
    def score(self) -> float | None:
        """1 for a pass, 0 for a failure, None where there is no score."""
        return {Verdict.PASS: 1.0, Verdict.FAIL: 0.0}.get(self.verdict)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of its flags."""
        return frozenset(flag.kind for flag in self.flags)
