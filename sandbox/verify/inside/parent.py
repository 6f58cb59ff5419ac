"""The trusted parent: runs as another user than the candidate, and alone writes the report.

It knows what is right, and the nonce, from its standard input. The candidate's process is not its child: it
comes to an abstract socket of a random name, once, and before it has loaded a line of the candidate. Nothing
that this program reads from it is more than JSON, and nothing it does not answer for by a deadline of this
program's clock counts.

The report is two lines of JSON on standard output: one when the other side is there, one at the end.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sized
from typing import Any, NoReturn, cast

from .wire import WireError, receive, send

DETAIL, MAX_EVENTS = 300, 20_000
LATE_S = 2.0
Event = dict[str, str]


class CallError(AssertionError):
    """A call of the candidate that gave no value."""


class Ended(BaseException):
    """No further test can be run: the text says why. No `except Exception` of a checker keeps it."""


class Late(BaseException):
    """The time of all tests is over; no `except Exception` of a checker keeps it."""


class Candidate:
    """The other side of the connection."""

    def __init__(self, connection: socket.socket, case_timeout_s: float, deadline: float):
        self._connection, self._case_timeout_s = connection, case_timeout_s
        self.deadline, self.ended = deadline, ""

    def ask(self, message: dict[str, Any], timeout_s: float = math.inf) -> dict[str, Any]:
        """Sends a message and returns the answer.

        Raises:
            Ended: There was none; there will be no other either.
        """
        if self.ended:
            raise Ended(self.ended)
        until = min(time.monotonic() + timeout_s, self.deadline)
        try:
            self._connection.settimeout(max(until - time.monotonic(), 0.01))
            send(self._connection, message)
            return receive(self._connection, until)
        except TimeoutError:
            self.ended = "timeout"
        except (EOFError, OSError):
            self.ended = "exit"
        except WireError:
            self.ended = "forged"
        raise Ended(self.ended)

    def answer(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Has a function called; returns its `value`, what it `raised`, or the `type` that is no JSON."""
        message = {"call": function, "args": args, "kwargs": kwargs}
        return self.shaped(message, ({"value"}, {"raised", "text"}, {"type"}))

    def shaped(self, message: dict[str, Any], shapes: tuple[set[str], ...]) -> dict[str, Any]:
        """Asks for an answer of one of some shapes.

        Raises:
            Ended: There was none, or one of another shape.
        """
        answer = self.ask(message, self._case_timeout_s)
        if set(answer) not in shapes:
            self.ended = "forged"
            raise Ended(self.ended)
        return answer

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function for a checker.

        Raises:
            CallError: It raised, or returned what is no JSON.
        """
        answer = self.answer(function, list(args), kwargs)
        if "value" not in answer:
            raise CallError(f"{function} {explain(answer)}")
        return answer["value"]


def explain(answer: dict[str, Any]) -> str:
    """Says what came in place of a value."""
    if "raised" in answer:
        return f"raised {answer['raised']}: {answer.get('text', '')}"[:DETAIL]
    return f"returned {str(answer.get('type'))[:60]}, which is no JSON"


def show(value: Any) -> str:
    """Returns a value as text; one that is too deep for it has none."""
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):
        return "what cannot be shown"


def same(right: Any, given: Any, relative: float, absolute: float) -> bool:
    """Whether two values of JSON are equal: same types, numbers within the tolerance."""
    if isinstance(right, (int, float)) and not isinstance(right, bool) and (relative or absolute):
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            return False
        return right == given or near(right, given, relative, absolute)
    if type(right) is not type(given):
        return False
    if isinstance(right, list):
        return len(cast(Sized, right)) == len(given) and all(
            same(one, other, relative, absolute)
            for one, other in zip(cast("list[Any]", right), given, strict=True)
        )
    if isinstance(right, dict):
        wanted = cast("dict[str, Any]", right)
        return wanted.keys() == given.keys() and all(
            same(value, given[key], relative, absolute) for key, value in wanted.items()
        )
    return right == given or (right != right and given != given)


def near(right: float, given: float, relative: float, absolute: float) -> bool:
    """Whether a number is within the tolerance; nothing is near what is infinite or too large to tell."""
    try:
        return math.isfinite(right) and abs(right - given) <= max(absolute, relative * abs(right))
    except OverflowError:
        return False


def run_case(candidate: Candidate, case: dict[str, Any]) -> Event:
    """Runs one case."""
    answer = candidate.answer(case["function"], case["args"], case["kwargs"])
    if case["raises"]:
        right = answer.get("raised") == case["raises"]
    else:
        right = "value" in answer and same(
            case["expected"], answer["value"], case["relative"], case["absolute"]
        )
    if right:
        return {"id": case["id"], "outcome": "pass", "detail": ""}
    said = f"returned {show(answer['value'])}" if "value" in answer else explain(answer)
    outcome = "no_json" if "type" in answer else "fail"
    return {"id": case["id"], "outcome": outcome, "detail": said[:DETAIL]}


def run_check(candidate: Candidate, check: Callable[..., Any], name: str) -> Event:
    """Runs one function of the checker."""
    event = {"id": name, "outcome": "pass", "detail": ""}
    try:
        check(candidate.call, random.Random(random.SystemRandom().getrandbits(64)))
    except (CallError, AssertionError) as error:
        event = {"id": name, "outcome": "fail", "detail": str(error)[:DETAIL]}
    except Exception as error:
        event = {"id": name, "outcome": "fail", "detail": f"{type(error).__name__}: {error}"[:DETAIL]}
    if candidate.ended:  # whatever the checker made of it: a call that was not answered is no exception
        raise Ended(candidate.ended)
    return event


def run_functions(candidate: Candidate, job: dict[str, Any], events: list[Event]) -> str:
    """Runs all cases and checks; returns how it ended."""
    checker: dict[str, Any] = {"__name__": "checker"}
    exec(compile(job["checker"], "checker", "exec"), checker)
    runs: list[tuple[str, Callable[[], Event]]] = [
        (case["id"], lambda case=case: run_case(candidate, case)) for case in job["cases"]
    ]
    runs += [(name, lambda name=name: run_check(candidate, checker[name], name)) for name in job["checks"]]
    random.SystemRandom().shuffle(runs)
    loaded = candidate.shaped(job["load"], ({"loaded"}, {"raised", "text"}))
    if "loaded" not in loaded:
        events += [{"id": name, "outcome": "load", "detail": explain(loaded)} for name, _ in runs]
        return "load"
    for name, run in runs:
        try:
            events.append(run())
        except Ended as error:
            events.append({"id": name, "outcome": str(error), "detail": f"in {name}"})
            return str(error)
        except Late:
            events.append({"id": name, "outcome": "timeout", "detail": "the time of all tests was over"})
            return "timeout"
    return "end"


def run_suite(candidate: Candidate, job: dict[str, Any], events: list[Event]) -> str:
    """Collects what the runner says of its tests; returns how it ended."""
    candidate.deadline = time.monotonic() + job["start_s"]
    try:
        ready = "ready" in candidate.ask(job["load"])
    except Ended:
        ready = False
    if not ready:  # nothing of the candidate has been loaded yet
        return "no framework"
    candidate.deadline = time.monotonic() + job["timeout_s"]
    said = candidate.ask({})
    while "end" not in said:
        texts = {name: said.get(name) for name in ("id", "outcome", "detail")}
        if not all(isinstance(text, str) for text in texts.values()) or len(events) >= MAX_EVENTS:
            return "forged"
        events.append({name: str(text)[:1000] for name, text in texts.items()})
        said = candidate.ask({})
    return "end" if said["end"] == len(events) else "forged"


def accept(address: str, deadline: float) -> socket.socket:
    """Returns the connection of the one process that knows the address; nobody else is in the box yet.

    Raises:
        TimeoutError: It did not come.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen(1)
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        return listener.accept()[0]


