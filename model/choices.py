"""Discrete choices of a forward pass, recorded while sampling and forced while training.

A trainer that recomputes a sequence may route a token to another expert, or select another key, than the
sampler did: the policy then learns from a network that did not act. `Capture` keeps what `Policy.extend`
chose, `Choices` makes `Policy.forward` choose the same. A forced expert is still weighted by its own
affinity, so the router goes on learning. `SamplingMask` does the same for the truncation of the distribution
that a token was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FREE = -1
"""Stands for a choice that is not forced, and for one that was not made."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What to choose for T packed tokens; where it is `FREE`, the pass chooses itself."""

    expert_ids: Tensor | None = None
    """[T, layers, k] int64. A token's k experts in a layer are forced together or not at all."""
    selections: dict[int, Tensor] | None = None
    """By index source layer: [T, K] int64 numbers of main keys of the token's sequence, `FREE` for an unused
    place. A token without any number selects for itself."""

    def check(self, tokens: int, layers: int, experts: int, chosen: int) -> None:
        """Raise ValueError where the shapes or ids do not fit a pass over `tokens` tokens."""
        if (ids := self.expert_ids) is not None:
            if ids.shape != (tokens, layers, chosen):
                raise ValueError(
                    f"forced expert ids have shape {tuple(ids.shape)}, not {(tokens, layers, chosen)} "
                    "(tokens, layers, experts a token): record them with the same configuration and tokens"
                )
            if ids.numel() and not (int(ids.min()) >= FREE and int(ids.max()) < experts):
                raise ValueError(
                    f"forced expert ids lie outside 0..{experts - 1} (or {FREE} for a free choice)"
                )
            if ((ids == FREE).any(-1) != (ids == FREE).all(-1)).any():
                raise ValueError(f"a token's experts are partly {FREE}: force all of a layer's or none")
        for layer, index in (self.selections or {}).items():
            if index.ndim != 2 or index.shape[0] != tokens:
                raise ValueError(
                    f"forced selections of layer {layer} have shape {tuple(index.shape)}, "
                    f"not [{tokens} tokens, keys]: record them over the same tokens"
                )

    def first(self, tokens: int) -> Choices:
        """Those of the first `tokens` tokens."""
        selections = self.selections
        return Choices(
            None if self.expert_ids is None else self.expert_ids[:tokens],
            None if selections is None else {layer: index[:tokens] for layer, index in selections.items()},
        )

    def take(self, tokens: Tensor) -> Choices:
        """Those of the tokens numbered `tokens` [m]."""
        selections = self.selections
        return Choices(
            None if self.expert_ids is None else self.expert_ids[tokens],
            None if selections is None else {layer: index[tokens] for layer, index in selections.items()},
        )

    def to(self, device: torch.device) -> Choices:
        """The same on `device`."""
        selections = self.selections
        return Choices(
            None if self.expert_ids is None else self.expert_ids.to(device),
            None if selections is None else {layer: index.to(device) for layer, index in selections.items()},
        )

    @staticmethod
    def join(parts: Sequence[Choices | None], lengths: Sequence[int]) -> Choices | None:
        """The choices of several sequences of `lengths` tokens as one; None where a sequence has none."""
        experts = [None if part is None else part.expert_ids for part in parts]
        chosen = [{} if part is None else part.selections or {} for part in parts]
        layers = sorted({layer for selections in chosen for layer in selections})
        joined = {}
        for layer in layers:
            joined[layer] = _join([selections.get(layer) for selections in chosen], lengths)
        expert_ids = _join(experts, lengths)
        return None if expert_ids is None and not joined else Choices(expert_ids, joined or None)

    def experts_of(self, layer: int) -> Tensor | None:
        """[T, k] of one layer, or None where nothing is forced."""
        return None if self.expert_ids is None else self.expert_ids[:, layer]

    def selection_of(self, layer: int) -> Tensor | None:
        """[T, K] of one layer, or None where nothing is forced."""
        return None if self.selections is None else self.selections.get(layer)


