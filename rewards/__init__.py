"""The library of rewards: verifiers by name, their composition, and the length penalty of an effort."""

from rewards.base import PartConfig, Reward, compose, list_rewards, load

__all__ = ["PartConfig", "Reward", "compose", "list_rewards", "load"]