def late(number: int, frame: object) -> NoReturn:
    """Ends the tests when their time is over."""
    raise Late


def full() -> list[str]:
    """Returns the folders that have no room for another block or file."""
    found: list[str] = []
    for path in ("/tmp", "/workspace", "/dev/shm"):
        try:
            info = os.statvfs(path)
        except OSError:
            continue
        if info.f_blocks and (not info.f_bavail or (info.f_files and not info.f_favail)):
            found.append(path)
    return found


def main() -> None:
    """Reads the job, runs the tests, writes the report."""
    job = json.loads(sys.stdin.buffer.read())
    begin = time.monotonic()
    try:
        connection = accept(job["address"], begin + job["start_s"])
        receive(connection, begin + job["start_s"])
    except (TimeoutError, EOFError, WireError):
        print(json.dumps({"nonce": job["nonce"], "started": False}), flush=True)
        return
    print(json.dumps({"nonce": job["nonce"], "started": True}), flush=True)
    candidate = Candidate(connection, job["case_timeout_s"], time.monotonic() + job["timeout_s"])
    signal.signal(signal.SIGALRM, late)
    starting_s = job["start_s"] if job["kind"] == "suite" else 0.0
    signal.setitimer(signal.ITIMER_REAL, starting_s + job["timeout_s"] + LATE_S)
    events: list[Event] = []
    run = run_functions if job["kind"] == "functions" else run_suite
    try:
        end = run(candidate, job, events)
    except Ended as error:
        end = str(error)
    except Late:
        end = "timeout"
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"nonce": job["nonce"], "end": end, "events": events, "full": full()}), flush=True)
