from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.chat import nano_chat
from model.checkpoint import load_policy, read_config, save_policy
from model.config import PolicyConfig
from model.merge import Merged, MergeError, Source, merge_checkpoints
from model.policy import Policy


def write(folder: Path, seed: int, preset: str = "pico", **changed: object) -> Path:
    policy = Policy(replace(PolicyConfig.preset(preset), **changed))
    policy.reset_parameters(seed)
    save_policy(policy, folder, chat=nano_chat())
    return folder


def merge(out: Path, *parts: tuple[Path, float]) -> Merged:
    return merge_checkpoints([Source(folder.name, folder, weight) for folder, weight in parts], out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_is_the_weighted_average_in_its_own_type(tmp_path: Path, dtype: str) -> None:
    a, b, c = (write(tmp_path / name, seed, dtype=dtype) for seed, name in enumerate("abc"))
    merge(tmp_path / "out", (a, 0.5), (b, 0.3), (c, 0.2))
    policies = [load_policy(folder).state_dict() for folder in (a, b, c)]
    merged = load_policy(tmp_path / "out").state_dict()
    for name, value in merged.items():
        parts = [policy[name] for policy in policies]
        right = 0.5 * parts[0].double() + 0.3 * parts[1].double() + 0.2 * parts[2].double()
        assert value.dtype == parts[0].dtype
        stored_in_fp8 = dtype == "bfloat16" and "engram.embed" in name
        rounding = 2**-3 if stored_in_fp8 else torch.finfo(value.dtype).eps
        floor = 1e-3 if dtype == "bfloat16" else 1e-7
        assert torch.allclose(value.double(), right, rtol=rounding, atol=floor), name


def test_the_result_has_configuration_tokenizer_and_provenance(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    merge(tmp_path / "out", (a, 0.6), (b, 0.4))
    assert read_config(tmp_path / "out") == read_config(a)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (a / "tokenizer.json").read_bytes()
    assert [(s["name"], s["weight"]) for s in json.loads((tmp_path / "out" / "merge.json").read_text())] == [
        ("a", 0.6),
        ("b", 0.4),
    ]
    merge(tmp_path / "again", (tmp_path / "out", 0.5), (a, 0.5))


def test_a_checkpoint_averaged_with_itself_stays_the_same(tmp_path: Path) -> None:
    a = write(tmp_path / "a", 0)
    merge(tmp_path / "out", (a, 0.25), (a, 0.75))
    first, second = (load_file(next(f.glob("*.safetensors"))) for f in (a, tmp_path / "out"))
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[name], second[name], rtol=1e-6, atol=0) for name in first)


def test_quantised_checkpoints_are_averaged_in_values(tmp_path: Path) -> None:
    config = PolicyConfig.preset("nano")
    stored = replace(config, dtype="bfloat16", quantization=PolicyConfig.preset("official").quantization)
    folders = []
    for seed in (0, 1):
        policy = Policy(config)
        policy.reset_parameters(seed)
        folder = tmp_path / str(seed)
        save_policy(policy, folder, stored=stored, chat=nano_chat())
        folders.append(folder)
    merge(tmp_path / "out", (folders[0], 0.5), (folders[1], 0.5))
    a, b, merged = (load_policy(f, dtype="float32").state_dict() for f in (*folders, tmp_path / "out"))
    for name, value in merged.items():
        right = (a[name] + b[name]) / 2
        gap = (value - right).abs().max()
        assert gap <= 0.26 * right.abs().max() + 1e-6, name


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.6, 0.6), "add up to 1.2, not to 1; in proportion that would be a=0.5 b=0.5"),
        ((1.5, -0.5), "b=-0.5: each weight is a number above 0"),
        ((float("nan"), 1.0), "each weight is a number above 0"),
    ],
)
def test_weights_that_are_no_average_are_refused(tmp_path: Path, weights, message: str) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    with pytest.raises(MergeError, match=message):
        merge(tmp_path / "out", (a, weights[0]), (b, weights[1]))


def test_other_models_are_refused_by_what_differs(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1, preset="nano")
    with pytest.raises(MergeError, match=r"not of one model: .* differ in .*hidden_size"):
        merge(tmp_path / "out", (a, 0.5), (b, 0.5))


@pytest.mark.parametrize("kind", ["missing", "shape", "type", "nan"])
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, kind: str) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    file = next(b.glob("*.safetensors"))
    tensors = load_file(file)
    name = "head.weight"
    value = tensors.pop(name)
    changed = {
        "shape": value[:-1].clone(),
        "type": value.bfloat16(),
        "nan": value.index_fill(0, torch.tensor([1]), float("nan")),
    }
    save_file(tensors | ({} if kind == "missing" else {name: changed[kind]}), file)
    (b / "model.safetensors.index.json").unlink()
    with pytest.raises(MergeError, match=rf"tensor '{name}'"):
        merge(tmp_path / "out", (a, 0.5), (b, 0.5))
    assert not list(tmp_path.glob("*out*")), "nothing half written stays"


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    (b / "tokenizer.json").write_text((b / "tokenizer.json").read_text() + " ")
    with pytest.raises(MergeError, match=r"tokenizer\.json of a and b differ"):
        merge(tmp_path / "out", (a, 0.5), (b, 0.5))
    (b / "tokenizer.json").unlink()
    with pytest.raises(MergeError, match=r"only one of a and b has tokenizer\.json"):
        merge(tmp_path / "out", (a, 0.5), (b, 0.5))


def test_a_folder_that_exists_is_not_written_over(tmp_path: Path) -> None:
    a = write(tmp_path / "a", 0)
    with pytest.raises(MergeError, match="exists; give a folder that does not"):
        merge(a, (a, 0.5), (a, 0.5))


def test_it_says_which_policies_did_not_begin_as_one(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    near = load_policy(a)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std() if weight.dim() > 1 else 0)
    save_policy(near, tmp_path / "near", chat=nano_chat())
    likeness = merge(tmp_path / "out", (a, 0.4), (tmp_path / "near", 0.3), (b, 0.3)).likeness
    assert likeness["near"] == pytest.approx(1 / 1.01**0.5, abs=0.01) and abs(likeness["b"]) < 0.1
