"""Equality of two expressions: exactly over the rational functions, by evaluation beyond them.

Sums, products, quotients and integer powers of numbers and variables are compared as quotients of polynomials
with rational coefficients: a proof. Expressions with roots, pi or functions are evaluated at fixed points and
agree when they do so to a relative error of 1e-9 at each of them.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable
from fractions import Fraction

from rewards.expression import Node

Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]
Quotient = tuple[Polynomial, Polynomial]

_MAX_TERMS, _MAX_DEGREE, _MAX_BITS = 500, 64, 1 << 14
_POINTS, _TOLERANCE = 4, 1e-9
_ONE: Polynomial = {(): Fraction(1)}


class NotRationalError(ValueError):
    """An expression beyond the rational functions, or too large for an exact comparison."""


def equal(a: Node, b: Node) -> bool:
    """Says whether two expressions are equal wherever both are defined.

    Raises:
        ArithmeticError: The first one, the reference, has no value anywhere.
    """
    try:
        (p, q), (r, s) = _quotient(a), _quotient(b)
        return _multiply(p, s) == _multiply(r, q)
    except NotRationalError:
        return _equal_numerically(a, b)


def _quotient(node: Node) -> Quotient:
    kind = node[0]
    if kind == "num":
        return _constant(node[1]), _ONE
    if kind == "var":
        return {((node[1], 1),): Fraction(1)}, _ONE
    if kind == "neg":
        p, q = _quotient(node[1])
        return {monomial: -value for monomial, value in p.items()}, q
    if kind == "fn":
        raise NotRationalError(node[1])
    (p, q), (r, s) = _quotient(node[1]), _quotient(node[2])
    if kind == "add":
        return _add(_multiply(p, s), _multiply(r, q)), _multiply(q, s)
    if kind == "mul":
        return _multiply(p, r), _multiply(q, s)
    if kind == "div":
        if not r:
            raise NotRationalError("division by zero")
        return _multiply(p, s), _multiply(q, r)
    return _power((p, q), (r, s))


def _power(base: Quotient, exponent: Quotient) -> Quotient:
    (p, q), (r, s) = base, exponent
    if any(monomial for side in (r, s) for monomial in side):
        raise NotRationalError("a variable in the exponent")
    value = r.get((), Fraction(0)) / s[()]
    if value.denominator != 1 or (abs(value) > _MAX_DEGREE and not _is_number(base)):
        raise NotRationalError("exponent")
    count = int(value)
    if count < 0:
        if not p:
            raise NotRationalError("division by zero")
        p, q, count = q, p, -count
    if _is_number(base):
        return _constant(_number_power(p.get((), Fraction(0)), count)), _constant(_number_power(q[()], count))
    result: Quotient = _ONE, _ONE
    for _ in range(count):
        result = _multiply(result[0], p), _multiply(result[1], q)
    return result


def _number_power(value: Fraction, count: int) -> Fraction:
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if bits > 1 and bits * count > _MAX_BITS:
        raise NotRationalError("number too large")
    return value**count


def _is_number(quotient: Quotient) -> bool:
    return all(monomial == () for side in quotient for monomial in side)


def _constant(value: Fraction) -> Polynomial:
    return {(): value} if value else {}


def _add(a: Polynomial, b: Polynomial) -> Polynomial:
    result = dict(a)
    for monomial, value in b.items():
        result[monomial] = result.get(monomial, Fraction(0)) + value
    return {monomial: value for monomial, value in result.items() if value}


def _multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    if len(a) * len(b) > _MAX_TERMS**2 or max(len(a), len(b)) > _MAX_TERMS:
        raise NotRationalError("too many terms")
    result: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            degrees = dict(left)
            for name, degree in right:
                degrees[name] = degrees.get(name, 0) + degree
            monomial = tuple(sorted(degrees.items()))
            value = result.get(monomial, Fraction(0)) + x * y
            if value.numerator.bit_length() > 4 * _MAX_BITS:
                raise NotRationalError("number too large")
            result[monomial] = value
    return {monomial: value for monomial, value in result.items() if value}


def _equal_numerically(a: Node, b: Node) -> bool:
    names = sorted(_names(a) | _names(b))
    draw = random.Random(0)
    compared = defined = 0
    for _ in range(_POINTS):
        point = {name: complex(draw.uniform(0.3, 2.2)) for name in names}
        x = _value_or_none(a, point)
        if x is None:
            continue
        defined += 1
        y = _value_or_none(b, point)
        if y is None:
            continue
        compared += 1
        if abs(x - y) > _TOLERANCE * max(abs(x), abs(y)):
            return False
    if not defined:
        raise ArithmeticError("the reference has no finite value")
    return compared == defined


def _names(node: Node) -> set[str]:
    if node[0] == "var":
        return {node[1]}
    return set[str]().union(*(_names(child) for child in node[1:] if isinstance(child, tuple)))  # pyright: ignore


def _value_or_none(node: Node, point: dict[str, complex]) -> complex | None:
    try:
        value = _value(node, point)
    except (ArithmeticError, ValueError):
        return None
    return value if cmath.isfinite(value) else None


_UNARY: dict[str, Callable[[complex], complex]] = {
    "sqrt": cmath.sqrt,
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "log": cmath.log,
    "ln": cmath.log,
    "exp": cmath.exp,
    "abs": lambda z: complex(abs(z)),
    "pi": lambda z: complex(math.pi),
}


def _value(node: Node, point: dict[str, complex]) -> complex:
    kind = node[0]
    if kind == "num":
        return complex(float(node[1]))
    if kind == "var":
        return complex(math.e) if node[1] == "e" else point[node[1]]
    if kind == "fn":
        return _UNARY[node[1]](_value(node[2], point))
    x = _value(node[1], point)
    if kind == "neg":
        return -x
    y = _value(node[2], point)
    if kind == "add":
        return x + y
    if kind == "mul":
        return x * y
    return x / y if kind == "div" else x**y
