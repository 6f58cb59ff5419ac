"""Reading a mathematical expression, in LaTeX or plain notation, into a small tree.

A node is a tuple: `("num", Fraction)`, `("var", name)`, `("add" | "mul" | "div" | "pow", a, b)`, `("neg", a)`
or `("fn", name, a)`. What is outside this grammar is refused rather than guessed at.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

FUNCTIONS = ("sqrt", "sin", "cos", "tan", "arcsin", "arccos", "arctan", "log", "ln", "exp", "abs")
_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "phi", "omega", "infty")
_MAX_CHARACTERS = 2000
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|[A-Za-z]+|\\[A-Za-z]+|[-+*/^()\[\]{}_|!]")
_REPLACED = (
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(cdot|times|ast)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])|÷", "/"),
    (r"\\(left|right|displaystyle|mathrm|operatorname)(?![A-Za-z])", ""),
    (r"\\[,;:! ]|~|\\?\$|\\?%|\^\{?\\circ\}?|°", " "),
    (r"\*\*", "^"),
    ("[−–]", "-"),
    ("[·×]", "*"),
    ("√", r"\\sqrt"),
    ("π", r"\\pi "),
)


class ExpressionError(ValueError):
    """A text that is no expression of the grammar."""


def parse(text: str) -> Node:
    """Reads one expression.

    Raises:
        ExpressionError: It is outside the grammar.
    """
    parser = _Parser(_tokens(text))
    node = parser.sum()
    if parser.rest:
        raise ExpressionError(f"unexpected {parser.rest[0]!r} in {text!r}")
    return node


def _tokens(text: str) -> list[str]:
    if len(text) > _MAX_CHARACTERS:
        raise ExpressionError(f"longer than {_MAX_CHARACTERS} characters")
    for pattern, replacement in _REPLACED:
        text = re.sub(pattern, replacement, text)
    if re.fullmatch(r"\s*-?\d{1,3}((,|\{,\})\d{3})+(\.\d+)?\s*", text):
        text = re.sub(r"[{},]", "", text)
    tokens: list[str] = []
    position = 0
    for match in _TOKEN.finditer(text):
        if text[position : match.start()].strip():
            raise ExpressionError(f"unexpected {text[position : match.start()].strip()!r}")
        position = match.end()
        tokens += _split_word(match.group())
    if text[position:].strip() or not tokens:
        raise ExpressionError(f"unexpected {text[position:].strip() or 'end'!r}")
    return tokens


def _split_word(word: str) -> list[str]:
    """Splits letters into one-letter variables; a longer word is a function, `pi`, or no mathematics."""
    name = word.removeprefix("\\")
    if word.startswith("\\") or not word[0].isalpha():
        return [word]
    if name in FUNCTIONS or name == "pi":
        return [f"\\{name}"]
    if len(name) <= 2 or set(name) <= set("xyz"):
        return list(name)
    raise ExpressionError(f"{word!r} is no expression")


class _Parser:
    """Recursive descent: sum, product (also implicit), sign, power, atom."""

    def __init__(self, tokens: list[str]) -> None:
        self.rest = tokens
        self.depth = 0

    def sum(self) -> Node:
        node = self.product()
        while self.rest and self.rest[0] in "+-":
            sign = self.rest.pop(0)
            right = self.product()
            node = ("add", node, right if sign == "+" else ("neg", right))
        return node

    def product(self) -> Node:
        node = self.signed()
        while self.rest and self.rest[0] not in ("+", "-", ")", "]", "}", "|"):
            if self.rest[0] in "*/":
                operator = "mul" if self.rest.pop(0) == "*" else "div"
                node = (operator, node, self.signed())
            else:
                node = self._implicit(node)
        return node

    def _implicit(self, node: Node) -> Node:
        right = self.power()
        if right[0] == "num" and node[0] == "num":
            raise ExpressionError("two numbers side by side")
        if node[0] == "num" and node[1].denominator == 1 and _is_proper_fraction(right):
            return ("add", node, right)  # a mixed number: 1\frac{1}{2}
        return ("mul", node, right)

    def signed(self) -> Node:
        if self.rest and self.rest[0] in "+-":
            sign = self.rest.pop(0)
            node = self._deeper(self.signed)
            return ("neg", node) if sign == "-" else node
        return self.power()

    def power(self) -> Node:
        node = self._deeper(self.atom)
        if self.rest and self.rest[0] == "^":
            self.rest.pop(0)
            return ("pow", node, self._deeper(self.signed))
        return node

    def atom(self) -> Node:
        token = self._next()
        if token[0].isdigit() or token[0] == ".":
            return ("num", Fraction(token))
        if token in ("(", "[", "{"):
            return self._closed({"(": ")", "[": "]", "{": "}"}[token])
        if token == "|":
            return ("fn", "abs", self._closed("|"))
        if token.isalpha():
            return self._variable(token)
        return self._command(token.removeprefix("\\")) if token.startswith("\\") else self._refuse(token)

    def _command(self, name: str) -> Node:
        if name == "pi":
            return ("fn", "pi", ("num", Fraction(0)))
        if name in _GREEK:
            return self._variable(f"\\{name}")
        if name == "frac":
            return ("div", self._argument(), self._argument())
        if name not in FUNCTIONS:
            return self._refuse(f"\\{name}")
        if name == "sqrt" and self.rest and self.rest[0] == "[":
            self.rest.pop(0)
            root = self._closed("]")
            return ("pow", self._argument(), ("div", ("num", Fraction(1)), root))
        power = self._argument() if self._take("^") else None
        node: Node = ("fn", name, self._argument() if name == "sqrt" else self._function_argument())
        return ("pow", node, power) if power else node

    def _variable(self, name: str) -> Node:
        if self._take("_"):
            name += f"_{self._argument()!r}"
        return ("var", name)

    def _argument(self) -> Node:
        """Returns a braced or bracketed argument, else the next digit (as in LaTeX) or atom."""
        if self.rest and len(self.rest[0]) > 1 and self.rest[0].isdigit():
            digits = self.rest.pop(0)
            self.rest.insert(0, digits[1:])
            return ("num", Fraction(digits[0]))
        return self._deeper(self.atom)

    def _function_argument(self) -> Node:
        """Returns a bracketed argument, else the product of the next numbers and variables: sin 2x."""
        node = self.power()
        bare = node[0] in ("num", "var", "pow")
        while bare and self.rest and (self.rest[0].isalpha() or self.rest[0] == "\\pi"):
            node = ("mul", node, self.power())
        return node

    def _closed(self, end: str) -> Node:
        node = self._deeper(self.sum)
        if self._next() != end:
            raise ExpressionError(f"{end!r} is missing")
        return node

    def _deeper(self, rule: Any) -> Node:
        self.depth += 1
        if self.depth > 100:
            raise ExpressionError("nested too deeply")
        node = rule()
        self.depth -= 1
        return node

    def _next(self) -> str:
        if not self.rest:
            raise ExpressionError("the expression is not complete")
        return self.rest.pop(0)

    def _take(self, token: str) -> bool:
        found = bool(self.rest) and self.rest[0] == token
        if found:
            self.rest.pop(0)
        return found

    def _refuse(self, token: str) -> Node:
        raise ExpressionError(f"unexpected {token!r}")


def _is_proper_fraction(node: Node) -> bool:
    return node[0] == "div" and node[1][0] == node[2][0] == "num" and node[1][1] < node[2][1]