def _join(parts: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """Parts [n, ...] end to end, free where one is missing; None when all are."""
    known = next((part for part in parts if part is not None), None)
    if known is None:
        return None
    shape = known.shape[1:]
    return torch.cat(
        [
            torch.full((length, *shape), FREE) if part is None else part
            for part, length in zip(parts, lengths, strict=True)
        ]
    )


@dataclass(slots=True)
class Capture:
    """Filled by a pass with what it chose for its new tokens, packed row after row.

    Attributes:
        selections_too: also keep the selections of index layers.
        expert_ids: [T, layers, k] int64, `FREE` in a layer that a token did not run through.
        selections: by index source layer, [T, K] int64 ascending, `FREE` at the end.
    """

    selections_too: bool = False
    expert_ids: Tensor | None = None
    selections: dict[int, Tensor] = field(default_factory=dict)

    def choices(self) -> Choices:
        """What was captured, ready to be forced."""
        return Choices(self.expert_ids, dict(self.selections) if self.selections_too else None)


def force(chosen: Tensor, forced: Tensor | None) -> Tensor:
    """[..., k] ids, with the rows of `forced` instead of a pass's own where those are not free."""
    if forced is None:
        return chosen
    return torch.where((forced == FREE).all(-1, keepdim=True), chosen, forced)


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The ids that top-k and top-p left to each of n tokens to be drawn from, ragged.

    `ids` int64 [m] holds them token after token, ascending; `offsets` int64 [n + 1] says where each token's
    begin. A token without ids was drawn from the whole vocabulary.
    """

    ids: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        kinds, shapes = {self.ids.dtype, self.offsets.dtype}, (self.ids.ndim, self.offsets.ndim)
        if kinds != {torch.int64} or shapes != (1, 1) or not len(self.offsets):
            raise ValueError(
                f"a sampling mask holds flat int64 ids and offsets, not {kinds} of {shapes} dimensions: "
                "build it with SamplingMask.of_rows"
            )
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0 or last != self.ids.shape[0] or bool((self.offsets.diff() < 0).any()):
            raise ValueError(
                f"offsets of a sampling mask rise from 0 to its {self.ids.shape[0]} ids, "
                f"these go from {first} to {last}: build it with SamplingMask.of_rows"
            )

    def __len__(self) -> int:
        return self.offsets.shape[0] - 1

    @staticmethod
    def none(tokens: int) -> SamplingMask:
        """The mask of `tokens` tokens that could have been anything."""
        return SamplingMask(torch.zeros(0, dtype=torch.int64), torch.zeros(tokens + 1, dtype=torch.int64))

    @staticmethod
    def of_rows(rows: Sequence[Sequence[int]]) -> SamplingMask:
        """The mask of tokens with these ids; an empty row stands for the whole vocabulary."""
        flat = [number for row in rows for number in row]
        offsets = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0)
        return SamplingMask(torch.tensor(flat, dtype=torch.int64), offsets)

    @staticmethod
    def join(masks: Sequence[SamplingMask]) -> SamplingMask:
        """The masks of several sequences of tokens as one."""
        counts = torch.cat([mask.offsets.diff() for mask in masks])
        ids = torch.cat([mask.ids for mask in masks])
        return SamplingMask(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))

    @staticmethod
    def of_allowed(allowed: Tensor) -> SamplingMask:
        """The mask of [n, V] bool rows; a row that allows everything holds no ids."""
        counts = allowed.sum(1)
        counts = counts.masked_fill(counts == allowed.shape[1], 0)
        ids = (allowed & (counts > 0).unsqueeze(1)).nonzero()[:, 1]
        return SamplingMask(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))

    def __getitem__(self, part: slice) -> SamplingMask:
        """The mask of consecutive tokens."""
        start, stop, step = part.indices(len(self))
        assert step == 1 and start <= stop
        offsets = self.offsets[start : stop + 1]
        return SamplingMask(self.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def take(self, tokens: Tensor) -> SamplingMask:
        """The mask of the tokens numbered `tokens` [m]."""
        counts = self.offsets.diff()[tokens]
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        within = torch.arange(int(offsets[-1]), device=counts.device)
        within = within - torch.repeat_interleave(offsets[:-1], counts)
        return SamplingMask(self.ids[torch.repeat_interleave(self.offsets[tokens], counts) + within], offsets)

    def to(self, device: torch.device) -> SamplingMask:
        """The same on `device`."""
        return SamplingMask(self.ids.to(device), self.offsets.to(device))

    def allowed(self, vocab_size: int) -> Tensor:
        """[n, V] bool: what each token could have been."""
        counts = self.offsets.diff()
        rows = torch.repeat_interleave(torch.arange(len(self), device=counts.device), counts)
        allowed = (counts == 0).unsqueeze(1).repeat(1, vocab_size)
        allowed[rows, self.ids] = True
        return allowed


LOWEST_LOGPROB = -1e30
"""Stands for -inf where it meets a probability of zero in a product."""


def entropy_of(logprobs: Tensor) -> Tensor:
    """Entropy [n] in nats of log-probabilities [n, V], which may be -inf."""
    return -(logprobs.exp() * logprobs.clamp_min(LOWEST_LOGPROB)).sum(-1)


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits [n, V] over the temperature, with the bits of a sampler that divides rows by one of their own.

    On a card the quotient by a number is a product with its inverse, so here the divisor is a tensor.
    """
    if temperature == 1:
        return logits
    return logits / torch.full((), temperature, dtype=logits.dtype, device=logits.device)


def log_softmax(x: Tensor) -> Tensor:
    """Log-softmax of rows [n, V]; the bits of a row depend on nothing but itself.

    On a card the order of a sum depends on whether its row begins at a multiple of 16 bytes: all do here.
    """
    missing = -x.shape[-1] % 4
    if not x.is_cuda or not missing:
        return torch.log_softmax(x, dim=-1)
    padded = torch.nn.functional.pad(x, (0, missing), value=-torch.inf)
    return torch.log_softmax(padded, dim=-1)[..., :-missing]


def truncated_logprobs(scaled: Tensor, mask: SamplingMask | Tensor | None) -> Tensor:
    """Log-probabilities [n, V] of scaled logits [n, V], renormalised over what `mask` allows, -inf elsewhere.

    Sampler and trainer both call this, so that their log-probabilities are the same to the last bit. `mask`
    may be the [n, V] bool of `SamplingMask.allowed`; None allows everything.
    """
    if mask is not None:
        allowed = mask.allowed(scaled.shape[1]) if isinstance(mask, SamplingMask) else mask
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    return log_softmax(scaled)
