import json
from dataclasses import replace
from pathlib import Path

import pytest

from model.config import AttentionMode, PolicyConfig

ORACLE = Path(__file__).parents[1] / "data/oracle"


@pytest.mark.parametrize("name", ["nano", "pico", "official"])
def test_presets_survive_the_published_form(name):
    config = PolicyConfig.preset(name)
    assert PolicyConfig.from_published(json.loads(json.dumps(config.to_published()))) == config


@pytest.mark.parametrize("name", ["clean_fp32", "quant_bf16", "quant_fp8_fp4"])
def test_reference_configurations_survive_the_published_form(name):
    published = json.loads((ORACLE / f"{name}.json").read_text())
    config = PolicyConfig.from_published(published)
    assert config.engram_token_map == tuple(published["fixture"]["token_map"])
    again = config.to_published()
    assert again["text_config"] == published["text_config"]
    assert PolicyConfig.from_published(again) == config


def test_official_schedule():
    config = PolicyConfig.preset("official")
    modes = [config.mode(layer) for layer in range(40)]
    assert [layer for layer, mode in enumerate(modes) if mode is AttentionMode.FULL] == [2, 8, 14, 20]
    assert [layer for layer, mode in enumerate(modes) if mode is AttentionMode.REINDEX] == [24, 28, 32, 36]
    assert modes.count(AttentionMode.REUSE) == 30 and modes[:2] == [AttentionMode.WINDOW] * 2
    assert config.kv_owner(19) == 14 and config.kv_owner(39) == 20
    assert config.index_owner(23) == 20 and config.index_owner(39) == 36
    assert [layer for layer in range(40) if config.uses_candidates(layer)] == [24, 28, 32, 36]


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(ValueError, match="nano, nano_draft, pico, official"):
        PolicyConfig.preset("giant")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o_groups": 3}, "o_groups"),
        ({"head_dim": 40}, "head_dim"),
        ({"index_head_dim": 48}, "index_head_dim"),
        ({"qk_rope_head_dim": 33}, "even"),
        ({"qk_rope_head_dim": 64}, "fit"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"compress_ratios": (0, 2, 2, 1, 1)}, "5 entries"),
        ({"kv_source_layer_ids": (3,)}, "no kv source"),
        ({"kv_source_layer_ids": (1,)}, "ratio"),
        ({"index_source_layer_ids": (1, 4)}, "no index source"),
        ({"index_source_layer_ids": (0, 1, 3)}, "cannot be a source"),
        ({"candidate_source_layer_id": 2}, "candidate_source_layer_id"),
        ({"o_groups": 0}, "o_groups must be at least 1"),
        ({"hc_mult": 0}, "hc_mult must be at least 1"),
        ({"index_topk": 0}, "index_topk must be at least 1"),
        ({"compress_ratios": (0, -2, -2, 1, 1, 1)}, "negative"),
        ({"kv_source_layer_ids": (1, 3, 9)}, "kv_source_layer_ids .* existing"),
        ({"index_source_layer_ids": (1, 3, 4, 9)}, "index_source_layer_ids .* existing"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
        ({"engram_num_embeddings": (434,)}, "engram_num_embeddings"),
        ({"engram_layer_ids": (1, 6)}, "existing"),
        ({"engram_token_map": (0,)}, "engram_token_map"),
        ({"engram_token_map": (64,) * 64}, "outside"),
        ({"dtype": "float16"}, "dtype"),
    ],
)
def test_contradictions_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(PolicyConfig.preset("nano"), **changes)


def _published(**text):
    published = PolicyConfig.preset("nano").to_published()
    published["text_config"] |= text
    return published


def test_a_missing_key_is_named():
    published = _published()
    del published["text_config"]["hc_mult"]
    with pytest.raises(ValueError, match="'hc_mult'"):
        PolicyConfig.from_published(published)


@pytest.mark.parametrize(
    "text", [{"scoring_func": "softmax"}, {"hidden_act": "gelu"}, {"rope_scaling": {"rope_type": "linear"}}]
)
def test_unsupported_variants_are_refused(text):
    with pytest.raises(ValueError, match="only"):
        PolicyConfig.from_published(_published(**text))
    published = _published() | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ValueError, match="quant_method"):
        PolicyConfig.from_published(published)


def test_the_other_name_of_the_pad_key_is_read():
    published = _published()
    published["text_config"]["engram_pad_id"] = published["text_config"].pop("engram_pad_token_id")
    assert PolicyConfig.from_published(published) == PolicyConfig.preset("nano")
