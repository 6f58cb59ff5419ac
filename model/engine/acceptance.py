"""Which drafts become tokens: two rules that leave the distribution as if the policy drew every token itself.

- `rejection` (Leviathan et al. 2023, Chen et al. 2023): a draft x from q is accepted with probability
  min(1, p(x) / q(x)); the first that is not gives way to a draw from max(p - q, 0), normalised. This accepts
  the most that any rule can. Which token comes out depends on where drafts begin and end.
- `coupled`: every position is drawn from p as without a drafter, with the same draw, and a draft is accepted
  when it is that token. The drafter uses the same draws, so it is often right. Tokens are those of plain
  decoding, draw for draw, whatever is drafted, batched or interrupted; somewhat fewer drafts are accepted.

Under both, greedy rows give exactly the greedy tokens: their p and q have one token each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from model.engine.sampler import Distribution, Sampled, SamplingColumns, distribution
from model.ops.sampling import draw, uniforms
from model.ops.verification import verification

Rule = Literal["rejection", "coupled"]

_ATTEMPT_SALT = np.uint64(0x5851F42D4C957F2D)


@dataclass(frozen=True, slots=True)
class Verified:
    """What one attempt gave R requests. A place, the number of drafts before it, counts up to `accepted`.

    token_ids int64 [R, K + 1]; accepted int64 [R]; finite bool [R, K + 1], False where there is no meaningful
    token; `clean` is False when any logits were not finite, even of a draft that was not accepted: the caches
    then hold what is not a number.
    """

    token_ids: np.ndarray
    accepted: np.ndarray
    finite: np.ndarray
    clean: bool
    target: Distribution
    index: np.ndarray

    def place(self, rows: np.ndarray, place: int) -> Sampled:
        """The tokens of `rows` [n] at a place, as the plain sampler would report them."""
        like = self.target.full
        at = _tensor(self.index[rows, place], like)
        return self.target.report(at, _tensor(self.token_ids[rows, place], like))


class Attempt:
    """One step's draws and distributions, of R requests that each start at a position of their own."""

    def __init__(self, slots: int, starts: np.ndarray, columns: SamplingColumns, rule: Rule) -> None:
        """Begin; `starts` int64 [R] is the position of the first token to draw, `slots` the drafter's."""
        self._slots, self._starts, self._columns, self._rule = slots, starts, columns, rule
        self._proposed: Tensor | None = None

    def choose(self, logits: Tensor, slot: int) -> Tensor:
        """Draws the drafts [R] of a slot from the drafter's logits [R, V]."""
        tempered = distribution(logits, self._columns).tempered
        if self._proposed is None:
            self._proposed = tempered.new_empty(self._slots, *tempered.shape)
        self._proposed[slot] = tempered
        if self._rule == "coupled":
            return draw(tempered, self._columns.seed, self._starts + slot)
        return draw(tempered, *self._named(slot))

    def verify(self, logits: Tensor, drafts: np.ndarray, lengths: np.ndarray) -> Verified:
        """Checks drafts.

        Args:
            logits: float32 [T, V] of the policy, packed: after the anchor, then after each checked draft.
            drafts: int64 [R, K].
            lengths: int64 [R] how many of the K are checked.
        """
        row = np.repeat(np.arange(len(lengths)), lengths + 1)
        first = np.cumsum(lengths + 1) - (lengths + 1)
        target = distribution(logits, self._columns.take(row))
        index = first[:, None] + np.minimum(np.arange(drafts.shape[1] + 1), lengths[:, None])
        if self._rule == "coupled":
            positions = self._starts[row] + np.arange(len(row)) - first[row]
            drawn = draw(target.tempered, self._columns.seed[row], positions).cpu().numpy()
            accepted, tokens = _coupled(drawn[index], drafts, lengths)
        else:
            draws = [uniforms(*self._named(self._slots + slot)) for slot in range(drafts.shape[1])]
            decide = np.stack(draws, axis=1) if draws else np.zeros((len(lengths), 0))
            accepted, tokens = self._reject(target.tempered, index, drafts, lengths, decide)
        finite = target.finite.cpu().numpy()
        return Verified(tokens, accepted, finite[index], bool(finite.all()), target, index)

    def _reject(
        self, target: Tensor, index: np.ndarray, drafts: np.ndarray, lengths: np.ndarray, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Accepted drafts [R] and tokens [R, K + 1], by rejection sampling.

        Args:
            target: [T, V] tempered logits of p.
            index: [R, K + 1] row of `target` for each place.
            drafts: [R, K].
            lengths: [R].
            draws: [R, K] that decide on the drafts.
        """
        rest = uniforms(*self._named(2 * self._slots))
        given = (_tensor(array, target) for array in (index, drafts, lengths, draws, rest))
        proposed = target.new_empty(0, *target.shape) if self._proposed is None else self._proposed
        outcome = verification(target, proposed, *given)
        accepted, following = torch.stack(outcome).cpu().numpy()
        tokens = np.concatenate([drafts, np.zeros_like(drafts, shape=(len(lengths), 1))], axis=1)
        tokens[np.arange(len(lengths)), accepted] = following
        return accepted, tokens

    def _named(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Seeds and counters [R] of a draw of this attempt: no two of a request start at one position."""
        return self._columns.seed ^ _ATTEMPT_SALT, self._starts * (2 * self._slots + 1) + number


def _coupled(drawn: np.ndarray, drafts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accepted drafts [R] and tokens [R, K + 1], where plain decoding draws `drawn` [R, K + 1]."""
    right = (drawn[:, :-1] == drafts) & (np.arange(drafts.shape[1]) < lengths[:, None])
    return right.cumprod(axis=1).sum(axis=1), drawn


def _tensor(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)
