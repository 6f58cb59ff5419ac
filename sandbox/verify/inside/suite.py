"""Trusted test files in the process of the candidate: each test's outcome goes to the parent as it ends.

The functions that tell it are bound before anything of the candidate is loaded, and no file of the
candidate's, no environment and no configuration is read by either framework.
"""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import sys
import unittest
from collections.abc import Callable
from typing import Any, cast

from .wire import receive, send

Tell = Callable[[str, str, str], None]
DETAIL = 300
FOREVER = 1e9


def run(connection: socket.socket, message: dict[str, Any]) -> None:
    """Runs the files and says how many outcomes there were."""
    fd = os.dup2(connection.fileno(), random.SystemRandom().randint(100, 200), inheritable=False)
    hidden = socket.socket(fileno=fd)
    connection.close()
    sent = [0]

    def tell(name: str, outcome: str, detail: str, send: Any = send, receive: Any = receive) -> None:
        sent[0] += 1
        send(hidden, {"id": name, "outcome": outcome, "detail": detail[-DETAIL:]})
        receive(hidden, FOREVER)

    def finish(send: Any = send) -> None:
        send(hidden, {"end": sent[0]})

    framework = {"unittest": by_unittest, "pytest": by_pytest}[message["framework"]]
    start = framework(message, tell)
    guard()
    send(hidden, {"ready": True})
    receive(hidden, FOREVER)
    sys.path.append(message["root"])
    os.chdir(message["root"])
    start()
    finish()


class EqualsAnything(AssertionError):
    """A value that is compared equals an object that nothing equals."""


def equals_anything(value: Any, depth: int = 4) -> bool:
    """Whether a value, or one in it, equals an object that nothing equals."""
    inside: list[Any] = []
    if isinstance(value, (list, tuple, set, frozenset)):
        inside = list(cast("list[Any]", value))
    elif isinstance(value, dict):
        inside = list(cast("dict[Any, Any]", value).values())
    if depth and any(equals_anything(inner, depth - 1) for inner in inside[:1000]):
        return True
    try:
        return bool(value == object())
    except Exception:
        return False


def guard() -> None:
    """Has the comparisons of `unittest` refuse values that equal anything."""
    for name in ("assertEqual", "assertIn", "assertCountEqual", "assertAlmostEqual"):
        original = getattr(unittest.TestCase, name)

        def guarded(
            self: Any, first: Any, second: Any, *rest: Any, original: Any = original, **named: Any
        ) -> None:
            if equals_anything(first) or equals_anything(second):
                raise EqualsAnything("a value equals anything")
            original(self, first, second, *rest, **named)

        setattr(unittest.TestCase, name, guarded)


class Result(unittest.TestResult):
    """One outcome a test: the worst of what the framework says of it."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell, self._said = tell, dict[str, tuple[str, str]]()

    def _say(self, test: Any, outcome: str, detail: str = "") -> None:
        whole: Any = test.test_case if type(test).__name__ == "_SubTest" else test
        name = whole.id()
        if name not in self._said or self._said[name][0] == "pass":
            self._said[name] = (outcome, detail)
        if not isinstance(whole, unittest.TestCase):
            self.stopTest(whole)  # a class or a module that could not be set up

    def stopTest(self, test: Any) -> None:
        """Tells how it ended."""
        name = test.id()
        self._tell(name, *self._said.pop(name, ("none", "")))
        super().stopTest(test)

    def addSuccess(self, test: Any) -> None:
        """It passed."""
        self._say(test, "pass")

    def addError(self, test: Any, err: Any) -> None:
        """It raised."""
        self._say(test, "fail", f"{err[0].__name__}: {err[1]}")

    def addFailure(self, test: Any, err: Any) -> None:
        """It failed."""
        self._say(test, "equal" if err[0] is EqualsAnything else "fail", str(err[1]))

    def addSkip(self, test: Any, reason: str) -> None:
        """It was skipped, which is no pass."""
        self._say(test, "skip", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        """It failed as expected, which is no pass."""
        self._say(test, "xfail")

    def addUnexpectedSuccess(self, test: Any) -> None:
        """It passed against expectation, which is no pass."""
        self._say(test, "xpass")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        """A part of it ended."""
        if err is not None:
            self._say(test, "fail", f"{subtest._subDescription()}: {err[1]}")


def by_unittest(message: dict[str, Any], tell: Tell) -> Callable[[], None]:
    """Returns what runs the files under `unittest`."""
    return lambda: run_unittest(message, tell)


def run_unittest(message: dict[str, Any], tell: Tell) -> None:
    """Loads all files, then runs their tests."""
    result, loader = Result(tell), unittest.TestLoader()
    suites: list[unittest.TestSuite] = []
    for name in message["files"]:
        module_name = os.path.splitext(name)[0].replace("/", ".")
        spec = importlib.util.spec_from_file_location(module_name, f"{message['root']}/{name}")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            tell(module_name, "load", f"{type(error).__name__}: {error}")
            continue
        suites.append(loader.loadTestsFromModule(module))
    for suite in suites:
        suite.run(result)


def by_pytest(message: dict[str, Any], tell: Tell) -> Callable[[], None]:
    """Returns what runs the files under pytest: no plugin but ours, no configuration, no conftest."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    import pytest

    class Trusted:
        """Tells how each test ended: failed in any phase, skipped, or passed."""

        def __init__(self) -> None:
            self.said = dict[str, tuple[str, str]]()

        def pytest_runtest_logreport(self, report: Any) -> None:
            """Takes one phase of a test."""
            outcome = (
                "pass" if report.outcome == "passed" else "skip" if report.outcome == "skipped" else "fail"
            )
            if hasattr(report, "wasxfail"):
                outcome = "xfail" if report.outcome == "skipped" else "xpass"
            known = self.said.get(report.nodeid, ("pass", ""))
            self.said[report.nodeid] = known if known[0] != "pass" else (outcome, str(report.longrepr or ""))
            if report.when == "teardown":
                tell(report.nodeid, *self.said.pop(report.nodeid))

        def pytest_collectreport(self, report: Any) -> None:
            """Takes a file that could not be loaded."""
            if report.outcome != "passed":
                tell(report.nodeid, "load", str(report.longrepr or ""))

    options = [
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-c",
        "/dev/null",
        "--import-mode=importlib",
        "-p",
        "no:terminal",
    ]
    arguments = [*options, f"--rootdir={message['root']}", *message["files"]]
    return lambda: void(pytest.main(arguments, plugins=[Trusted()]))


def void(value: object) -> None:
    """Drops an exit code, which nobody is to believe."""
