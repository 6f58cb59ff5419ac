"""Between the published `config.json` and `PolicyConfig`, both ways and without loss."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from typing import Any

from model.config import PolicyConfig, QuantizationConfig, RopeScaling, VisionConfig

_FIXED = {
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
"""Keys of `text_config` of which this implementation knows one value only."""
_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype")
_NESTED = ("rope_scaling", "vision", "quantization", "engram_token_map", "image_token_id")
_TOKEN_MAP = "engram_token_map"


def _pick(section: dict[str, Any], key: str, where: str) -> Any:
    if key not in section:
        raise ValueError(f"{where} has no key {key!r}: complete the configuration file")
    value = section[key]
    return tuple(value) if isinstance(value, list) else value


def _subset(kind: type, section: dict[str, Any], where: str) -> Any:
    names = [field.name for field in fields(kind) if field.default is MISSING]
    return kind(**{name: _pick(section, name, where) for name in names})


def _text_names() -> list[str]:
    return [field.name for field in fields(PolicyConfig) if field.name not in _TOP_LEVEL + _NESTED]


def from_published(published: dict[str, Any]) -> PolicyConfig:
    """Read a published configuration. The token map stands in `engram_token_map` or `fixture.token_map`.

    Raises:
        ValueError: a key is missing, or has a value this implementation does not know.
    """
    text = dict(_pick(published, "text_config", "the configuration"))
    if "engram_pad_id" in text:
        text.setdefault("engram_pad_token_id", text["engram_pad_id"])
    for key, value in _FIXED.items():
        if text.get(key, value) != value:
            raise ValueError(f"text_config.{key} is {text[key]!r}; only {value!r} is implemented")
    values = {name: _pick(text, name, "text_config") for name in _text_names()}
    values |= {name: _pick(published, name, "the configuration") for name in _TOP_LEVEL}
    token_map = published.get(_TOKEN_MAP) or published.get("fixture", {}).get("token_map")
    return PolicyConfig(
        **values,
        rope_scaling=_rope_scaling(text),
        image_token_id=published.get("image_token_id"),
        engram_token_map=tuple(token_map) if token_map else None,
        vision=_vision(published),
        quantization=_quantization(published),
    )


def _rope_scaling(text: dict[str, Any]) -> RopeScaling | None:
    scaling = _pick(text, "rope_scaling", "text_config")
    if scaling is None:
        return None
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"text_config.rope_scaling.rope_type is {kind!r}; only 'yarn' is implemented")
    return _subset(RopeScaling, scaling, "text_config.rope_scaling")


def _vision(published: dict[str, Any]) -> VisionConfig | None:
    section = published.get("vision_config")
    return None if section is None else _subset(VisionConfig, section, "vision_config")


def _quantization(published: dict[str, Any]) -> QuantizationConfig | None:
    section = published.get("quantization_config")
    if section is None:
        return None
    for key, value in {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}.items():
        if section.get(key) != value:
            raise ValueError(
                f"quantization_config.{key} is {section.get(key)!r}; only {value!r} is implemented"
            )
    return _subset(QuantizationConfig, section, "quantization_config")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def to_published(config: PolicyConfig) -> dict[str, Any]:
    """The published form: `from_published(to_published(config)) == config`."""
    text: dict[str, Any] = {"model_type": "deepseek_v41_text"} | _FIXED
    text |= {name: _plain(getattr(config, name)) for name in _text_names()}
    scaling = config.rope_scaling
    text["rope_scaling"] = None if scaling is None else {"rope_type": "yarn"} | asdict(scaling)
    published: dict[str, Any] = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41"}
    published |= {name: getattr(config, name) for name in _TOP_LEVEL}
    published["text_config"] = text
    if config.image_token_id is not None:
        published["image_token_id"] = config.image_token_id
    if config.engram_token_map is not None:
        published[_TOKEN_MAP] = list(config.engram_token_map)
    if config.vision is not None:
        published["vision_config"] = {"model_type": "deepseek_v41_vision"} | asdict(config.vision)
    if config.quantization is not None:
        published["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": list(config.quantization.weight_block_size),
            "expert_dtype": config.quantization.expert_dtype,
        }
    return published
