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

NAMES: dict[int, str] = {
    ContextState.OWN: "own",
    ContextState.MIXED: "mixed",
    ContextState.REPLAYED: "replayed",
}


class ClassGaps:
    """Counts trained tokens by class, and of those that the present weights sampled gathers the differences.

    These are |log pi_trainer - log pi_sampler|: of earlier weights the trainer has none to compare with.
    """

    def __init__(self, recovered_groups: int = 0) -> None:
        self._recovered = recovered_groups
        self._counts = np.zeros(len(NAMES) + 1, np.int64)
        self._gaps: list[np.ndarray] = []
        self._states: list[np.ndarray] = []

    def add(self, inputs: LossInputs, members: Sequence[Sample]) -> None:
        """Adds a micro-batch; `members` are its samples in order.

        Groups of an earlier attempt are not compared: their weights may be lost and their number taken anew.
        """
        states = np.concatenate([_states_of(sample) for sample in members])
        known = np.repeat([sample.group >= self._recovered for sample in members], [*map(len, members)])
        trained = inputs.mask.cpu().numpy()
        fresh = (inputs.versions == inputs.current_version).cpu().numpy()
        compared = trained & fresh & known & (states >= 0)
        gaps = (inputs.logprobs.detach() - inputs.sampler_logprobs).abs().cpu().numpy()
        self._counts += np.bincount(states[trained] + 1, minlength=len(self._counts))
        self._gaps.append(gaps[compared])
        self._states.append(states[compared])

    def summary(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Tokens of each class, and mean, maximum and number of those compared, of all ranks."""
        parts: list[ClassGaps] = ranks.gather(self)
        gaps = [gap for part in parts for gap in part._gaps]
        if not gaps:
            return {}
        counts = np.sum([part._counts for part in parts], axis=0)
        tokens = {f"tokens.{NAMES.get(state, 'unknown')}": counts[state + 1] for state in (-1, *NAMES)}
        found = {name: float(count) for name, count in tokens.items() if count}
        states = [state for part in parts for state in part._states]
        return found | by_class(np.concatenate(gaps), np.concatenate(states))


def _states_of(sample: Sample) -> np.ndarray:
    return np.full(len(sample), -1, np.int8) if sample.states is None else sample.states


def by_class(gaps: np.ndarray, states: np.ndarray) -> dict[str, float]:
    """Mean, maximum and number of `gaps` [n] by the class of each token, `states` [n]."""
    found: dict[str, float] = {}
    for state, name in NAMES.items():
        if (own := gaps[states == state]).size:
            figures = {"": own.mean(), ".max": own.max(), ".tokens": own.size}
            found |= {f"kl.mismatch.{name}{figure}": float(value) for figure, value in figures.items()}
    return found
