"""The policy's peer: a dense Llama of transformers with as many weights and grouped-query attention.

It runs as its users run it: bf16, SDPA's causal kernel, Liger's kernels for norm, rotation, MLP and loss when
they are installed. Without them the loss takes logits by chunks and computes them again in the backward, so
that they never lie in memory all at once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F

from benchmarks.model_gpu_times import median


def liger() -> bool:
    """Whether Liger's kernels are installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def name() -> str:
    """What the peer consists of."""
    import transformers

    extra = "with Liger's kernels and loss" if liger() else "torch loss by chunks, Liger is not installed"
    return f"Llama of transformers {transformers.__version__}, {extra}"


def dense(weights: int, vocabulary: int, width: int = 2048, layers: int = 24, device: str = "cuda") -> Any:
    """Random weights; the MLP's width makes up the number. Four query heads share a head of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads, groups = width // 128, width // 512
    attention = 2 * width * width + 2 * width * groups * 128
    inner = int((weights - 2 * vocabulary * width) / layers - attention) // (3 * width) // 64 * 64
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=128,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        dtype="bfloat16",
    )
    if liger():
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-probability of labels [T] by a head [V, d] from its input [T, d]."""
    if liger():
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return liger_fused_linear_cross_entropy(hidden, weight, labels)

    def chunk(x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy((x @ weight.T).float(), label, reduction="sum")

    parts = [
        torch.utils.checkpoint.checkpoint(chunk, x, label, use_reentrant=False)
        for x, label in zip(hidden.split(1024), labels.split(1024), strict=True)
    ]
    return torch.stack(parts).sum() / len(labels)  # pyright: ignore[reportArgumentType]


def train_step(model: Any, tokens: int) -> float:
    """Seconds of forward, loss, backward and a fused AdamW update on one document, as the policy's."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    model.train()

    def step() -> None:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        loss(hidden[:-1], model.lm_head.weight, ids[0, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return median(step, 3, 2)


@torch.no_grad()
def prefill(model: Any, tokens: int) -> float:
    """Seconds to prefill a prompt into a fresh cache, with the logits of its last token."""
    ids = torch.randint(0, model.config.vocab_size, (1, tokens), device=model.device)
    model.eval()
    return median(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), 3, 1)
