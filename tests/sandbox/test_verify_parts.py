"""The parts of a verification that need no box: plans, ids, decoys, comparisons, flags, repositories."""

from __future__ import annotations

import base64
import json
import re
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import InfrastructureError
from sandbox.policy import Network
from sandbox.types import SandboxSpec
from sandbox.verify import Case, FunctionTests, Plan, SuiteTests, seal
from sandbox.verify.decoys import make
from sandbox.verify.diff import Diff, _read, merge
from sandbox.verify.flags import KINDS, of_commands, of_diff, of_run
from sandbox.verify.inside.parent import Candidate, run_functions, same
from sandbox.verify.inside.suite import equals_anything
from sandbox.verify.plan import pattern
from sandbox.verify.report import CaseResult
from sandbox.verify.repository import history
from sandbox.verify.run import check

SUITE = SuiteTests(files=("t.py",), ids=("t.T.test_a", "t.T.test_b"))
TESTS = FunctionTests(module="a.py", cases=(Case(id="one", function="f"),))
UNFIT = Case(id="a", function="f", expected={1})
PLAN = Plan(tests=SUITE, allow=("**",), trusted={"t.py": b""})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tests": FunctionTests(module="a.py")}, "test ids"),
        ({"tests": FunctionTests(module="/a.py", cases=TESTS.cases)}, "'/a.py' is not a path"),
        ({"tests": FunctionTests(module="a.py", checks=("test_x",))}, "checks need a checker"),
        ({"tests": FunctionTests(module="a.py", checks=("x",), checker="pass")}, "not test_"),
        ({"tests": FunctionTests(module="a.py", cases=TESTS.cases * 2)}, "each once"),
        ({"tests": SUITE, "trusted": {}}, "not among the trusted"),
        ({"allow": ()}, "allows no file"),
        ({"allow": ("b.py",)}, "'a.py' is not among"),
        ({"allow": "*.py"}, "a text stands"),
        ({"base": {"x": "text"}}, "bytes"),
        ({"tests": FunctionTests(module="a.py", checks=("test_x",), checker="def f(:")}, "no Python"),
        (
            {"tests": FunctionTests(module="a.py", checks=("test_x",), checker="x = 1")},
            "no function 'test_x'",
        ),
        ({"tests": FunctionTests(module="a.py", cases=(UNFIT,))}, "JSON"),
        ({"root": "workspace"}, "root"),
        ({"timeout_s": 0}, "above 0"),
        ({"python": "/tmp/python3"}, "replace the interpreter"),
        ({"python_path": ("/workspace/lib",)}, "library folder"),
        ({"base": {"../x": b""}}, "not a path"),
        ({"spec": SandboxSpec(network=Network({"a": ()}, "a"))}, "no network"),
    ],
)
def test_a_plan_that_cannot_hold_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Plan(**{"tests": TESTS, "allow": ("*.py",), **fields})


@pytest.mark.parametrize(
    ("glob", "yes", "no"),
    [
        ("*.py", ["a.py"], ["a/b.py", "a.pyc", "a.py\n"]),
        ("src/**", ["src/a", "src/a/b.py"], ["src", "xsrc/a"]),
        ("**/*.py", ["a.py", "a/b/c.py"], ["a.txt"]),
        ("a?.[py]", ["ab.[py]"], ["a/.[py]", "ab.p"]),
    ],
)
def test_patterns(glob: str, yes: list[str], no: list[str]) -> None:
    regex = re.compile(pattern(glob), re.DOTALL)
    assert [path for path in [*yes, *no] if regex.fullmatch(path)] == yes


def test_trusted_files_win_over_files_and_folders_of_the_candidate() -> None:
    plan = Plan(
        tests=TESTS,
        allow=("**",),
        trusted={"tests/a.py": b"t"},
        base={"old.py": b"", "x": b"base", "keep": b"k"},
    )
    diff = Diff({"tests": b"a file", "x/y": b"new", "tests/a.py/z": b""}, gone=("old.py", "x"))
    files, gave_way = merge(plan, diff)
    assert files == {"tests/a.py": b"t", "x/y": b"new", "keep": b"k"}
    assert [left.path for left in gave_way] == ["tests", "tests/a.py/z"]


