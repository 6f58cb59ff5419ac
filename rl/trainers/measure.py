"""The training metrics of one step, gathered over its micro-batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from rl.algorithms import LossInputs, Objective
from rl.trainers.ranks import ALONE, Ranks

MISMATCH_BOUND = 1e-3
"""Sampler and trainer are said to disagree on a token beyond this difference of log-probabilities."""


class Measures:
    """Sums and extremes over the trained tokens of a batch."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._tokens = 0
        self._loss = 0.0
        self._max = {"ratio.max": 0.0, "staleness.max": 0.0}
        self._mismatch: list[np.ndarray] = []

    def add(self, inputs: LossInputs, part: Objective, fresh: np.ndarray) -> None:
        """Adds a micro-batch; `fresh` [segments] says which sequences the present weights sampled."""
        mask = inputs.mask
        ratio = inputs.log_ratio().detach().exp()[mask]
        staleness = (inputs.current_version - inputs.versions[mask]).float()
        sums = {**part.sums, "ratio.mean": ratio.sum(), "staleness.mean": staleness.sum()}
        if inputs.entropy is not None:
            sums["entropy"] = inputs.masked(inputs.entropy.detach()).sum()
        for name, value in sums.items():
            self._sums[name] += value.item()  # type: ignore[assignment]
        for name, values in (("ratio.max", ratio), ("staleness.max", staleness)):
            self._max[name] = max(self._max[name], values.max().item() if len(values) else 0.0)
        self._loss += part.loss.item()
        self._tokens += int(mask.sum())
        self._mismatch.append(_difference(inputs, fresh))

    def summary(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """Means over tokens and extremes, of all ranks; nothing on the mismatch when nothing was fresh."""
        parts: list[Measures] = ranks.gather(self)
        tokens = sum(part._tokens for part in parts)
        if not tokens:
            return {"loss": 0.0}
        names = sorted({name for part in parts for name in part._sums})
        means = {name: sum(part._sums[name] for part in parts) / tokens for name in names}
        extremes = {name: max(part._max[name] for part in parts) for name in self._max}
        gaps = [gap for part in parts for gap in part._mismatch]
        return {
            "loss": sum(part._loss for part in parts),
            **means,
            **extremes,
            **mismatch_metrics(np.concatenate(gaps)),
        }


def mismatch_metrics(differences: np.ndarray) -> dict[str, float]:
    """Statistics of |log pi_trainer - log pi_sampler| over tokens sampled by the very weights compared."""
    if not len(differences):
        return {}
    return {
        "kl.mismatch": float(differences.mean()),
        "kl.mismatch.median": float(np.median(differences)),
        "kl.mismatch.max": float(differences.max()),
        "kl.mismatch.share": float((differences > MISMATCH_BOUND).mean()),
        "kl.mismatch.tokens": float(len(differences)),
    }


def _difference(inputs: LossInputs, fresh: np.ndarray) -> np.ndarray:
    selected: Tensor = torch.from_numpy(fresh).to(inputs.mask.device)[inputs.segment_ids] & inputs.mask
    return (inputs.logprobs.detach() - inputs.sampler_logprobs)[selected].abs().cpu().numpy()
