import json
import shutil
import subprocess
import sys
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
from model.config import PolicyConfig, QuantizationConfig
from model.policy import PackedTokens, Policy

ROOT = Path(__file__).parents[2]
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


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"norm.weight": "../other/model.safetensors"}}', "in the folder itself"),
        ('{"weight_map": {"norm.weight": "/etc/model.safetensors"}}', "in the folder itself"),
        ('{"weight_map": {"norm.weight": "..\\\\model.safetensors"}}', "in the folder itself"),
        ('{"weight_map": {"norm.weight": "pytorch_model.bin"}}', "nothing else is read"),
        ('{"weight_map": ["a"]}', "not an index"),
        ('{"weight_map": {"a": 3}}', "in the folder itself"),
        ("{}", "not an index"),
        ("{", "not an index"),
    ],
)
def test_an_index_leads_nowhere_else(tmp_path, index, message):
    stored_policy(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedFile, match=message):
        load_policy(tmp_path)


def test_pickles_are_not_read(tmp_path):
    file = stored_policy(tmp_path)
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(MissingTensor, match="Other formats are not read"):
        load_policy(tmp_path)
    (tmp_path / "pytorch_model.bin").rename(tmp_path / "model.safetensors")
    with pytest.raises(DamagedFile, match="cannot be read"):
        load_policy(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    file = stored_policy(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"norm.weight": torch.ones(64)}, tmp_path / "again.safetensors")
    with pytest.raises(DamagedFile, match=r"'norm.weight' stands in .*again.* and in"):
        load_policy(tmp_path)
    assert file.exists()


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_configuration_that_is_none(tmp_path, text):
    stored_policy(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedFile, match=r"config\.json"):
        load_policy(tmp_path)


def test_a_tensor_of_another_type_is_refused(tmp_path):
    for dtype in (torch.int64, torch.float8_e4m3fn):
        rewrite(stored_policy(tmp_path), lambda t, d=dtype: t.update({"norm.weight": torch.ones(64).to(d)}))
        with pytest.raises(WrongShape, match=r"norm\.weight.* is torch\."):
            load_policy(tmp_path)


def test_shared_experts_of_another_number_are_refused(three_sources, tmp_path):
    save_policy(three_sources, tmp_path)
    name = "layers.0.ffn.shared_experts.w1.weight"
    rewrite(
        tmp_path / "model-00001-of-00001.safetensors",
        lambda t: t.update({name: torch.cat([t[name], t[name][:32]])}),
    )
    with pytest.raises(WrongShape, match=r"shared_experts\.w1.*\[96, 64\].*\[64, 64\]"):
        load_policy(tmp_path)


def test_another_dtype_on_disk_and_back(nano, tmp_path):
    save_policy(nano, tmp_path, stored=replace(nano.config, dtype="bfloat16"))
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    assert stored["layers.0.attn.wq_a.weight"].dtype is torch.bfloat16
    assert stored["layers.0.hc_attn_fn"].dtype is torch.float32
    assert stored["layers.1.engram.embed.weight"].dtype is torch.float8_e4m3fn
    narrow, wide = load_policy(tmp_path), load_policy(tmp_path, dtype="float32")
    assert (narrow.config.dtype, wide.config.dtype) == ("bfloat16", "float32")
    for name, value in nano.state_dict().items():
        if "engram.embed" not in name:
            assert torch.equal(narrow.state_dict()[name], value.to(narrow.state_dict()[name].dtype))
        assert torch.equal(wide.state_dict()[name], narrow.state_dict()[name].float())
    save_policy(wide, tmp_path / "again", stored=narrow.config)
    assert same(load_policy(tmp_path / "again"), narrow)


def test_quantisation_on_disk_and_back(tmp_path):
    quantization = QuantizationConfig(weight_block_size=(32, 32), expert_dtype="fp4")
    plain = Policy(PolicyConfig.preset("nano"))
    released = replace(plain.config, dtype="bfloat16", quantization=quantization)
    save_policy(plain, tmp_path / "released", stored=released)
    policy = load_policy(tmp_path / "released")
    assert policy.config == released
    save_policy(policy, tmp_path / "plain", stored=replace(released, quantization=None))
    assert same(load_policy(tmp_path / "plain"), policy)
    save_policy(load_policy(tmp_path / "plain"), tmp_path / "again", stored=released)
    assert same(load_policy(tmp_path / "again"), policy)
    with pytest.raises(ValueError, match="another shape"):
        save_policy(plain, tmp_path / "other", stored=replace(plain.config, index_topk=4))


MEMORY = """
import sys, threading, time
from dataclasses import replace
from pathlib import Path
import torch
from model.checkpoint import load_policy, save_policy
from model.config import PolicyConfig
from model.policy import Policy

torch.set_num_threads(1)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def peak(action):
    before, highest, done = resident(), [0], threading.Event()
    def watch():
        while not done.wait(0.002):
            highest[0] = max(highest[0], resident())
    thread = threading.Thread(target=watch)
    thread.start()
    result = action()
    done.set()
    thread.join()
    return result, (highest[0] - before) / size

folder = sys.argv[1]
config = replace(PolicyConfig.preset("pico"), hidden_size=512, moe_intermediate_size=512, n_routed_experts=8)
size = 1
if sys.argv[2] == "save":
    policy = Policy(config)
    size = sum(value.nbytes for value in policy.state_dict().values())
    print(size, peak(lambda: save_policy(policy, folder))[1])
else:
    warm = Policy(PolicyConfig.preset("pico"))
    size = int(sys.argv[3])
    print(size, peak(lambda: load_policy(folder))[1])
"""


@pytest.mark.slow
def test_neither_way_holds_a_second_copy(tmp_path):
    """Peak of resident memory above the start, as a share of the policy's size."""

    def run(*arguments):
        command = [sys.executable, "-c", MEMORY, str(tmp_path), *arguments]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        return int(out[0]), float(out[1])

    size, saving = run("save")
    assert size > 150e6
    _, loading = run("load", str(size))
    assert saving < 0.15
    assert 0.9 < loading < 1.3