def report(**outcomes: str) -> list[CaseResult]:
    return [CaseResult(f"t.T.{name}", outcome) for name, outcome in outcomes.items()]


def test_ids_and_their_number_are_checked() -> None:
    decoys = make(0.0)
    right = [CaseResult(name, end) for name, end in decoys.expected["unittest"].items()]
    good = [*report(test_a="pass", test_b="pass"), *right]
    assert check(PLAN, decoys, good, "end") == []
    wrong = {
        "missing": good[1:],
        "duplicate": [good[0], *good],
        "unknown": [*good, CaseResult("t.T.test_c", "pass")],
        "decoy": [*good[:2], *(CaseResult(test.id, "pass") for test in right)],
    }
    for outcome, events in wrong.items():
        assert {problem.outcome for problem in check(PLAN, decoys, events, "end")} == {outcome}
    assert {problem.outcome for problem in check(PLAN, decoys, good[:-1], "end")} == {"decoy"}
    assert {problem.outcome for problem in check(PLAN, decoys, good, "exit")} == {"exit"}


def test_decoys_differ_from_run_to_run_and_fail_as_they_should(tmp_path: Path) -> None:
    first, second = make(0.0), make(0.0)
    assert first.path != second.path
    assert {"fail", "pass"} == set(first.expected["pytest"].values())
    (tmp_path / first.path).write_bytes(first.source)
    done = subprocess.run(
        ["/usr/bin/python3", "-m", "unittest", "-v", first.path.removesuffix(".py")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    ended = dict(re.findall(r"^(test_\w+) .* (ok|FAIL|ERROR)$", done.stderr, re.MULTILINE))
    expected = {name.rpartition(".")[2]: end for name, end in first.expected["unittest"].items()}
    assert {name: "pass" if end == "ok" else "fail" for name, end in ended.items()} == expected


@pytest.mark.parametrize(
    ("right", "given", "equal"),
    [
        (1, 1, True), (1, 1.0, False), (1, True, False), (True, 1, False), ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False), ({"a": 1}, {"a": 1}, True), ({"a": 1}, {"b": 1}, False), (None, None, True),
        ("a", "b", False), (float("nan"), float("nan"), True), (0.5, 0.5 + 1e-12, False), ([], {}, False),
    ],
)  # fmt: skip
def test_values_are_compared_by_type_too(right: Any, given: Any, equal: bool) -> None:
    assert same(right, given, 0.0, 0.0) is equal


def test_tolerances_hold_for_numbers_only() -> None:
    assert same([1, {"a": 2.0}], [1.0 + 1e-9, {"a": 2}], 0.0, 1e-6)
    assert not same(1, True, 0.0, 1.0)
    assert not same(1, float("nan"), 0.0, 1.0)
    assert same(float("inf"), float("inf"), 0.1, 0.0)
    for infinite in (float("inf"), float("-inf")):
        assert not any(same(infinite, given, 0.1, 1.0) for given in (0, 1e308, -infinite, float("nan")))
    assert not same(1.0, 10**400, 0.1, 1.0) and not same(10**400, 1.0, 0.1, 1.0)


FORGIVING = """
def test_refuses(call, draw):
    try:
        call("f", -1)
    except {caught}:
        return
    raise AssertionError("it took -1")
"""


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
@pytest.mark.parametrize(("answers", "end"), [(1, "exit"), (2, "end")])
def test_a_candidate_that_goes_away_has_raised_nothing(caught: str, answers: int, end: str) -> None:
    """A checker that wants an exception, and takes any, is not content with a process that has ended."""
    ours, theirs = socket.socketpair()
    said = [{"loaded": True}, {"raised": "ValueError", "text": "below 0"}][:answers]

    def answer() -> None:
        with theirs:
            for message in said:
                theirs.recv(1 << 16)
                data = json.dumps(message).encode()
                theirs.sendall(struct.pack("!I", len(data)) + data)
            if answers < 2:
                theirs.recv(1 << 16)

    thread = threading.Thread(target=answer)
    thread.start()
    events: list[dict[str, str]] = []
    checks = {"cases": [], "checker": FORGIVING.format(caught=caught), "checks": ["test_refuses"], "load": {}}
    assert run_functions(Candidate(ours, 30.0, time.monotonic() + 30), checks, events) == end
    assert [event["outcome"] for event in events] == ["pass" if end == "end" else "exit"]
    thread.join()
    ours.close()


def test_what_equals_anything_is_found() -> None:
    equal = type("Equal", (), {"__eq__": lambda self, other: True, "__hash__": None})()
    assert all(map(equals_anything, (equal, [1, equal], {"a": (equal,)})))
    assert not any(map(equals_anything, (1, "a", [1, {"b": 2}], object(), None, {1, 2})))


def test_what_a_box_gives_is_believed_in_nothing() -> None:
    plan = Plan(tests=TESTS, allow=("*.py",))
    said = {
        "files": {}, "left": [], "more": 0, "same": [], "gone": [], "size": 0, "count": 0, "full": False,
        "leaks": [], "mentions": [], "elsewhere": [],
    }  # fmt: skip
    data = base64.b64encode(b"x").decode()
    assert _read({**said, "files": {"a.py": [data, 0o755]}}, plan).files == {"a.py": b"x"}
    for path in ("../a.py", "/a.py", "a/../b.py", "a.txt", "a\0.py", ""):
        with pytest.raises(InfrastructureError):
            _read({**said, "files": {path: [data, 0o644]}}, plan)


HONEST = b'''"""A module."""
import json
import re
import sys
import time


class Point:
    def __eq__(self, other):
        return isinstance(other, Point) and self.x == other.x


def solve(values):
    """Returns the result of values."""
    begin = time.monotonic()
    result = sorted(values)
    return result if time.monotonic() >= begin else []


if __name__ == "__main__":
    print(json.dumps(solve(sys.argv)))
'''


def test_honest_work_is_not_flagged() -> None:
    assert of_diff(PLAN, Diff({"src/a.py": HONEST, "README.md": b"# How to report results\n"})) == []
    assert (
        of_commands(["ls -la", "cat a.py", "python3 -m unittest", "grep -rn add src", "sed -i s/a/b/ a.py"])
        == []
    )
    assert of_run([CaseResult("a", "fail", "nope")], "debugging: value is 3\n") == []


def test_every_kind_of_flag_has_a_detector() -> None:
    source = Path("sandbox/verify/flags.py")
    text = (Path(__file__).parents[2] / source).read_text()
    for kind in KINDS:
        assert len(re.findall(rf'"{kind}"', text)) >= 2, kind


def test_a_sealed_repository_has_no_past(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]

    def run(*words: str) -> None:
        subprocess.run([*git, *words], cwd=folder, check=True, capture_output=True)

    run("init", "-q")
    for number, text in enumerate(("task", "the fix", "task")):
        (folder / "sub/a.py").write_text(text)
        run("add", "-A")
        run("commit", "-q", "-m", f"step {number}")
    run("tag", "fixed", "HEAD~1")
    run("reset", "-q", "--hard", "HEAD~2")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "x.log").write_text("kept")
    assert len(history(folder)) > 2
    seal(folder)
    assert history(folder) == []
    assert (folder / "sub/a.py").read_text() == "task"
    assert (folder / "x.log").read_text() == "kept"
    everything = b"".join(path.read_bytes() for path in (folder / ".git").rglob("*") if path.is_file())
    assert b"step 1" not in everything
