"""The head of a request, read in one way or not at all, and written anew for the host that it goes to.

What two programs could read differently (folded lines, bare line feeds, two lengths, two hosts, chunked
bodies) is refused, as that difference is how requests are smuggled. Nothing of the client's bytes is passed
on unread.
"""

from __future__ import annotations

METHODS = frozenset((b"GET", b"HEAD", b"OPTIONS", b"POST", b"PUT", b"PATCH", b"DELETE", b"CONNECT"))
MAX_HEAD, MAX_LINE, MAX_FIELDS = 16384, 8192, 64
_BODIES = frozenset((b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DIGITS = frozenset(b"0123456789")
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~" + _LETTERS) | _DIGITS
_NAME = frozenset(b"-._" + _LETTERS) | _DIGITS
_ADDRESS = frozenset(b"abcdefABCDEF:.") | _DIGITS
_PATH = frozenset(range(0x21, 0x7F)) - {0x23}
_HOP = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"proxy-authenticate", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect",
     b"x-http-method-override", b"x-http-method", b"x-method-override")
)  # fmt: skip
"""What is not passed on: of one connection, written anew, or the name of another method than was judged."""


class Refused(Exception):
    """A request that does not pass; `reason` is one of those of a denial."""

    def __init__(self, reason: str, what: str, request: Request | None = None):
        super().__init__(what)
        self.reason, self.request = reason, request


class Request:
    """What is asked for: `length` bytes of body follow; `fields` are those that are passed on."""

    __slots__ = ("fields", "host", "length", "method", "path", "port")

    def __init__(
        self, method: str, host: str, port: int, path: bytes, fields: list[tuple[bytes, bytes]], length: int
    ):
        self.method, self.host, self.port = method, host, port
        self.path, self.fields, self.length = path, fields, length


def parse(head: bytes) -> Request:
    """Returns the request of a head, without the empty line that ends it.

    Raises:
        Refused: It is not one that can be read in one way only, or its Host is another.
    """
    lines = head.split(b"\r\n")
    if len(head) > MAX_HEAD or max(map(len, lines)) > MAX_LINE or len(lines) > MAX_FIELDS + 1:
        raise Refused("too_large", "the head of the request is too large")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.0", b"HTTP/1.1") or words[0] not in METHODS:
        raise Refused("malformed", "not a request line that is served")
    fields = [_field(line) for line in lines[1:]]
    method, target = words[0], words[1]
    if method == b"CONNECT":
        (host, port), path = endpoint(target, 0), b""
    else:
        host, port, path = _absolute(target)
    hosts = _values(fields, b"host")
    request = Request(method.decode(), host, port, path, _passed_on(fields), _length(method, fields))
    if len(hosts) > 1 or (not hosts and words[2] == b"HTTP/1.1"):
        raise Refused("malformed", "a request has one Host", request)
    if hosts and endpoint(hosts[0], port if method == b"CONNECT" else 80) != (host, port):
        raise Refused("host_mismatch", "the header Host is not where the request goes", request)
    return request


def write(request: Request) -> bytes:
    """Returns the head with which a request goes out; the connection ends with its response."""
    name = f"[{request.host}]" if ":" in request.host else request.host
    where = name if request.port == 80 else f"{name}:{request.port}"
    lines = [f"{request.method} ".encode() + request.path + b" HTTP/1.1", b"Host: " + where.encode()]
    lines += [name + b": " + value for name, value in request.fields]
    if request.method.encode() in _BODIES:
        lines.append(b"Content-Length: %d" % request.length)
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def endpoint(text: bytes, default: int) -> tuple[str, int]:
    """Returns host and port of `host[:port]`; without a `default` the port must be there.

    Raises:
        Refused: It is not of that shape.
    """
    if text.startswith(b"["):
        name, closed, rest = text[1:].partition(b"]")
        fine = bool(closed) and b":" in name and _ADDRESS.issuperset(name) and rest[:1] in (b"", b":")
        port = rest[1:]
        named = rest[:1] == b":"
    else:
        name, colon, port = text.partition(b":")
        labels = name.split(b".")
        fine, named = _NAME.issuperset(name) and all(labels) and len(name) <= 253, bool(colon)
    number = int(port) if named and 0 < len(port) <= 5 and _DIGITS.issuperset(port) else 0
    if not named:
        number = default
    if not fine or not 0 < number < 65536:
        raise Refused("malformed", "not a host and a port")
    return name.decode().lower(), number


def _absolute(target: bytes) -> tuple[str, int, bytes]:
    if target[:7].lower() != b"http://":
        raise Refused("malformed", "a proxy is asked for http://host/path; https goes through CONNECT")
    rest = target[7:]
    cut = next((place for place, byte in enumerate(rest) if byte in b"/?"), len(rest))
    host, port = endpoint(rest[:cut], 80)
    path = rest[cut:]
    if not _PATH.issuperset(path):
        raise Refused("malformed", "a path with characters that must be escaped")
    return host, port, path if path.startswith(b"/") else b"/" + path


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not name or not colon or not _TOKEN.issuperset(name):
        raise Refused("malformed", "a header without a name")
    value = value.strip(b" \t")
    if any((byte < 0x20 and byte != 0x09) or byte == 0x7F for byte in value):
        raise Refused("malformed", "a header with a control character")
    return name, value


def _values(fields: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in fields if key.lower() == name]


def _passed_on(fields: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    named = b",".join(_values(fields, b"connection")).lower()
    hop = _HOP | {word.strip().replace(b"_", b"-") for word in named.split(b",")}
    # Many servers take `_` in a name for `-`.
    return [(name, value) for name, value in fields if name.lower().replace(b"_", b"-") not in hop]


def _length(method: bytes, fields: list[tuple[bytes, bytes]]) -> int:
    lengths = _values(fields, b"content-length")
    if _values(fields, b"transfer-encoding") or len(lengths) > 1:
        raise Refused("malformed", "a body is announced by one Content-Length")
    if lengths and not (0 < len(lengths[0]) <= 15 and _DIGITS.issuperset(lengths[0])):
        raise Refused("malformed", "a Content-Length that is no number")
    length = int(lengths[0]) if lengths else 0
    if length and method not in _BODIES:
        raise Refused("malformed", "a body of a request that has none")
    return length
