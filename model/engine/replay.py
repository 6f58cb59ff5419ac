"""Where the decoder's windows start in a sequence, and what becomes of that when caches are lost.

A prefill need not run the decoder over a whole prompt: its last tokens fill the windows. The position it
starts from, the floor of the windows, is fixed when the prefill is planned, so that neither chunks nor a
second computation move it, and is recorded in the turn for training. Tokens that were sampled are never given
another floor: a tool result that fits in a window goes on with the floor in force, also after the caches of
the session were evicted. Only where that floor is not known any more do other windows have to do, and the
tokens that follow are flagged.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, get_args

import numpy as np

from model.replay import Replay, decode_from

Floor = tuple[int, int]
"""First positions whose window keys the encoder and the decoder see."""

NO_FLOOR: Floor = (0, 0)


class Bound(IntEnum):
    """What the floors planned for a row are owed to."""

    NOTHING = 0
    """Nothing was sampled under them, or it is not known what was: other floors do as well."""
    PAST = 1
    """The session's earlier turns were sampled under them."""
    TURN = 2
    """Tokens of this very turn were sampled under them; the rest is to be as if nothing had been lost."""


_MOST_REMEMBERED = 1 << 16


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """The floor of a prefill under a replay mode."""

    mode: Replay
    config: Any

    @staticmethod
    def of(mode: Replay, config: Any) -> ReplayRule:
        """The rule for a policy. Raises ValueError when the mode is unknown, or the policy has no decoder."""
        if mode not in get_args(Replay):
            raise ValueError(f"replay is one of {', '.join(get_args(Replay))}, not {mode!r}")
        if mode != "off" and config.decoder_start is None:
            raise ValueError(
                f"replay={mode!r} needs a decoder, and this policy has no KV source in its upper half: "
                "use replay='off'"
            )
        return ReplayRule(mode, config)

    def floor(self, before: Floor | None, sampled: int, length: int) -> Floor:
        """The floors of a prefill up to `length`.

        Args:
            before: The floors in force for the tokens sampled so far; None: none were sampled.
            sampled: Tokens of the sequence that were computed for them.
            length: Tokens the prefill is to reach.
        """
        if self.mode == "off":
            return NO_FLOOR
        begin = decode_from(self.config, self.mode, length)
        if before is None:
            return (0, begin)
        return before if begin <= sampled else (before[0], begin)

    def length(self, floor: Floor, size: int) -> int:
        """The length for which the decoder's start in `floor` was planned, in a sequence of `size` tokens."""
        # However long, a prefill leaves the decoder the same number of tokens.
        return min(size, floor[1] + size - decode_from(self.config, self.mode, size))

    def recorded(self, floor: Floor) -> Floor:
        """What training has to know of a floor: what lies below an exact replay's changes nothing."""
        return (floor[0], 0) if self.mode == "exact" else floor


@dataclass(frozen=True, slots=True)
class Past:
    """A session's tokens int32 [n] up to the last sampled one, and the floors these were sampled with.

    `replayed` says whether those were others than the tokens before had been sampled with.
    """

    token_ids: np.ndarray
    floor: Floor
    replayed: bool

    def begins(self, history: np.ndarray) -> bool:
        """Whether `history` goes on from here."""
        size = self.token_ids.size
        return history.size > size and bool((history[:size] == self.token_ids).all())


class Memory:
    """The pasts of sessions whose caches were lost; of very many, the oldest are forgotten."""

    def __init__(self) -> None:
        self._pasts: OrderedDict[str, Past] = OrderedDict()

    def keep(self, session: str, past: Past | None) -> None:
        """Remembers a past, the later one of a session."""
        if past is None:
            return
        self._pasts[session] = past
        self._pasts.move_to_end(session)
        if len(self._pasts) > _MOST_REMEMBERED:
            self._pasts.popitem(last=False)

    def recall(self, session: str) -> Past | None:
        """Returns and forgets the session's past."""
        return self._pasts.pop(session, None)

    def forget(self, session: str) -> None:
        """Forgets a session."""
        self._pasts.pop(session, None)
