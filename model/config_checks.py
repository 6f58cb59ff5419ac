"""Rules a configuration must keep, checked once at construction so that the layers need not ask again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.config import PolicyConfig


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(f"this policy configuration cannot run: {message}")


def check(config: PolicyConfig) -> None:
    """Raise ValueError, naming the key to change, when the configuration contradicts itself."""
    _check_sizes(config)
    _check_schedule(config)
    _check_engram(config)


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "o_groups",
    "q_lora_rank",
    "o_lora_rank",
    "index_n_heads",
    "index_topk",
    "moe_intermediate_size",
    "hc_mult",
)


def _check_sizes(config: PolicyConfig) -> None:
    for name in _POSITIVE:
        _require(getattr(config, name) >= 1, f"{name} must be at least 1, not {getattr(config, name)}")
    heads, groups = config.num_attention_heads, config.o_groups
    _require(heads % groups == 0, f"num_attention_heads {heads} must be a multiple of o_groups {groups}")
    rope = config.qk_rope_head_dim
    _require(rope % 2 == 0, f"qk_rope_head_dim {rope} must be even")
    _require(
        rope <= min(config.head_dim, config.index_head_dim),
        f"qk_rope_head_dim {rope} must fit into head_dim {config.head_dim} and "
        f"index_head_dim {config.index_head_dim}",
    )
    width = config.head_dim
    _require(
        width == 16 or width % 32 == 0,
        f"head_dim {width} must be 16 or a multiple of 32 (blocks of the caches)",
    )
    _require(
        config.index_head_dim % 32 == 0,
        f"index_head_dim {config.index_head_dim} must be a multiple of 32 (FP4 blocks)",
    )
    _require(
        0 < config.num_experts_per_tok <= config.n_routed_experts,
        f"num_experts_per_tok {config.num_experts_per_tok} must be 1 .. {config.n_routed_experts} "
        "(n_routed_experts)",
    )
    _require(config.sliding_window >= 1, "sliding_window must be at least 1 (the token itself)")
    _require(config.hc_sinkhorn_iters >= 1, "hc_sinkhorn_iters must be at least 1")
    _require(
        config.dtype in ("float32", "bfloat16"), f"dtype {config.dtype!r} must be 'float32' or 'bfloat16'"
    )


def _check_schedule(config: PolicyConfig) -> None:
    layers, drafters = config.num_hidden_layers, config.num_nextn_predict_layers
    _require(
        len(config.compress_ratios) == layers + drafters,
        f"compress_ratios has {len(config.compress_ratios)} entries for {layers} layers and {drafters} "
        "drafter blocks",
    )
    _require(not any(config.compress_ratios[layers:]), "compress_ratios of drafter blocks must be 0")
    _require(
        min(config.compress_ratios) >= 0, f"compress_ratios {config.compress_ratios} must not be negative"
    )
    for name in ("kv_source_layer_ids", "index_source_layer_ids"):
        sources = getattr(config, name)
        _require(
            all(0 <= source < layers for source in sources), f"{name} {sources} must name existing layers"
        )
    for layer, ratio in enumerate(config.compress_ratios[:layers]):
        if ratio == 0:
            sources = (*config.kv_source_layer_ids, *config.index_source_layer_ids)
            _require(layer not in sources, f"layer {layer} has compress ratio 0 and so cannot be a source")
            continue
        _check_owners(config, layer, ratio)
    source = config.candidate_source_layer_id
    _require(
        source < 0 or source in config.index_source_layer_ids,
        f"candidate_source_layer_id {source} must be one of index_source_layer_ids",
    )
    if source >= 0:
        _require(config.candidate_topk_blocks >= 1, "candidate_topk_blocks must be at least 1")
        _require(config.candidate_block_size >= 1, "candidate_block_size must be at least 1")


def _check_owners(config: PolicyConfig, layer: int, ratio: int) -> None:
    kv_owners = [source for source in config.kv_source_layer_ids if source <= layer]
    _require(bool(kv_owners), f"layer {layer} has compress ratio {ratio} but no kv source at or before it")
    owner = max(kv_owners)
    _require(
        config.ratio(owner) == ratio,
        f"layer {layer} (ratio {ratio}) would read the keys of layer {owner} (ratio {config.ratio(owner)})",
    )
    index_owners = [source for source in config.index_source_layer_ids if owner <= source <= layer]
    _require(
        bool(index_owners), f"layer {layer} has no index source between its kv source {owner} and itself"
    )


def _check_engram(config: PolicyConfig) -> None:
    layers = config.engram_layer_ids
    _require(
        len(layers) == len(config.engram_num_embeddings),
        "engram_num_embeddings must have one entry for each of engram_layer_ids",
    )
    _require(
        all(0 <= layer < config.num_hidden_layers for layer in layers),
        f"engram_layer_ids {layers} must name existing layers",
    )
    size = config.engram_max_ngram_size
    _require(not layers or size >= 2, f"engram_max_ngram_size {size} must be at least 2 (one token before)")
    token_map = config.engram_token_map
    if token_map is None or not layers:
        return
    _require(
        len(token_map) == config.vocab_size,
        f"engram_token_map has {len(token_map)} entries for a vocabulary of {config.vocab_size}",
    )
    _require(
        min(token_map) >= 0 and max(token_map) < config.engram_compressed_vocab_size,
        "engram_token_map holds ids outside 0..engram_compressed_vocab_size - 1",
    )
