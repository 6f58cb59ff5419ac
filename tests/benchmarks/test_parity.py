"""The check itself: what it finds, and that whatever is wrong with a folder is a failure with a name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.parity import Folder, main

ORACLE = Path(__file__).parents[1] / "data/oracle"


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def check(folder, *, text_only=False):
    """Passed, total and the failures' names and details."""
    cases = list(Folder(folder, text_only).cases())
    failed = [f"{case.name}: {case.detail}" for case in cases if not case.passed]
    return len(cases) - len(failed), len(cases), failed


def copied(tmp_path, *names):
    for name in names:
        shutil.copyfile(ORACLE / name, tmp_path / name)
    return tmp_path


def model(tmp_path, stem):
    return copied(tmp_path, f"{stem}.json", f"{stem}.safetensors")


def change(file, name, by=1e-2):
    tensors = load_file(file)
    tensors[name] = (tensors[name].float() + by).to(tensors[name].dtype)
    save_file(tensors, file)


@pytest.mark.parametrize("stem", ["quant_bf16", "quant_fp8_fp4"])
@pytest.mark.parametrize(
    "name",
    [
        "layers.3.attn.attn_sink",
        "layers.5.ffn.gate.weight",
        "norm.weight",
        "tap.layers.2.streams",
        "tap.layers.4.main_kv",
        "tap.layers.4.index_scores",
        "tap.layers.6.router_weights",
        "out.logits",
        "out.main_hidden",
    ],
)
def test_a_changed_tensor_of_a_quantised_model_is_noticed(tmp_path, stem, name):
    folder = model(tmp_path, stem)
    change(folder / f"{stem}.safetensors", name)
    assert check(folder)[2]


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("decode", "clean_fp32.prefill17.logits"),
        ("dspark", "in.main_hidden"),
        ("dspark", "out.confidence"),
        ("image", "out.image1.aligner"),
        ("image", "in.image0.patches"),
        ("image", "out.logits"),
    ],
)
def test_a_changed_tensor_of_a_further_file_is_noticed(tmp_path, stem, name):
    folder = copied(model(tmp_path, "clean_fp32"), f"{stem}.safetensors")
    tensors = load_file(folder / f"{stem}.safetensors")
    save_file(
        {key: value for key, value in tensors.items() if "quant" not in key}, folder / f"{stem}.safetensors"
    )
    assert not check(folder)[2]
    change(folder / f"{stem}.safetensors", name)
    failed = check(folder)[2]
    assert failed and all(stem in line for line in failed)


def test_a_changed_decode_of_a_quantised_model_is_noticed(tmp_path):
    folder = model(tmp_path, "quant_bf16")
    key = "quant_bf16.prefill17.logits"
    save_file({key: load_file(ORACLE / "decode.safetensors")[key]}, folder / "decode.safetensors")
    assert not check(folder)[2]
    change(folder / "decode.safetensors", key)
    assert [line.split(":")[0] for line in check(folder)[2]] == [f"decode {key}"]


@pytest.mark.parametrize(
    ("stem", "pattern", "replacement"),
    [
        ("formats", r'"scale_byte": ?(\d+)', lambda m: f'"scale_byte": {int(m[1]) ^ 1}'),
        ("mhc", r'"pre": ?\[\s*"0x1\.', lambda m: m[0][:-2] + "2."),
        ("rope", r'"freqs": ?\[\s*"0x1\.', lambda m: m[0][:-2] + "2."),
        ("engram", r'"primes": ?\[+\s*(\d+)', lambda m: m[0] + "0"),
        ("chat", r"Reasoning Effort", lambda m: "Reasoning effort"),
    ],
)
def test_a_changed_vector_is_noticed(tmp_path, stem, pattern, replacement):
    text = (ORACLE / f"{stem}.json").read_text()
    changed, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1
    (tmp_path / "vectors.json").write_text(text)
    assert check(tmp_path)[2] == [] and check(tmp_path)[1] > 1
    (tmp_path / "vectors.json").write_text(changed)
    assert check(tmp_path)[2]


