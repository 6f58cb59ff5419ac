"""How far trainer and sampler differ, by how the sampler's context came about.

On equal weights they agree to rounding where all of a token's context was computed by the weights that
sampled it. They differ more where caches of earlier weights were kept, or were lost and computed with other
windows: so each class has its own figure, and a growing gap names its cause. Exact mode promises 0 for the
first class, and nothing for the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from model.engine.columns import ContextState
from rl.algorithms import LossInputs
from rl.trainers.data import Sample
from rl.trainers.ranks import ALONE, Ranks

NAMES = {ContextState.OWN: "own", ContextState.MIXED: "mixed", ContextState.REPLAYED: "replayed"}


class ClassGaps:
    """Gathers |log pi_trainer - log pi_sampler| of tokens that the present weights sampled, by class."""

    def __init__(self, recovered_groups: int = 0) -> None:
        self._recovered = recovered_groups
        self._gaps: list[np.ndarray] = []
        self._states: list[np.ndarray] = []

    def add(self, inputs: LossInputs, members: Sequence[Sample]) -> None:
        """Adds a micro-batch; `members` are its samples in order.

        Groups of an earlier attempt are left out: their weights may be lost and their number taken anew.
        """
        states = np.concatenate([self._states_of(sample) for sample in members])
        compared = (inputs.mask & (inputs.versions == inputs.current_version)).cpu().numpy() & (states >= 0)
        gaps = (inputs.logprobs.detach() - inputs.sampler_logprobs).abs().cpu().numpy()
        self._gaps.append(gaps[compared])
        self._states.append(states[compared])

    def summary(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Mean, maximum and number of tokens of each class that has some, of all ranks."""
        parts: list[ClassGaps] = ranks.gather(self)
        gaps = [gap for part in parts for gap in part._gaps]
        if not gaps:
            return {}
        return by_class(np.concatenate(gaps), np.concatenate([s for part in parts for s in part._states]))

    def _states_of(self, sample: Sample) -> np.ndarray:
        if sample.states is None or sample.group < self._recovered:
            return np.full(len(sample), -1, np.int8)
        return sample.states


def by_class(gaps: np.ndarray, states: np.ndarray) -> dict[str, float]:
    """Mean, maximum and number of `gaps` [n] by the class of each token, `states` [n]."""
    found: dict[str, float] = {}
    for state, name in NAMES.items():
        if (own := gaps[states == state]).size:
            figures = {"": own.mean(), ".max": own.max(), ".tokens": own.size}
            found |= {f"kl.mismatch.{name}{figure}": float(value) for figure, value in figures.items()}
    return found
