"""Verification of what an agent did: trusted tests in a fresh box, and a verdict of three states.

`verify` judges what is in an agent's box, `verify_files` files that came another way, `gate` whether a task
can be judged at all. A `Plan` says how; `FunctionTests` is the kind of tests to prefer.
"""

from sandbox.verify.gate import Exercise, GateReport, gate
from sandbox.verify.plan import Case, DiffLimits, FunctionTests, Plan, SuiteTests
from sandbox.verify.report import CaseResult, Flag, LeftOut, Report
from sandbox.verify.repository import seal
from sandbox.verify.verifier import verify, verify_files

__all__ = [
    "Case",
    "CaseResult",
    "DiffLimits",
    "Exercise",
    "Flag",
    "FunctionTests",
    "GateReport",
    "LeftOut",
    "Plan",
    "Report",
    "SuiteTests",
    "gate",
    "seal",
    "verify",
    "verify_files",
]  # fmt: skip
