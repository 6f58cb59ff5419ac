"""What a verification is to do: which files may leave the agent's box, and the trusted tests for them.

Everything in a plan is the environment's own. None of it reaches the box in which the agent worked.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sandbox.types import SandboxSpec

MAX_DIFF_BYTES, MAX_DIFF_FILES = 8 << 20, 2000
WRITABLE = ("/workspace", "/tmp", "/dev/shm")
"""Where commands of a sandbox can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of a function of the candidate, and what is right: a value of JSON, or an exception's name.

    Numbers are compared exactly, and a whole one is not a fractional one, unless a tolerance is given.
    """

    id: str
    function: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    expected: Any = None
    raises: str = ""
    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    """Calls of functions of one candidate module, which runs in a process and as a user of its own.

    The recommended kind: what is right never enters a process of the candidate, and all that comes out of it
    is JSON, compared elsewhere. A candidate can make itself fail, and nothing else.

    Attributes:
        module: The candidate's file, relative to the plan's root.
        cases: Hidden cases. They are called in a random order.
        checker: Trusted source for what cases cannot say, with functions `test_...(call, draw)`, which raise
            when something is wrong: `call(name, *args, **kwargs)` calls the candidate and returns its value;
            `draw` is a `random.Random`, new at each run. It runs where the candidate cannot reach it.
        checks: The names of its functions.
        visible: Cases that the agent was shown: a candidate that has their answers written in it is flagged.
        case_timeout_s: Wall time of one call.
    """

    module: str
    cases: tuple[Case, ...] = ()
    checker: str = ""
    checks: tuple[str, ...] = ()
    visible: tuple[Case, ...] = ()
    case_timeout_s: float = 10.0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids that a report must have."""
        return (*(case.id for case in self.cases), *self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTests:
    """Files of tests for `unittest` or `pytest`, which import the candidate into their own process.

    For repositories that come with a suite. It holds against replaced, deleted and skipped tests, hooks and
    configuration of both frameworks, early exits and forged reports; and decoys, tests that are right only
    when they fail, find a candidate that changed the framework, the comparison or the clock for all.
    It cannot hold against code that knows these tests, waits for each and changes its outcome from within,
    as everything in a process can be changed by everything else in it. Use `FunctionTests` where you can.

    Attributes:
        framework: `unittest`, which every image has, or `pytest`, to which the plan's `python_path` leads.
        files: Test files, relative to the plan's root; they must be among the plan's `trusted` files.
        ids: All the tests that they hold: `tests.test_add.TestAdd.test_zero` in unittest (path and class),
            `tests/test_add.py::test_zero` in pytest.
    """

    framework: Literal["unittest", "pytest"] = "unittest"
    files: tuple[str, ...]
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffLimits:
    """What a diff may add up to; one with more fails."""

    files: int = 200
    size: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A verification.

    Attributes:
        tests: What is run.
        allow: Which files of the agent's box count, as patterns below `root`: `*` stays within a folder,
            `**` does not.
        root: The folder of the work, in both boxes.
        base: The files that the agent began with, by path below `root`.
        trusted: Tests and configuration that are put over the agent's files, by path below `root`.
        limits: Of the diff.
        spec: The verifier's box, without a network; its image and layers are to be ones that no agent wrote.
        start_s: How long the box, the interpreter, and a test framework may each take to start; running out
            of it is infrastructure.
        timeout_s: How long the tests may take. Running out of it is a failure.
        attempts: How often it is tried when the infrastructure fails.
        python: The interpreter, where nobody in the sandbox can write.
        python_path: Folders of libraries for the candidate, where nobody in the sandbox can write, or below
            `root` when trusted files are all that is in them.
        canary: A text that only hidden files have: an agent's box that holds it anywhere has seen them.
        package: The name of the package that the task is about: newer versions of it in the agent's box are
            flagged.
        fatal: Kinds of flags (`sandbox.verify.flags`) with which nothing passes; by default `leak`, and for
            a suite, which shares its process with the candidate, also `equality` and `clock`.
    """

    tests: FunctionTests | SuiteTests
    allow: tuple[str, ...]
    root: str = "/workspace"
    base: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    trusted: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    limits: DiffLimits = DiffLimits()
    spec: SandboxSpec = field(default_factory=lambda: SandboxSpec(journal=False))
    start_s: float = 60.0
    timeout_s: float = 60.0
    attempts: int = 2
    python: str = "/usr/bin/python3"
    python_path: tuple[str, ...] = ()
    canary: str = ""
    package: str = ""
    fatal: frozenset[str] | None = None

    @property
    def fatal_kinds(self) -> frozenset[str]:
        """The kinds of flags with which nothing passes."""
        if self.fatal is not None:
            return self.fatal
        in_process = isinstance(self.tests, SuiteTests)
        return frozenset({"leak", "equality", "clock"} if in_process else {"leak"})

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"this plan of a verification cannot hold: {problem}")


def pattern(glob: str) -> str:
    """Returns the regular expression of a pattern of paths."""
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    pieces = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return "".join(words.get(piece) or re.escape(piece) for piece in pieces)


def is_path(text: str) -> bool:
    """Whether a text is a plain path below a folder."""
    return bool(text) and "\0" not in text and not {"", ".", ".."} & set(text.split("/"))


def _problems(plan: Plan) -> list[str]:
    tests, ids = plan.tests, plan.tests.ids
    paths = [
        *plan.base,
        *plan.trusted,
        *([tests.module] if isinstance(tests, FunctionTests) else tests.files),
    ]
    found = [f"{path!r} is not a path below the root" for path in paths if not is_path(path)]
    lists = (plan.allow, plan.python_path, ids, *([tests.checks] if isinstance(tests, FunctionTests) else []))
    if any(isinstance(value, str) for value in lists):
        return ["a text stands where several are meant: write (text,)"]
    contents: tuple[object, ...] = (*plan.base.values(), *plan.trusted.values())
    if any(type(data) is not bytes for data in contents):
        return ["files are bytes, not text"]
    if not ids or len(set(ids)) != len(ids):
        found.append("it needs test ids, each once")
    if not plan.allow:
        found.append("it allows no file to count")
    if isinstance(tests, FunctionTests) and not any(
        re.fullmatch(pattern(glob), tests.module, re.DOTALL) for glob in plan.allow
    ):
        found.append(f"the module {tests.module!r} is not among the files that count")
    if not plan.root.startswith("/") or not is_path(plan.root[1:]):
        found.append(f"root is {plan.root!r}, which is not an absolute path without a slash at its end")
    if not (0 < plan.limits.size <= MAX_DIFF_BYTES and 0 < plan.limits.files <= MAX_DIFF_FILES):
        found.append(f"a diff has at most {MAX_DIFF_FILES} files and {MAX_DIFF_BYTES} bytes")
    if plan.spec.network:
        found.append("a verifier's box has no network")
    if min(plan.start_s, plan.timeout_s, plan.attempts) <= 0:
        found.append("times and attempts are above 0")
    if any(plan.python.startswith(f"{place}/") for place in WRITABLE):
        found.append(f"a candidate could replace the interpreter {plan.python!r}")
    outside = [path for path in plan.python_path if any(path.startswith(place) for place in WRITABLE)]
    found += [
        f"a candidate could write the library folder {path!r}"
        for path in outside
        if not any(f"{plan.root}/{name}".startswith(f"{path}/") for name in plan.trusted)
    ]
    return found + (_wrong_suite(plan, tests) if isinstance(tests, SuiteTests) else _wrong_calls(tests))


def _wrong_suite(plan: Plan, tests: SuiteTests) -> list[str]:
    return [
        f"the test file {path!r} is not among the trusted ones"
        for path in tests.files
        if path not in plan.trusted
    ]


def _wrong_calls(tests: FunctionTests) -> list[str]:
    found = (
        ["checks need a checker, and a checker checks"] if bool(tests.checker) != bool(tests.checks) else []
    )
    found += [
        f"a check is named {name!r}, not test_..." for name in tests.checks if not name.startswith("test_")
    ]
    try:
        defined = {node.name for node in ast.parse(tests.checker).body if isinstance(node, ast.FunctionDef)}
        json.dumps([asdict(case) for case in tests.cases])
    except (SyntaxError, TypeError, ValueError) as error:
        return [f"the checker is no Python, or a case is no JSON: {error}"]
    found += [f"the checker has no function {name!r}" for name in tests.checks if name not in defined]
    return found + (["the time of a case is above 0"] if tests.case_timeout_s <= 0 else [])
