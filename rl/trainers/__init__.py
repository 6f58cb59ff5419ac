"""Trainers: from samples to one optimiser step, for imitation (SFT) and for reinforcement learning."""

from rl.trainers.data import Sample, demonstration_samples, trajectory_samples
from rl.trainers.optim import OptimizerConfig
from rl.trainers.rl import RLConfig, RLTrainer
from rl.trainers.sft import SFTConfig, SFTTrainer

__all__ = [
    "OptimizerConfig",
    "RLConfig",
    "RLTrainer",
    "SFTConfig",
    "SFTTrainer",
    "Sample",
    "demonstration_samples",
    "trajectory_samples",
]
