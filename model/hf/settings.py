"""What a policy of `transformers` is told, and what others may ask of its shape; light to import."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
PRESETS = ("hf_tiny", "hf_tiny_moe")
"""Names of small models that `model.hf.tiny` makes."""


class HFPolicyError(ValueError):
    """A model or a setting that this policy cannot honour: what, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021): W + alpha / rank * B A, of which A and B alone are trained.

    Attributes:
        rank: of the update.
        alpha: its scale, times rank.
        targets: ends of the names of the linear layers that get one; none: all of them but the head.
        seed: of the fresh A; B starts at 0.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"rank={self.rank}, alpha={self.alpha}: an adapter has rank >= 1 and alpha > 0")
        if wrong := [target for target in self.targets if not re.fullmatch(r"\w+", target)]:
            raise ValueError(f"targets are names of layers, as q_proj, not {', '.join(map(repr, wrong))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HFShape:
    """What the engine and the trainers ask of a policy's configuration.

    Attributes:
        fields: the model's own configuration; states and caches belong to policies that share it.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    fields: str = field(repr=False)
    n_routed_experts: int = 0
    num_experts_per_tok: int = 0
    num_nextn_predict_layers: int = 0
    decoder_start: None = None
    vision: None = None
    index_source_layer_ids: tuple[int, ...] = ()
    index_topk: int = 0
    sliding_window: int | None = None
    image_token_id: None = None

    def __repr__(self) -> str:
        return f"HFShape({self.fields})"

    @staticmethod
    def of(config: Any) -> HFShape:
        """The shape of a model with this configuration of `transformers`."""
        text = config.get_text_config()
        return HFShape(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_hidden_layers=text.num_hidden_layers,
            max_position_embeddings=getattr(text, "max_position_embeddings", 1 << 30),
            fields=config.to_json_string(use_diff=True),
        )
