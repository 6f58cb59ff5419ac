"""What the proxy reads from a hostile client: each message means one thing, or does not pass."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sandbox.egress.proxy import http, tls
from sandbox.egress.proxy.http import Refused


def reason(head: bytes) -> str:
    with pytest.raises(Refused) as raised:
        http.parse(head)
    return raised.value.reason


def test_a_request_is_written_anew() -> None:
    head = (
        b"GET http://Files.lab:8080/a/b?c=d HTTP/1.1\r\nHost: files.lab:8080\r\nAccept: */*\r\nCookie: a\r\n"
        b"Connection: keep-alive, x-secret\r\nX-Secret: 1\r\nProxy-Authorization: Basic YQ==\r\nTE: trailers"
    )
    request = http.parse(head)
    assert (request.method, request.host, request.port) == ("GET", "files.lab", 8080)
    assert http.write(request) == (
        b"GET /a/b?c=d HTTP/1.1\r\nHost: files.lab:8080\r\nAccept: */*\r\nCookie: a\r\n"
        b"Connection: close\r\n\r\n"
    )


@pytest.mark.parametrize(
    "name", ["X-HTTP-Method-Override", "x-http-method", "X-Method-Override", "X_HTTP_Method_Override",
             "Transfer_Encoding", "Content_Length", "Proxy_Authorization"]
)  # fmt: skip
def test_what_servers_take_for_another_request_stays_here(name: str) -> None:
    request = http.parse(f"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\n{name}: DELETE".encode())
    assert request.fields == []


def test_a_body_is_announced() -> None:
    request = http.parse(
        b"POST http://a.lab HTTP/1.1\r\nhost: a.lab\r\ncontent-length: 12\r\nexpect: 100-continue"
    )
    assert request.length == 12
    assert http.write(request) == (
        b"POST / HTTP/1.1\r\nHost: a.lab\r\nContent-Length: 12\r\nConnection: close\r\n\r\n"
    )


def test_literal_addresses_are_read_as_such() -> None:
    assert http.parse(b"CONNECT [::1]:443 HTTP/1.0").host == "::1"
    assert http.write(http.parse(b"GET http://[2606::1]/ HTTP/1.0")).split(b"\r\n")[1] == b"Host: [2606::1]"


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a.lab",
        b"GET https://a.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET ftp://a.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http:///x HTTP/1.1\r\nHost: a.lab",
        b"GET http://user@a.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab:80@b.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab\\@b.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab#b.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab:/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab:0/ HTTP/1.1\r\nHost: a.lab:0",
        b"GET http://a.lab:+80/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab:65536/ HTTP/1.1\r\nHost: a.lab:65536",
        b"GET http://a.lab./ HTTP/1.1\r\nHost: a.lab.",
        b"GET http://[::1/ HTTP/1.1\r\nHost: [::1",
        b"GET http://[::1]x:80/ HTTP/1.1\r\nHost: [::1]",
        b"GET http://a.lab/a b HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab/\xff HTTP/1.1\r\nHost: a.lab",
        b"GET  http://a.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab/ HTTP/2\r\nHost: a.lab",
        b"get http://a.lab/ HTTP/1.1\r\nHost: a.lab",
        b"TRACE http://a.lab/ HTTP/1.1\r\nHost: a.lab",
        b"GET http://a.lab/ HTTP/1.1",
        b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nHost: a.lab",
        b"GET http://a.lab/ HTTP/1.1\nHost: b.lab\r\nHost: a.lab",
        b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\nX: y",
        b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\n folded: x",
        b"GET http://a.lab/ HTTP/1.1\r\nHost : a.lab",
        b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\n: x",
        b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nX: a\0b",
        b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nContent-Length: 5",
        b"POST http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nTransfer-Encoding: chunked",
        b"POST http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nContent-Length: 1\r\nContent-Length: 1",
        b"POST http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nContent-Length: +1",
        b"POST http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nContent-Length: 1_0",
        b"CONNECT a.lab HTTP/1.1\r\nHost: a.lab",
        b"CONNECT http://a.lab:443 HTTP/1.1\r\nHost: a.lab:443",
    ],
)
def test_what_can_be_read_in_two_ways(head: bytes) -> None:
    assert reason(head) == "malformed"


def test_another_host_in_the_header() -> None:
    assert reason(b"GET http://a.lab/ HTTP/1.1\r\nHost: b.lab") == "host_mismatch"
    assert reason(b"GET http://a.lab:8080/ HTTP/1.1\r\nHost: a.lab") == "host_mismatch"
    assert reason(b"CONNECT a.lab:443 HTTP/1.1\r\nHost: b.lab:443") == "host_mismatch"


def test_heads_have_a_size() -> None:
    assert reason(b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab" + b"\r\na: b" * 64) == "too_large"
    assert reason(b"GET http://a.lab/" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a.lab") == "too_large"


WORDS = st.sampled_from(
    [b"GET", b"POST", b"CONNECT", b" ", b"http://", b"a.lab", b"b.lab", b":80", b":443", b"@", b"[::1]", b"/",
     b"?", b"#", b" HTTP/1.1", b" HTTP/1.0", b"\r\n", b"\n", b"\r", b"\0", b"\t", b"Host: ", b"host:",
     b"Content-Length: ", b"Transfer-Encoding: chunked", b"Connection: ", b"12", b"x", b",", b"\xff",
     b"%0d%0a", b"."]
)  # fmt: skip
HEADS = st.one_of(st.binary(max_size=200), st.lists(WORDS, max_size=24).map(b"".join))


@given(HEADS)
@example(b"GET http://a.lab/ HTTP/1.1\r\nHost: a.lab\r\nX: y")
def test_whatever_passes_means_one_thing(head: bytes) -> None:
    try:
        request = http.parse(head)
    except Refused:
        return
    out = http.write(request)
    lines = out.split(b"\r\n")
    assert out.endswith(b"\r\n\r\n") and out.count(b"\r\n\r\n") == 1
    assert not any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines)
    names = [line.partition(b":")[0].lower() for line in lines[1:-2]]
    assert names.count(b"host") == 1 and b"transfer-encoding" not in names
    assert names.count(b"content-length") == (request.method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
    assert lines[0].count(b" ") == 2
    assert request.host in ("a.lab", "b.lab", "::1") or set(request.host) <= set(
        "abcdefghijklmnopqrstuvwxyz0123456789.-_:"
    )


def greeting(host: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = host is not None
    tunnel = context.wrap_bio(incoming, outgoing, server_hostname=host)
    with pytest.raises(ssl.SSLWantReadError):
        tunnel.do_handshake()
    return outgoing.read()


GREETING = greeting("files.lab")


def test_a_greeting_names_its_host() -> None:
    assert tls.server_name(GREETING) == "files.lab"
    assert tls.server_name(GREETING + b"more") == "files.lab"


def test_a_greeting_in_pieces_is_waited_for() -> None:
    assert all(tls.server_name(GREETING[:size]) is None for size in range(len(GREETING)))
    body = GREETING[5:]
    records = [
        b"\x16\x03\x01" + len(body[at : at + 50]).to_bytes(2, "big") + body[at : at + 50]
        for at in range(0, len(body), 50)
    ]
    assert tls.server_name(b"".join(records)) == "files.lab"


def with_extension(kind: int, content: bytes) -> bytes:
    """Returns the greeting with one more extension."""
    hello = bytearray(GREETING[9:])
    at = 34 + 1 + hello[34]
    at += 2 + int.from_bytes(hello[at : at + 2], "big")
    at += 1 + hello[at]
    extension = kind.to_bytes(2, "big") + len(content).to_bytes(2, "big") + content
    size = int.from_bytes(hello[at : at + 2], "big") + len(extension)
    hello[at : at + 2] = size.to_bytes(2, "big")
    hello += extension
    message = b"\x01" + len(hello).to_bytes(3, "big") + bytes(hello)
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x02\x01\x00\x05",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03",
        b"\x15\x03\x01\x00\x02\x01\x00",
        greeting(None),
        with_extension(0xFE0D, b"\x00" * 32),
        with_extension(0, b"\x00\x0c\x00\x00\x09other.lab"),
    ],
)
def test_what_is_no_open_greeting(data: bytes) -> None:
    with pytest.raises(Refused) as raised:
        tls.server_name(data)
    assert raised.value.reason == "sni_mismatch"


@given(
    st.one_of(
        st.binary(max_size=300),
        st.tuples(st.integers(0, len(GREETING) - 1), st.binary(min_size=1, max_size=9)),
    )
)
def test_whatever_greets_names_a_host_that_is_there(data: bytes | tuple[int, bytes]) -> None:
    if isinstance(data, tuple):
        at, piece = data
        data = GREETING[:at] + piece + GREETING[at + len(piece) :]
    try:
        name = tls.server_name(data)
    except Refused:
        return
    assert name is None or name.encode() in data.lower()
