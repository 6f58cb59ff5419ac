import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import (
    CheckpointError,
    DamagedFile,
    MissingTensor,
    UnexpectedTensor,
    WrongShape,
    load_policy,
    save_policy,
)
from model.config import PolicyConfig
from model.policy import PackedTokens, Policy

TOKENS = PackedTokens(torch.arange(40), torch.tensor([0, 25, 40]))


def same(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", ["nano", "three_sources"])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_a_saved_policy_is_the_same_after_loading(request, tmp_path, name, shard_bytes):
    policy = request.getfixturevalue(name)
    policy.update_balance(torch.rand(policy.config.num_hidden_layers, policy.config.n_routed_experts))
    save_policy(policy, tmp_path, shard_bytes=shard_bytes)
    again = load_policy(tmp_path)
    assert again.config == policy.config and same(policy, again)
    assert torch.equal(policy(TOKENS).hidden, again(TOKENS).hidden)
    assert len(list(tmp_path.glob("*.safetensors"))) == (
        1 if shard_bytes > 1 << 20 else len(set(_index(tmp_path).values()))
    )


def _index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_published_names(nano, tmp_path):
    save_policy(nano, tmp_path)
    names = set(_index(tmp_path))
    assert {
        "embed.weight",
        "head.weight",
        "layers.1.attn.compressor.wgate.weight",
        "layers.3.attn.indexer.k_norm.weight",
        "layers.0.hc_attn_fn",
        "layers.0.ffn.experts.3.w2.weight",
        "layers.0.ffn.shared_experts.w3.weight",
        "layers.5.ffn.gate.bias_vl",
        "layers.2.engram.embed.weight",
    } <= names
    assert "layers.3.attn.compressor.wgate.weight" not in names
    assert not any("w13" in name or "hc_attn." in name for name in names)


def test_two_shared_experts_are_published_side_by_side(three_sources, tmp_path):
    save_policy(three_sources, tmp_path)
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert stored["layers.0.ffn.shared_experts.w1.weight"].shape == (64, 64)
    w2 = three_sources.blocks[0].ffn.w2
    assert torch.equal(stored["layers.0.ffn.shared_experts.w2.weight"], torch.cat([w2[5], w2[6]], 1))


def stored_policy(tmp_path):
    save_policy(Policy(PolicyConfig.preset("nano")), tmp_path)
    return tmp_path / "model-00001-of-00001.safetensors"


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("norm.weight"), MissingTensor, "norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), UnexpectedTensor, "extra"),
        (lambda t: t.update({"norm.weight": torch.ones(65)}), WrongShape, r"\[65\].*\[64\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, error, message):
    rewrite(stored_policy(tmp_path), change)
    with pytest.raises(error, match=message):
        load_policy(tmp_path)


def test_a_damaged_or_absent_file_is_refused(tmp_path):
    file = stored_policy(tmp_path)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DamagedFile, match="cannot be read"):
        load_policy(tmp_path)
    file.unlink()
    with pytest.raises(MissingTensor, match="lacks 1 shards"):
        load_policy(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(MissingTensor, match="holds no"):
        load_policy(tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_policy(tmp_path)


def test_equal_seeds_give_equal_weights():
    policy = Policy(PolicyConfig.preset("pico"))
    first = {name: value.clone() for name, value in policy.state_dict().items()}
    policy.reset_parameters(1)
    assert not torch.equal(first["head.weight"], policy.head.weight)
    policy.reset_parameters(0)
    assert all(torch.equal(first[name], value) for name, value in policy.state_dict().items())


def test_preset_sizes():
    assert sum(p.numel() for p in Policy(PolicyConfig.preset("nano")).parameters()) == pytest.approx(
        5.5e5, rel=0.1
    )
    assert sum(p.numel() for p in Policy(PolicyConfig.preset("pico")).parameters()) == pytest.approx(
        2.5e5, rel=0.1
    )


def test_an_engram_without_a_token_map_says_what_to_set():
    policy = Policy(replace(PolicyConfig.preset("nano"), engram_token_map=None))
    with pytest.raises(ValueError, match="token_map"):
        policy(TOKENS)


@pytest.mark.parametrize("bounds", [[0, 39], [1, 40], [0, 20, 20, 40], [0]])
def test_bounds_that_do_not_cover_the_tokens_are_refused(nano, bounds):
    with pytest.raises(ValueError, match="cu_seqlens"):
        nano(PackedTokens(torch.arange(40), torch.tensor(bounds)))
