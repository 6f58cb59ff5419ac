"""Policies of both kinds, ours and those of `transformers`: what a folder holds decides.

A trainer or an engine that takes either says `AnyPolicy`.
"""

from __future__ import annotations

from pathlib import Path

from model.chat.base import ChatFormat
from model.checkpoint import load_policy, save_policy
from model.hf.folder import is_hf_folder, open_hf, save_hf
from model.hf.policy import HFPolicy
from model.layers.packed import ExpertStorage
from model.policy import Policy

__all__ = ["AnyPolicy", "is_hf_folder", "open_policy", "write_policy"]

AnyPolicy = Policy | HFPolicy


def open_policy(folder: Path, *, experts: ExpertStorage = "plain") -> AnyPolicy:
    """Reads a policy of either kind, in the dtype that it is stored in.

    Args:
        folder: The policy.
        experts: How routed experts of our own kind are held (`load_policy`).

    Raises:
        CheckpointError: It cannot be read.
        ValueError: Experts to be kept packed are not stored in FP4, or of the other kind.
    """
    if not is_hf_folder(folder):
        return load_policy(folder, experts=experts)
    if experts != "plain":
        raise ValueError(f"{folder} is a folder of transformers: its experts cannot be kept packed")
    return open_hf(folder)


def write_policy(policy: AnyPolicy, folder: Path, chat: ChatFormat) -> None:
    """Writes a policy of either kind; of one with adapters, these alone."""
    if isinstance(policy, HFPolicy):
        save_hf(policy, folder, chat, merge=False)
    else:
        save_policy(policy, folder, chat=chat)
