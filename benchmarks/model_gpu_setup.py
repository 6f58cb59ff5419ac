"""The policy of the model-level benchmarks on a GPU: official attention widths, 12 layers, 1.9 B weights.

Weights are random and heavy-tailed: one in a thousand is eight times larger, as in trained matrices.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from model.cache.policy_cache import PolicyCache
from model.cache.progress import Progress
from model.cache.record_rows import RecordRows
from model.config import PolicyConfig
from model.initialization import initialize
from model.layers.engram_hash import bucket_primes
from model.layers.moe import Router
from model.ops.pack_keys import pack_keys
from model.ops.packed_experts import Stack
from model.policy import Policy
from model.quant.weights import as_words, encode_fp4

MAIN, INDEX = "main", "index"


def configuration() -> PolicyConfig:
    """Every layer kind at official attention widths: window, Full (m = 2 and 1), Reuse, Reindex, memory."""
    shape = _shape()
    rows = tuple(sum(map(sum, layer)) for layer in bucket_primes(shape))
    return replace(shape, engram_num_embeddings=rows)


def _shape() -> PolicyConfig:
    return replace(
        PolicyConfig.preset("official"),
        vocab_size=32768,
        hidden_size=2048,
        num_hidden_layers=12,
        compress_ratios=(0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
        kv_source_layer_ids=(1, 3, 5, 6),
        index_source_layer_ids=(1, 3, 5, 6, 8, 10),
        candidate_source_layer_id=6,
        n_routed_experts=12,
        num_experts_per_tok=4,
        moe_intermediate_size=512,
        engram_layer_ids=(1,),
        engram_num_embeddings=(0,),
        engram_vocab_size=4000,
        engram_compressed_vocab_size=32768,
        engram_token_map=tuple(range(32768)),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        dspark_block_size=0,
        image_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        vision=None,
        quantization=None,
    )


def official_widths(layers: int = 12, experts: int = 384) -> PolicyConfig:
    """Every width as published; layers of every kind; an n-gram memory of 0.2 million rows a prime.

    Args:
        layers: 12, or 6 for a shorter policy with every kind of layer.
        experts: routed ones of a layer, published 384.
    """
    half = layers // 2
    if layers not in (6, 12):
        raise ValueError(f"there are schedules of 6 and of 12 layers, not of {layers}")
    shape = replace(
        PolicyConfig.preset("official"),
        num_hidden_layers=layers,
        compress_ratios=(0, *(2,) * (half - 1), *(1,) * half),
        kv_source_layer_ids=(1, 3) if layers == 6 else (1, 3, 5, 6),
        index_source_layer_ids=(1, 3, 4) if layers == 6 else (1, 3, 5, 6, 8, 10),
        candidate_source_layer_id=half,
        n_routed_experts=experts,
        engram_layer_ids=(1,),
        engram_num_embeddings=(0,),
        engram_vocab_size=200_000,
        engram_compressed_vocab_size=129280,
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        dspark_block_size=0,
        image_token_id=None,
        vision=None,
        quantization=None,
    )
    return replace(shape, engram_num_embeddings=tuple(sum(map(sum, each)) for each in bucket_primes(shape)))


@torch.no_grad()
def policy_on_gpu(config: PolicyConfig | None = None, seed: int = 0, *, packed: bool = False) -> Policy:
    """Made on the device: drawing two billion numbers on the host would take a minute.

    Args:
        config: its shape; None: `configuration()`.
        seed: of the weights.
        packed: hold routed experts in FP4; they are drawn and packed a few at a time.
    """
    with torch.device("meta"):
        policy = Policy(configuration() if config is None else config)
        if packed:
            policy.pack_experts()
    torch.manual_seed(seed)
    for module in policy.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.zeros_like(parameter, device="cuda"))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = (
                    torch.zeros_like(buffer, device="cuda") if buffer.is_meta else buffer.to("cuda")
                )
        if isinstance(module, Router):
            module.bias.zero_()
    initialize(policy, seed, draw=_heavy_tailed)
    for block in policy.blocks:
        if block.ffn.packed is not None:
            _draw_packed(block.ffn.packed.w13, 1.0)
            _draw_packed(block.ffn.packed.w2, 0.3)
    policy.token_map = torch.arange(policy.config.vocab_size, device="cuda")
    policy.fake_quant = True
    return policy.eval()


def _heavy_tailed(tensor: Tensor, std: float) -> None:
    flat = tensor.view(-1)
    flat.normal_(0, std)
    flat[::1009] *= 8


def _draw_packed(stack: Stack, gain: float, at_once: int = 4, drawn_ones: int = 48) -> None:
    """Heavy-tailed matrices with the gains that `initialize` gives them, packed `at_once` at a time.

    The first `drawn_ones` are drawn; the others are these with their rows in another order.
    """
    _, rows, columns = stack.shape
    std = gain * columns**-0.5
    _heavy_tailed(stack.plain, std)
    drawn = torch.empty((at_once * rows, columns), device=stack.codes.device)
    first = stack.codes[:drawn_ones].split(at_once), stack.scales[:drawn_ones].split(at_once)
    for codes, scales in zip(*first, strict=True):
        part = drawn[: len(codes) * rows]
        _heavy_tailed(part, std)
        packed, scale = encode_fp4(part)
        codes.copy_(as_words(packed).view_as(codes))
        scales.copy_(scale.view_as(scales))
    for begin in range(drawn_ones, len(stack.codes), drawn_ones):
        for each in (stack.codes, stack.scales):
            target = each[begin : begin + drawn_ones]
            target.copy_(each[: len(target)].roll(37 * begin, 1))


def cache_of(policy: Policy, sequences: int, tokens: int) -> PolicyCache:
    """A packed cache with room for `tokens` more than a multiple of 64."""
    return policy.new_cache(sequences, tokens + 64, storage="packed")


@torch.no_grad()
def fill(policy: Policy, cache: PolicyCache, sequences: int, tokens: int) -> list[int]:
    """Slots with `tokens` random keys each, as if their prompts had been run."""
    slots = [
        cache.take_over(Progress(tokens, tokens, tokens, 0, max(tokens - 128, 0), tokens, tokens))
        for _ in range(sequences)
    ]
    width, narrow = policy.config.head_dim, policy.config.index_head_dim
    for layer in policy.config.kv_source_layer_ids:
        for storage, channels, kind in ((cache.main, width, MAIN), (cache.index_keys, narrow, INDEX)):
            held = storage[layer]
            assert isinstance(held, RecordRows)
            draw = torch.randn(1 << 16, channels, device="cuda", dtype=torch.bfloat16)
            records = pack_keys(kind, draw)[1]
            for part in held.records.split(1 << 16):
                part.copy_(records[: len(part)].roll(layer, 0))
    rings = cache.windows.storage
    draw = torch.randn(rings.shape[1] * rings.shape[2], width, device="cuda", dtype=torch.bfloat16)
    for layer in range(len(rings)):
        rings[layer] = pack_keys("window", draw.roll(layer, 0))[1].view_as(rings[layer])
    return slots
