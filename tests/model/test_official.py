"""The released configuration, without memory for its weights."""

import collections
import re

import pytest
import torch

from model.checkpoint_names import Storage, published_names, storage
from model.config import PolicyConfig
from model.policy import Policy


@pytest.fixture(scope="module")
def official():
    with torch.device("meta"):
        return Policy(PolicyConfig.preset("official"))


def kind(name):
    if "engram.embed" in name:
        return "tables"
    if name.startswith(("embed", "head")):
        return "embeddings"
    first = name.split(".")[0]
    return "vision" if first in ("vision", "aligner") or first.startswith("image_") else first


def test_parameter_counts(official):
    counts = collections.Counter()
    for name, parameter in official.named_parameters():
        counts[kind(name)] += parameter.numel()
    billions = {name: count / 1e9 for name, count in counts.items()}
    assert billions["tables"] == pytest.approx(2 * 98.3, rel=1e-3)
    assert billions["embeddings"] == pytest.approx(1.324, rel=1e-3)
    assert billions["layers"] == pytest.approx(550.6, rel=1e-3)
    assert billions["mtp"] == pytest.approx(14.2, rel=1e-2)
    assert sum(billions.values()) == pytest.approx(763, rel=1e-3)


def test_the_published_tensors_are_exactly_accounted_for(official):
    names = published_names(official.state_dict(), official.config)
    assert len(names) == 96_085
    patterns = {re.sub(r"\d+", "#", name) for name in names}
    assert {
        "layers.#.attn.indexer.wq_b.scale",
        "layers.#.engram.embed.scale",
        "mtp.#.markov_head.head.weight",
        "mtp.#.confidence_head.proj.weight",
        "vision.blocks.#.attn.wqkv.bias",
        "aligner.w#.bias",
        "image_newline",
        "layers.#.ffn.gate.bias_vl",
    } <= patterns
    assert "layers.20.attn.compressor.wgate.weight" not in names
    assert {name for name in names if ".compressor.wgate" in name} == {
        f"layers.{layer}.attn.compressor.wgate.weight" for layer in (2, 8, 14)
    }


def test_storage_formats(official):
    config = official.config
    assert storage("layers.3.ffn.experts.7.w1.weight", config) is Storage.FP4_ROWS
    assert storage("mtp.0.main_proj.weight", config) is Storage.FP8_TILES
    assert storage("layers.1.engram.embed.weight", config) is Storage.FP8_ROWS
    for name in ("layers.2.attn.compressor.wkv.weight", "layers.2.attn.indexer.wk.weight", "head.weight"):
        assert storage(name, config) is Storage.PLAIN
