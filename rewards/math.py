"""The reward for mathematical answers: what stands in the last `\\boxed{...}` equals the reference, or not.

It is a plain function, so `envs.scoring` runs it in a process of its own with a hard time limit. A reference
that cannot be read is an error of the verifier; an answer that cannot be read is a wrong answer.
"""

from __future__ import annotations

import re

from envs.killable import VerifierError
from envs.types import Task, Trajectory
from rewards.algebra import equal
from rewards.answers import normal_form
from rewards.base import reference
from rewards.expression import ExpressionError, Node, parse

_PAIRS = {"(": ")", "[": "]", "{": "}"}
_TEXT = re.compile(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}")


def equivalent(task: Task, trajectory: Trajectory) -> float:
    """Returns 1 when the boxed (or, without a box, the whole) answer equals the reference; else 0.

    Raises:
        VerifierError: The reference is missing, or no expression.
    """
    return float(same(reference(task), trajectory.answer))


def same(gold: str, answer: str) -> bool:
    """Says whether an answer equals a reference, either of which may stand in a box.

    Raises:
        VerifierError: The reference is no expression.
    """
    wanted, given = unbox(gold), unbox(answer)
    if wanted is None or not wanted.strip():
        raise VerifierError(f"the reference {gold!r} is empty or its box is not closed")
    if given is None or not given.strip():
        return False
    text = _TEXT.fullmatch(wanted.strip())
    if text:
        return normal_form(_TEXT.sub(r"\1", given)) == normal_form(text.group(1))
    wanted, given = _bare(wanted), _bare(given)
    opening, pieces = _pieces(wanted)
    try:
        nodes = [parse(piece) for piece in pieces]
        for node in nodes:
            equal(node, node)
    except (ExpressionError, ArithmeticError) as error:
        raise VerifierError(f"the reference {gold!r} is no expression: {error}") from error
    try:
        other_opening, other_pieces = _pieces(given)
        others = [parse(piece) for piece in other_pieces]
    except ExpressionError:
        return False
    if other_opening != opening or len(others) != len(nodes):
        return False
    return _same_set(nodes, others) if opening in ("", "{}") else all(map(equal, nodes, others))


def unbox(text: str) -> str | None:
    """Returns the content of the last box, the text itself when it has none, None for an unclosed box."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None if "\\boxed" in text else text
    depth, begin = 0, start + len("\\boxed")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin + 1 : position]
    return None


def _bare(text: str) -> str:
    """Drops math signs around, `x =` before and a unit after an expression."""
    text = text.strip().strip("$").strip().removesuffix(".")
    text = re.sub(r"(?<=\S)\s*\\(?:text|mathrm)\{[^{}]*\}(\^\{?\d\}?)?\s*$", "", text)
    return re.sub(r"^\s*[A-Za-z]\s*=\s*", "", text)


def _pieces(text: str) -> tuple[str, list[str]]:
    """Splits a tuple, interval, set or bare list at its commas; the first item tells the brackets."""
    plain = re.sub(r"\\left|\\right", "", text).replace("\\{", "⦃").replace("\\}", "⦄").strip()
    if re.fullmatch(r"-?\d{1,3}((,|\{,\})\d{3})+(\.\d+)?", plain):
        return "", [plain]
    if plain.startswith("⦃") and plain.endswith("⦄"):
        return "{}", _split(plain[1:-1])
    inner = _split(plain[1:-1]) if plain[:1] in ("(", "[") and plain[-1:] in (")", "]") else []
    if len(inner) > 1 and len(_split(plain)) == 1:
        return plain[0] + plain[-1], inner
    return "", _split(plain)


def _split(text: str) -> list[str]:
    """Splits at commas outside all brackets; half-open intervals may close with the other bracket."""
    pieces, depth, start = list[str](), 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
    return [*pieces, text[start:]]


def _same_set(nodes: list[Node], others: list[Node]) -> bool:
    """Matches every node with one of the others, each used once."""
    left = list(others)
    for node in nodes:
        match = next((i for i, other in enumerate(left) if equal(node, other)), None)
        if match is None:
            return False
        left.pop(match)
    return True
