"""The shape of a policy, in the vocabulary of the published `config.json`.

Every size, schedule and limit of the network is read from here, so that a folder of weights and its
configuration are all that is needed to rebuild it. Field names are the published ones; derived facts (which
layer owns which keys) are methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class AttentionMode(StrEnum):
    """What a layer does beyond its sliding window."""

    WINDOW = "window"
    """Nothing."""
    FULL = "full"
    """Compresses its input to main keys, and selects among all of them."""
    REINDEX = "reindex"
    """Selects anew among the keys of an earlier layer."""
    REUSE = "reuse"
    """Takes keys and selection from earlier layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """YaRN: stretch the slow rotary frequencies by `factor`."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The image tower and its aligner."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_image_tokens: int
    min_pixels: int
    max_wh_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationConfig:
    """How linear weights are stored: FP8 tiles of `weight_block_size`, and experts in `expert_dtype`."""

    weight_block_size: tuple[int, int]
    expert_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Everything that fixes the shape of a policy. Names are those of the published `text_config`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    gate_temp: float
    swiglu_limit: float
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    engram_token_map: tuple[int, ...] | None
    """Compressed id of each token id. None: it belongs to the tokenizer and is set on the policy later."""
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int | None
    dtype: str
    """Of weights and activations: "float32" or "bfloat16"."""
    vision: VisionConfig | None
    quantization: QuantizationConfig | None

    def __post_init__(self) -> None:
        """Refuse shapes and schedules that cannot run."""
        from model.config_checks import check

        check(self)

    @staticmethod
    def preset(name: str) -> PolicyConfig:
        """The configuration called `name`. Raises ValueError for an unknown name and lists the known ones."""
        from model.presets import preset

        return preset(name)

    @staticmethod
    def from_published(published: dict[str, Any]) -> PolicyConfig:
        """Read a published `config.json`. Raises ValueError for a missing key or an unsupported variant."""
        from model.config_published import from_published

        return from_published(published)

    def to_published(self) -> dict[str, Any]:
        """The published `config.json` of this configuration; `from_published` is its inverse."""
        from model.config_published import to_published

        return to_published(self)

    @property
    def decoder_start(self) -> int | None:
        """The decoder's first layer: the first KV source in the upper half. None where there is none.

        All KV sources from there on compress what this layer's attention reads, the encoder's output.
        """
        half = self.num_hidden_layers // 2
        return next((source for source in sorted(self.kv_source_layer_ids) if source >= half), None)

    def ratio(self, layer: int) -> int:
        """Tokens per main key in `layer`; 0 in a pure sliding-window layer."""
        return self.compress_ratios[layer]

    def kv_owner(self, layer: int) -> int:
        """The layer whose main keys `layer` attends to."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_owner(self, layer: int) -> int:
        """The layer whose selection `layer` uses."""
        return max(source for source in self.index_source_layer_ids if source <= layer)

    def mode(self, layer: int) -> AttentionMode:
        """What `layer` does beyond its window."""
        if self.ratio(layer) == 0:
            return AttentionMode.WINDOW
        if layer in self.kv_source_layer_ids:
            return AttentionMode.FULL
        return AttentionMode.REINDEX if layer in self.index_source_layer_ids else AttentionMode.REUSE

    def uses_candidates(self, layer: int) -> bool:
        """Whether `layer` selects only inside the candidate blocks of the candidate source."""
        source = self.candidate_source_layer_id
        return (
            0 <= source < layer
            and self.mode(layer) is AttentionMode.REINDEX
            and self.kv_owner(layer) == self.kv_owner(source)
        )
