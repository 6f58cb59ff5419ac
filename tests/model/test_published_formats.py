"""Quantised checkpoints, images and the drafter, on the reference models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import MissingTensor, WrongShape, load_policy, load_weights, save_policy
from model.checkpoint_files import ShardReader
from model.config import PolicyConfig
from model.policy import PackedTokens, Policy
from model.vision import ImageTokens, TokenType, span_types

ORACLE = Path(__file__).parents[1] / "data/oracle"


def reference(stem):
    config = PolicyConfig.from_published(json.loads((ORACLE / f"{stem}.json").read_text()))
    policy = Policy(config)
    load_weights(policy, ShardReader([ORACLE / f"{stem}.safetensors"]))
    return policy


@pytest.mark.parametrize("stem", ["clean_fp32", "quant_bf16", "quant_fp8_fp4"])
def test_reference_weights_survive_saving(stem, tmp_path):
    policy = reference(stem)
    save_policy(policy, tmp_path)
    again = load_policy(tmp_path)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in policy.state_dict().items())
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    published = load_file(ORACLE / f"{stem}.safetensors")
    weights = {name for name in published if not name.startswith(("in.", "out.", "tap."))}
    assert stored.keys() == weights
    assert all(stored[name].dtype == published[name].dtype for name in weights)
    assert all(stored[name].shape == published[name].shape for name in weights)


def changed(tmp_path, change):
    policy = reference("quant_fp8_fp4")
    save_policy(policy, tmp_path)
    file = tmp_path / "model-00001-of-00001.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return tmp_path


def test_a_missing_scale_or_another_format_is_refused(tmp_path):
    folder = changed(tmp_path, lambda t: t.pop("layers.0.attn.wkv.scale"))
    with pytest.raises(MissingTensor, match=r"wkv\.scale"):
        load_policy(folder)
    name = "layers.0.ffn.experts.0.w1.weight"
    folder = changed(tmp_path, lambda t: t.update({name: torch.zeros(64, 64)}))
    with pytest.raises(WrongShape, match="fp4 rows"):
        load_policy(folder)


def test_quantised_decoding_equals_its_own_full_forward_exactly():
    policy = reference("quant_fp8_fp4")
    policy.fake_quant = True
    ids = load_file(ORACLE / "quant_fp8_fp4.safetensors")["in.ids"][:, :24]
    with torch.inference_mode():
        tokens = PackedTokens(ids.flatten(), torch.arange(3) * 24)
        whole = policy(tokens).hidden.view(2, 24, -1)
        cache = policy.new_cache(2, 24)
        slots = torch.tensor([cache.allocate(), cache.allocate()])
        policy.extend(cache, slots, ids[:, :17], torch.tensor([17, 17]))
        for at in range(17, 24):
            hidden = policy.extend(cache, slots, ids[:, at : at + 1], torch.ones(2, dtype=torch.int64))
            assert (hidden - whole[:, at]).abs().max() <= 0.02


def test_a_span_has_a_start_lines_and_an_end():
    assert span_types((4, 7), 3) == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert len(span_types((6, 9), 3)) == 2 * 4 + 2


def test_images_are_marked_and_counted_apart():
    policy = reference("clean_fp32")
    types = torch.tensor([TokenType.TEXT] * 3 + span_types((3, 6), 3) + [TokenType.TEXT] * 2)
    ids = torch.where(types >= 0, 255, torch.arange(len(types)))
    images = ImageTokens(types, policy.encode_image(torch.rand(18, 3, 4, 4) * 2 - 1, (3, 6)))
    aux = policy(PackedTokens(ids, torch.tensor([0, len(ids)]), images)).aux
    assert aux.image_expert_load.sum(1).tolist() == [10.0] * 8
    assert aux.expert_load.sum(1).tolist() == [10.0] * 8


def test_a_text_policy_refuses_images(nano):
    with pytest.raises(ValueError, match="vision_config"):
        nano.encode_image(torch.zeros(1, 3, 4, 4), (1, 1))
    images = ImageTokens(torch.tensor([-1, 0]), torch.zeros(0, 64))
    with pytest.raises(ValueError, match="vision_config"):
        nano(PackedTokens(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]), images))


def test_a_draft_window_does_not_depend_on_how_it_was_filled():
    policy = reference("clean_fp32")
    features, anchor = torch.randn(2, 21, 192), torch.tensor([5, 9])
    with torch.inference_mode():
        whole = policy.mtp.new_window(2)
        policy.mtp.observe(whole, features, fake_quant=False)
        pieces = policy.mtp.new_window(2)
        for part in features.split([4, 1, 13, 3], dim=1):
            policy.mtp.observe(pieces, part, fake_quant=False)
        ours, theirs = policy.mtp.draft(policy, whole, anchor), policy.mtp.draft(policy, pieces, anchor)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert ours.confidence.shape == (2, 3)
