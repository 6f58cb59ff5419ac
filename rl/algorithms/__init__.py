"""Algorithms as small pure functions: from rewards to advantages, from log-probabilities to a loss.

`AlgorithmConfig` chooses them by name or import path; `advantages.compute` and `objective` apply them. An
algorithm is one function in one file, one line of registration and one YAML file.
"""

from rl.algorithms.config import AlgorithmConfig
from rl.algorithms.objective import Objective, objective
from rl.algorithms.records import LossInputs, LossOutputs
from rl.algorithms.registry import AlgorithmError

__all__ = ["AlgorithmConfig", "AlgorithmError", "LossInputs", "LossOutputs", "Objective", "objective"]
