"""Reading a Dockerfile: the instructions that a build here has, and a plain refusal of the rest."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sandbox.errors import LayerError

KNOWN = ("FROM", "COPY", "ADD", "RUN", "ENV", "WORKDIR", "USER", "ARG")
_FLAGS = {"COPY": {"chmod"}, "ADD": {"chmod"}}
_VARIABLE = re.compile(r"\\(\$)|\$(?:\{(\w+)(?::([-+])([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction: its line, its name, its flags, and what follows them (a JSON list is `words`)."""

    line: int
    name: str
    rest: str
    flags: Mapping[str, str]
    words: tuple[str, ...] | None = None

    def error(self, what: str) -> LayerError:
        """Returns an error that names the line and the instruction."""
        return LayerError(f"Dockerfile line {self.line}: {self.name}: {what}")


def parse(text: str) -> list[Step]:
    """Returns the instructions of a Dockerfile.

    Raises:
        LayerError: It has one that is not offered here, or is none; names its line.
    """
    steps = [_step(line, words) for line, words in _logical_lines(text)]
    bases = [step for step in steps if step.name == "FROM"]
    if not bases:
        raise LayerError("the Dockerfile has no FROM: begin with FROM scratch, a base layer or an image")
    if len(bases) > 1:
        raise bases[1].error("a second stage is not supported: build the stages as layers of their own")
    for step in steps[: steps.index(bases[0])]:
        if step.name != "ARG":
            raise step.error("only ARG may come before FROM")
    return steps


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    whole, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("#"):
            if re.match(r"#\s*escape\s*=", stripped) and not whole:
                raise LayerError(f"Dockerfile line {number}: another escape character is not supported")
            continue
        if not stripped and not whole:
            continue
        first = first or number
        if stripped.endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        yield first, (whole + line).strip()
        whole, first = "", 0
    if whole:
        yield first, whole.strip()


def _step(line: int, text: str) -> Step:
    name, _, rest = text.partition(" ")
    name, rest = name.upper(), rest.strip()
    step = Step(line, name, rest, {})
    if name not in KNOWN:
        raise step.error(f"not supported here; there are {', '.join(KNOWN)}")
    if not rest:
        raise step.error("nothing follows it")
    flags: dict[str, str] = {}
    while match := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", rest):
        if match[1] not in _FLAGS.get(name, set()):
            raise step.error(f"the flag --{match[1]} is not supported")
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    if name in ("RUN", "COPY", "ADD") and rest.startswith("<<"):
        raise step.error("here-documents are not supported: use a file or && between commands")
    return Step(line, name, rest, flags, _list(rest) if name in ("RUN", "COPY", "ADD") else None)


def _list(rest: str) -> tuple[str, ...] | None:
    if not rest.startswith("["):
        return None
    try:
        words: object = json.loads(rest)
    except ValueError:
        return None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):  # pyright: ignore
        return tuple(str(word) for word in words)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return None


def expand(text: str, values: Mapping[str, str]) -> str:
    """Returns a text with `$NAME`, `${NAME}`, `${NAME:-default}` and `${NAME:+other}` replaced."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name, how, other = match[2] or match[5], match[3], match[4] or ""
        known = values.get(name, "")
        if how == "-":
            return known or expand(other, values)
        if how == "+":
            return expand(other, values) if known else ""
        return known

    return _VARIABLE.sub(value, text)


def words_of(step: Step, values: Mapping[str, str]) -> list[str]:
    """Returns the words after an instruction, variables replaced, quotes taken away.

    Raises:
        LayerError: A quote does not end.
    """
    if step.words is not None:
        return [expand(word, values) for word in step.words]
    try:
        return shlex.split(expand(step.rest, values))
    except ValueError as error:
        raise step.error(str(error)) from error


def pairs_of(step: Step, values: Mapping[str, str]) -> dict[str, str]:
    """Returns what an ENV sets: `NAME=value ...`, or the old `NAME value`.

    Raises:
        LayerError: It is neither.
    """
    name, sign, _ = step.rest.partition("=")
    if not sign or " " in name:
        name, _, value = step.rest.partition(" ")
        pairs = {name: expand(value.strip(), values)}
    else:
        try:
            pairs = dict(expand(word, values).split("=", 1) for word in shlex.split(step.rest))
        except ValueError as error:
            raise step.error(f"use NAME=value ({error})") from error
    for name in pairs:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise step.error(f"{name!r} is no name of a variable")
    return pairs
