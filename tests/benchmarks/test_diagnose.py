import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.diagnose_data import open_policy, read_documents
from benchmarks.kv_bytes import measure
from model.checkpoint import save_policy
from model.config import PolicyConfig
from model.diagnostics.cache_bytes import policy_bytes
from model.policy import Policy

ROOT = Path(__file__).parents[2]


def diagnose(*arguments):
    command = [sys.executable, "-m", "benchmarks.diagnose", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.fixture
def checkpoint(tmp_path):
    policy = Policy(PolicyConfig.preset("pico"))
    policy.reset_parameters(4)
    save_policy(policy, tmp_path / "ckpt")
    return policy, tmp_path / "ckpt"


def test_a_checkpoint_is_diagnosed_and_drawn(checkpoint, tmp_path):
    _, folder = checkpoint
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    done = diagnose(folder, "--tokens", 96, "--length", 48, "--json", figures, "--plot", picture)
    assert done.returncode == 0, done.stderr
    name, value = done.stdout.splitlines()[-1].split()
    assert name == "selection_recall" and 0 < float(value) < 1
    found = json.loads(figures.read_text())
    assert found.keys() >= {"recall", "cache_error", "scales", "turns", "experts", "cache_bytes"}
    assert len(found["recall"]) == 5 and found["cache_error"]["off"]["rms"] == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_figure_that_is_not_finite_fails(checkpoint, tmp_path):
    policy, folder = checkpoint
    data = tmp_path / "documents.jsonl"
    data.write_text("[1, 2, 3, 4, 5]\n\n[9, 8]\n")
    with torch.no_grad():
        policy.blocks[4].ffn.w2.fill_(torch.nan)
    save_policy(policy, folder)
    done = diagnose(folder, "--data", data)
    assert done.returncode == 1 and "not finite" in done.stdout
    assert diagnose(folder, "--tokens", 16, "--length", 8).returncode == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1, 64]", "line 1"), ("[1, 2]\nfoo", "not JSON"), ("[3]", "two tokens"), ('["1"]', "token ids")],
)
def test_bad_documents_are_refused(tmp_path, text, message):
    data = tmp_path / "documents.jsonl"
    data.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_documents(data, 64, 100, 10)


def test_documents_are_cut_and_counted(tmp_path):
    data = tmp_path / "documents.jsonl"
    data.write_text("[1, 2, 3, 4, 5]\n\n[9]\n[9, 8]\n[7, 7, 7]\n")
    found = read_documents(data, 10, 5, 4)
    assert [document.tolist() for document in found] == [[1, 2, 3, 4], [9, 8]]


def test_what_is_no_policy_is_refused(tmp_path):
    done = diagnose("official")
    assert done.returncode == 2 and "neither" in done.stderr
    with pytest.raises(ValueError, match="not a checkpoint folder"):
        open_policy(str(tmp_path), 0)


def test_the_table_says_what_is_allocated():
    for name in ("official", "nano"):
        config = PolicyConfig.preset(name)
        assert policy_bytes(config) == measure(config).per_token
