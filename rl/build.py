"""Makes the parts of a run from its configuration; the one place where names become objects."""

from __future__ import annotations

from pathlib import Path

import torch

import envs.registry
from envs.base import Environment
from model.chat import ChatFormat, load_chat, nano_chat
from model.checkpoint import load_policy, save_policy
from model.config import PolicyConfig
from model.policy import Policy
from rl.launch.config import RunConfig


def policy(config: RunConfig) -> Policy:
    """Returns the policy that the run starts from: a checkpoint folder's, or a preset's fresh weights."""
    if config.model.path:
        return load_policy(Path(config.model.path))
    fresh = Policy(PolicyConfig.preset(config.model.preset))
    fresh.reset_parameters(config.run.seed)
    return fresh


def chat_format(config: RunConfig) -> ChatFormat:
    """Returns the wording that belongs to the checkpoint; presets bring the one-token tags."""
    if config.model.path:
        return load_chat(Path(config.model.path))
    return nano_chat()


def environment(config: RunConfig) -> Environment:
    """Returns the environment with its options."""
    return envs.registry.load(config.env.name, **config.env.options)


def write_policy(policy: Policy, chat: ChatFormat, folder: Path) -> None:
    """Writes a checkpoint folder that `model.path` takes: weights, configuration, tokenizer, wording."""
    save_policy(policy, folder)
    chat.save(folder)


def use_threads(count: int) -> None:
    """Sets how many cores torch uses in this process."""
    torch.set_num_threads(max(count, 1))
