"""How far each half of the policy has run over a cached sequence, and from where its windows are filled.

Compressed keys exist for every token of a sequence. Window keys need not: the decoder may skip the tokens of
a long prompt but for the last ones, and a sequence found again by its compressed keys alone has lost its
windows and replays some tokens to fill them. Either way a half that starts anew at position s sees window
keys from s on only, its floor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence that one call runs: positions [start, end)."""

    start: int
    end: int
    counted: int
    """How many of the first of them are counted already: they write window keys and nothing else."""
    floor: int
    """First position whose window keys the encoder may see."""
    decoder_start: int
    """The decoder runs [decoder_start, end)."""
    decoder_floor: int

    @property
    def length(self) -> int:
        """Tokens of the call."""
        return self.end - self.start

    @property
    def decoded(self) -> int:
        """Tokens of the call that the decoder runs."""
        return self.end - self.decoder_start


@dataclass(slots=True)
class Progress:
    """Of one sequence. All are positions."""

    length: int = 0
    """Compressed keys are counted up to here."""
    encoded: int = 0
    """The encoder's windows hold up to here; below `length` while lost windows are replayed."""
    decoded: int = 0
    """The decoder has run up to here."""
    floor: int = 0
    """Where the encoder's windows begin."""
    decoder_floor: int = 0
    """Where the decoder's windows begin."""
    peak: int = 0
    """The most tokens ever written: what lies a ring before it is overwritten."""
    base: int = 0
    """Tokens that were taken over without what rolling back needs."""

    def plan(self, new: int, decode_from: int | None) -> Span:
        """The span of a call with `new` tokens; the decoder runs from `decode_from` on (None: all).

        The decoder goes on where it stopped if that is inside the call and `decode_from` skips nothing.
        """
        start, end = self.encoded, self.encoded + new
        begin = start if decode_from is None else max(start, decode_from)
        if begin > self.decoded:
            begin = min(begin, end)
            floor = begin if begin < end else self.decoder_floor
        else:
            begin, floor = min(self.decoded, end), self.decoder_floor
        return Span(start, end, min(max(self.length - start, 0), new), self.floor, begin, floor)

    def advance(self, span: Span) -> None:
        """Count what a call has run."""
        self.encoded = span.end
        self.length = max(self.length, span.end)
        self.peak = max(self.peak, self.length)
        if span.decoded:
            self.decoded, self.decoder_floor = span.end, span.decoder_floor

    def least(self, slack: int) -> int:
        """The shortest the sequence can be cut to when rings hold `slack` entries more than a window."""
        return max(self.base, self.peak - slack, self.decoder_floor)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        self.length = length
        self.encoded, self.decoded = min(self.encoded, length), min(self.decoded, length)