def test_files_are_known_by_their_content(tmp_path):
    for stem, name in (("clean_fp32", "first"), ("quant_bf16", "second")):
        for suffix in (".json", ".safetensors"):
            shutil.copyfile(ORACLE / f"{stem}{suffix}", tmp_path / f"{name}{suffix}")
    shutil.copyfile(ORACLE / "dspark.safetensors", tmp_path / "third.safetensors")
    decode = load_file(ORACLE / "decode.safetensors")
    save_file(
        {"first.prefill17.logits": decode["clean_fp32.prefill17.logits"]}, tmp_path / "fourth.safetensors"
    )
    passed, total, failed = check(tmp_path)
    assert passed == total == 11 + 11 + 8 + 1 - 0, failed


def test_a_mode_that_is_not_said_follows_from_the_configuration(tmp_path):
    folder = model(tmp_path, "quant_fp8_fp4")
    published = json.loads((folder / "quant_fp8_fp4.json").read_text())
    published["fixture"] = {"token_map": published["fixture"]["token_map"]}
    (folder / "quant_fp8_fp4.json").write_text(json.dumps(published))
    assert check(folder) == (11, 11, [])


def drop(file, *names):
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if not re.search("|".join(names), name)}, file)


@pytest.mark.parametrize("stem", ["clean_fp32", "quant_bf16"])
def test_fewer_results_are_checked_as_far_as_they_go(tmp_path, stem):
    folder = model(tmp_path, stem)
    kept = r"^tap.*(main_kv|index_k|candidate_mask|streams|engram|margin|router_ids)$"
    drop(folder / f"{stem}.safetensors", kept)
    passed, total, failed = check(folder)
    assert passed == total >= 9, failed
    change(folder / f"{stem}.safetensors", "tap.layers.5.attn_out")
    assert check(folder)[2]


def test_a_file_without_results_shows_nothing(tmp_path):
    folder = model(tmp_path, "clean_fp32")
    drop(folder / "clean_fp32.safetensors", "^tap", "^out")
    assert check(folder)[2] == ["clean_fp32: the file has no results to compare with"]


@pytest.mark.parametrize(
    ("name", "message"), [("layers.2.attn.kv_norm.weight", "MissingTensor"), ("in.ids", "KeyError")]
)
def test_a_missing_tensor_fails(tmp_path, name, message):
    folder = model(tmp_path, "clean_fp32")
    drop(folder / "clean_fp32.safetensors", f"^{name}$")
    (line,) = check(folder)[2]
    assert message in line and name in line


def test_an_unknown_tensor_fails(tmp_path):
    folder = model(tmp_path, "clean_fp32")
    extra = {"layers.0.attn.other.weight": torch.ones(1), "tap.layers.3.other": torch.ones(2, 40)}
    save_file(load_file(folder / "clean_fp32.safetensors") | extra, folder / "clean_fp32.safetensors")
    failed = check(folder)[2]
    assert len(failed) == 2 and "other" in failed[0] and "attn.other" in failed[1]


@pytest.mark.parametrize("stem", ["clean_fp32", "dspark"])
def test_a_truncated_file_fails_and_the_rest_is_checked(tmp_path, stem):
    folder = copied(model(tmp_path, "clean_fp32"), "dspark.safetensors", "engram.json")
    file = folder / f"{stem}.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    passed, _, failed = check(folder)
    assert failed[0].startswith(stem) and passed >= 9


def test_a_number_that_is_none_is_no_agreement(tmp_path):
    for stem in ("clean_fp32", "quant_bf16"):
        folder = model(tmp_path, stem)
        change(folder / f"{stem}.safetensors", "tap.layers.2.attn_out", torch.nan)
    assert [line.split(":")[0] for line in check(folder)[2]] == [
        "clean_fp32 layer 2",
        "quant_bf16 layer 2",
    ]


def test_json_that_cannot_be_read_fails(tmp_path):
    (tmp_path / "a.json").write_text("{")
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.json").write_text('{"text_config": {}}')
    assert [line.split(":")[0] for line in check(tmp_path)[2]] == ["a", "b", "c"]


def test_the_command_says_how_many(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["parity", str(copied(tmp_path, "engram.json"))])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "parity 9/9"
    (tmp_path / "b.json").write_text("[]")
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "parity 9/10"
