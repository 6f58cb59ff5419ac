"""Settings of the other way to learn: those of a distillation without teachers, those of RL with some.

A run distils or reinforces. What only the other one reads would do nothing, so a value for it is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rl.algorithms import AlgorithmConfig
from rl.trainers.opd import OPDConfig
from rl.trainers.rl import RLConfig

_TRAINER_OF_BOTH = {"steps", "temperature", "fake_quant", "parallel", "replay_choices", "scales_every"}
_ALGORITHM_OF_BOTH = {"group_size", "advantage"}  # an estimator that compares nothing allows groups of one
_OPD_OF_THE_SAMPLER = {"temperature", "fake_quant"}


def inert_settings(
    opd: OPDConfig, trainer: RLConfig, algorithm: AlgorithmConfig, length_penalty: object
) -> list[str]:
    """Names what was set and is read by nobody, as the user wrote it."""
    if not opd.teachers:
        return [f"opd.{name}" for name in _changed(opd, OPDConfig()) if name not in _OPD_OF_THE_SAMPLER]
    found = [f"trainer.{name}" for name in _changed(trainer, RLConfig()) if name not in _TRAINER_OF_BOTH]
    found += [
        f"algorithm.{name}"
        for name in _changed(algorithm, AlgorithmConfig())
        if name not in _ALGORITHM_OF_BOTH
    ]
    return found + (["effort.length_penalty"] if length_penalty is not None else [])


def refuse_inert(
    opd: OPDConfig, trainer: RLConfig, algorithm: AlgorithmConfig, length_penalty: object
) -> None:
    """Refuses settings that do nothing in this run.

    Raises:
        ValueError: There are some.
    """
    found = inert_settings(opd, trainer, algorithm, length_penalty)
    if not found:
        return
    if opd.teachers:
        raise ValueError(
            f"{', '.join(found)}: no effect with opd.teachers, for a distillation has no rewards to weigh "
            "and an optimiser of its own; leave them out, and set opd.* instead"
        )
    raise ValueError(f"{', '.join(found)}: no effect without opd.teachers; name a teacher, or leave them out")


def _changed(own: Any, default: Any) -> Iterator[str]:
    for field in fields(own):
        if getattr(own, field.name) != getattr(default, field.name):
            yield field.name
