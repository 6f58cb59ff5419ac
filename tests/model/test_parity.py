import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / "tests/data/oracle"


def parity(folder, *options):
    command = [sys.executable, "-m", "benchmarks.parity", str(folder), *options]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = result.stdout.splitlines()
    passed, total = map(int, lines[-1].removeprefix("parity ").split("/"))
    return result.returncode, passed, total, lines


@pytest.mark.slow
def test_everything_equals_the_published_computation():
    code, passed, total, lines = parity(ORACLE)
    assert passed == total >= 100, [line for line in lines if line.startswith("FAIL")]
    assert code == 0


def test_the_text_path_equals_the_published_computation():
    code, passed, total, lines = parity(ORACLE, "--only", "text")
    assert passed == total >= 44, [line for line in lines if line.startswith("FAIL")]
    assert code == 0


@pytest.mark.parametrize(
    "name",
    [
        "layers.2.attn.wq_b.weight",
        "layers.4.hc_ffn_base",
        "head.weight",
        "tap.layers.6.streams",
        "out.logits",
    ],
)
def test_one_changed_tensor_is_noticed(tmp_path, name):
    shutil.copy(ORACLE / "clean_fp32.json", tmp_path)
    tensors = load_file(ORACLE / "clean_fp32.safetensors")
    tensors[name] = tensors[name] + 1e-2
    save_file(tensors, tmp_path / "clean_fp32.safetensors")
    code, passed, total, _ = parity(tmp_path, "--only", "text")
    assert passed < total and code == 1


def test_what_has_no_check_counts_as_failed(tmp_path):
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    (tmp_path / "unknown.json").write_text("{}")
    code, passed, total, _ = parity(tmp_path)
    assert (code, passed, total) == (1, 0, 2)


def test_an_empty_folder_is_no_success(tmp_path):
    assert parity(tmp_path)[:3] == (1, 0, 0)
