"""JSON by the C parts of the standard library alone: the others import regular expressions, a megabyte."""

from __future__ import annotations

import _json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Context:
    """What the scanner asks for."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    memo: dict[str, str] = {}  # noqa: RUF012 (the scanner's own)

    @staticmethod
    def parse_constant(name: str) -> float:
        """NaN and infinities are no JSON."""
        raise ValueError(name)


def unknown(value: object) -> object:
    """What is no JSON value is an error."""
    raise TypeError(type(value).__name__)


_scan: Any = _json.make_scanner(Context())  # type: ignore[attr-defined]
_encode: Any = _json.make_encoder(  # type: ignore[attr-defined]
    None, unknown, _json.encode_basestring_ascii, None, ": ", ", ", False, False, False
)


def loads(text: str | bytes) -> Any:
    """Returns the value that a text is."""
    text = text.decode() if isinstance(text, bytes) else text
    value, end = _scan(text, 0)
    if text[end:].strip():
        raise ValueError("more than a value")
    return value


def dumps(value: Any) -> str:
    """Returns a value as text."""
    return "".join(_encode(value, 0))
