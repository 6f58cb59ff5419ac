"""Teachers: what they think of a student's samples, kept as last-layer hidden states.

Logits of a whole vocabulary are never stored. A teacher runs once over the samples that are routed to it,
and the hidden states of the trained positions are kept on the host; its head rebuilds the logits in the loss.
Only the head of the teacher at hand has to be on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.config import VisionConfig
from model.policies import AnyPolicy
from model.policy import PackedTokens, Policy
from rl.trainers.data import Sample
from rl.trainers.forward import encoded_images
from rl.trainers.hidden_store import HiddenStore
from rl.trainers.packing import micro_batches
from rl.trainers.ranks import ALONE, Ranks


class TeacherError(ValueError):
    """A teacher that is unknown, or that cannot teach this student: what, why, and what to do."""


@dataclass(frozen=True, slots=True)
class TaughtSample:
    """A sample with the hidden states of its teacher: float32 [m, d_T], one row for each trained token.

    Of several processes that train together, the one that has the sample in a micro-batch has its hidden
    states; for the others they are None.
    """

    sample: Sample
    teacher: str
    hidden: np.ndarray | None

    def __post_init__(self) -> None:
        if self.hidden is not None and len(self.hidden) != self.sample.trained_tokens:
            raise ValueError(
                f"sample {self.sample.id!r} trains {self.sample.trained_tokens} tokens, its teacher gave "
                f"{len(self.hidden)} hidden states; teach it anew"
            )


class Teachers:
    """The active teachers by name, loaded when first needed; they may be of any width, with one vocabulary.

    Args:
        vocab_size: the student's.
        token_budget: most tokens of a micro-batch.
        fake_quant: whether teachers of our own round their keys as caches store them.
        store: where hidden states wait; None keeps them in memory.
        vision: how the student's images are cut into patches; None: it sees none.
        ranks: the processes that train together; each asks the teachers about its own micro-batches only.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        token_budget: int = 8192,
        fake_quant: bool = True,
        store: HiddenStore | None = None,
        vision: VisionConfig | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self._vocab_size, self._token_budget, self._fake_quant = vocab_size, token_budget, fake_quant
        self._vision, self._ranks = vision, ranks
        self.store = store or HiddenStore(None)
        self._loaders: dict[str, Callable[[], AnyPolicy]] = {}
        self._loaded: dict[str, AnyPolicy] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The active teachers, in the order they were added."""
        return tuple(self._loaders)

    def add(self, name: str, load: Callable[[], AnyPolicy]) -> None:
        """Makes a teacher active; it replaces one of the same name. May be called while training runs."""
        self._loaders[name] = load
        self._loaded.pop(name, None)

    def remove(self, name: str) -> None:
        """Takes a teacher out; samples that it has taught already keep its hidden states, not its head."""
        self._require(name)
        del self._loaders[name]
        self._loaded.pop(name, None)

    def teach(self, samples: Sequence[Sample], route: Callable[[Sample], str]) -> list[TaughtSample]:
        """Runs each sample's teacher over it; `route` names the teacher of a sample.

        Raises:
            TeacherError: A teacher is unknown or has another vocabulary.
        """
        by_teacher: dict[str, list[int]] = {}
        for index, sample in enumerate(samples):
            by_teacher.setdefault(route(sample), []).append(index)
        out: dict[int, TaughtSample] = {}
        for name, indices in by_teacher.items():
            states = self._hidden(name, [samples[i] for i in indices])
            out |= {i: TaughtSample(samples[i], name, h) for i, h in zip(indices, states, strict=True)}
        return [out[index] for index in range(len(samples))]

    def head(self, name: str) -> Tensor:
        """The head of a teacher, [V, d_T]."""
        return self._policy(name).head.weight.detach()  # type: ignore[union-attr, return-value]

    def _hidden(self, name: str, samples: Sequence[Sample]) -> list[np.ndarray | None]:
        policy = self._policy(name)
        if any(sample.images is not None for sample in samples):
            self._require_eyes(name, policy)
        if isinstance(policy, Policy):
            policy.fake_quant = self._fake_quant
        out: list[np.ndarray | None] = [None] * len(samples)
        with torch.no_grad():
            for batch in micro_batches(samples, self._token_budget, policy.device, self._ranks):
                if batch.idle:
                    continue
                images = encoded_images(policy, batch)
                hidden = policy(PackedTokens(batch.token_ids, batch.cu_seqlens, images=images)).hidden
                positions = batch.loss_mask.nonzero()[:, 0]
                counts = torch.bincount(batch.segment_ids[positions], minlength=len(batch.indices)).tolist()
                rows = hidden[positions - 1].float().cpu().split(counts)
                for index, states in zip(batch.indices, rows, strict=True):
                    out[index] = self.store.put(states.numpy())
        return out

    def _policy(self, name: str) -> AnyPolicy:
        self._require(name)
        if name not in self._loaded:
            policy = self._loaders[name]().requires_grad_(False)
            if policy.config.vocab_size != self._vocab_size:
                size = policy.config.vocab_size
                raise TeacherError(
                    f"teacher {name!r} has {size} tokens, the student {self._vocab_size}; "
                    "choose a teacher with the student's tokenizer"
                )
            self._loaded[name] = policy
        return self._loaded[name]

    def _require_eyes(self, name: str, policy: AnyPolicy) -> None:
        """Refuses a teacher that cannot look at the student's images."""
        if _cut(policy.config.vision) != _cut(self._vision):
            raise TeacherError(
                f"teacher {name!r} does not see images as the student does, and its samples hold some: "
                "choose a teacher with the student's patches, or route these samples to another"
            )

    def _require(self, name: str) -> None:
        if name not in self._loaders:
            known = ", ".join(self._loaders) or "none"
            raise TeacherError(f"unknown teacher {name!r}; active are: {known}. Add it or correct the route")


def _cut(vision: VisionConfig | None) -> tuple[int, int] | None:
    """What decides how many tokens an image has, and which pixels are whose."""
    return None if vision is None else (vision.patch_size, vision.downsample_ratio)
