"""What is kept of a long output: head and tail, whatever pieces it came in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox.agent.command import Capped


@given(st.lists(st.integers(1, 200_000), max_size=12), st.integers(1, 300_000))
def test_head_and_tail_in_any_pieces(sizes: list[int], limit: int) -> None:
    data = bytes(range(251)) * (sum(sizes) // 251 + 1)
    data = data[: sum(sizes)]
    kept, at = Capped(limit), 0
    for size in sizes:
        kept.feed(data[at : at + size])
        at += size
    parts, half = kept.parts(), max(limit // 2, 1)
    if len(data) <= 2 * half:
        assert (b"".join(parts), kept.dropped) == (data, 0)
    else:
        note = b"\n[... %d bytes dropped ...]\n" % (len(data) - 2 * half)
        assert b"".join(parts) == data[:half] + note + data[-half:]
