"""Small models made on the spot, Qwen3-like, dense and with experts, for our small environments.

They share the vocabulary and the chat format of our own small presets, so that a run learns in minutes on a
CPU and needs no file.
"""

from __future__ import annotations

from typing import Any

import torch

from model.hf.settings import PRESETS, HFPolicyError
from model.tokenizer import NANO_VOCAB_SIZE, nano_tokenizer

_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": NANO_VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def tiny_model(preset: str, seed: int) -> Any:
    """A model with fresh weights, the same for the same seed.

    Raises:
        HFPolicyError: There is no such preset.
    """
    if preset not in PRESETS:
        raise HFPolicyError(
            f"model.preset={preset} is no model of policy=hf: give model.path, or one of {', '.join(PRESETS)}"
        )
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(preset))


def tiny_config(preset: str) -> Any:
    """The configuration of a small model."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    tokens = nano_tokenizer().tags
    special: dict[str, Any] = {
        "pad_token_id": tokens["<pad>"],
        "bos_token_id": tokens["<bos>"],
        "eos_token_id": tokens["<end>"],
    }
    if preset == PRESETS[1]:
        return Qwen3MoeConfig(**_SHAPE, **_EXPERTS, **special)
    return Qwen3Config(**_SHAPE, **special)
