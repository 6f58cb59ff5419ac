"""What a worker is told to do: one sample, its task, how to sample, and from which seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from envs.types import Task, TrajectoryKey
from model.engine.sampler import SamplingParams


class Purpose(StrEnum):
    """Why a sample is drawn. Only training samples enter the token log."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One sample to run. `seed` is the run's; the worker sets `sampling`'s seed and stop ids each turn."""

    key: TrajectoryKey
    task: Task
    environment: str
    sampling: SamplingParams
    seed: int
    purpose: Purpose = Purpose.TRAIN

    @property
    def session(self) -> str:
        """The name of this attempt towards the engine and the log, unique within a run and purpose."""
        key = self.key
        return (
            f"{self.purpose}/{key.task}/e{key.effort}/{key.scaffold}/g{key.group}/i{key.index}/a{key.attempt}"
        )


def request_seed(seed: int, group: int, index: int, turn: int) -> int:
    """Returns the 63-bit seed of one turn's draws: a stable hash, the same on every machine and run.

    The attempt is not part of it: a sample that is run again after a fault of the infrastructure draws the
    same tokens, so that faults do not select among samples.
    """
    text = f"{seed}/{group}/{index}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
