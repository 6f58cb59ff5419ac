"""Exported policies: plain folders that others read, whole or not at all."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.batch import PackedTokens
from model.chat import nano_chat
from model.checkpoint import load_policy, save_policy
from model.config import PolicyConfig
from model.hf.folder import open_hf, save_hf
from model.hf.policy import HFPolicy
from model.hf.settings import LoraSettings
from model.hf.tiny import tiny_model
from model.policies import write_policy
from model.policy import Policy
from rl.evals.settings import read_settings
from rl.evals.target import TargetError, find_target
from rl.export import _measured
from rl.launch.cli import main
from rl.watch.jsonl import JsonlLog, row


@pytest.fixture
def hf_folder(tmp_path):
    save_hf(HFPolicy(tiny_model("hf_tiny", 0)), tmp_path / "trained", nano_chat())
    return tmp_path / "trained"


def test_a_model_of_transformers_is_read_by_transformers(hf_folder, tmp_path, capsys):
    out = tmp_path / "exported"
    assert main(["export", str(hf_folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert torch.equal(model.lm_head.weight, tiny_model("hf_tiny", 0).lm_head.weight)
    chat = nano_chat()
    asked = [{"role": "user", "content": "47*86="}]
    told = tokenizer.apply_chat_template(asked, tokenize=False)
    assert tokenizer(told, add_special_tokens=False)["input_ids"] == chat.render_prompt(asked)
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "Qwen3ForCausalLM" in card
    assert "`<end>`" in card
    assert "no evaluation of safety" in card


def test_the_folder_is_evaluated_as_a_model_of_transformers(hf_folder, tmp_path):
    target = find_target(str(hf_folder), tmp_path)
    settings = read_settings(["env=calc", "n=2"], target.config())
    assert target.config().policy.kind == "hf" and not (settings.fake_quant or settings.exact)
    open_hf(target.policy).fake_quant = settings.fake_quant
    assert read_settings(["env=calc", "engine=vllm"], target.config()).engine == "vllm"


def test_adapters_are_added_in(hf_folder, tmp_path):
    policy = open_hf(hf_folder, lora=LoraSettings(rank=2))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    write_policy(policy, tmp_path / "adapters", nano_chat())
    assert main(["export", str(tmp_path / "adapters"), "--out", str(tmp_path / "out")]) == 0
    ids = torch.arange(3, 20)[None]
    told = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(input_ids=ids).logits
    base = AutoModelForCausalLM.from_pretrained(hf_folder)(input_ids=ids).logits
    own = policy.logits(policy(PackedTokens(ids[0], torch.tensor([0, 17]))).hidden)
    torch.testing.assert_close(own, told[0], atol=1e-3, rtol=1e-3)
    assert (told - base).abs().max() > 0.1
    assert str(hf_folder) in (tmp_path / "out" / "README.md").read_text()


def test_our_policy_keeps_its_published_layout(tmp_path):
    policy = Policy(PolicyConfig.preset("nano"))
    save_policy(policy, tmp_path / "ours", chat=nano_chat())
    assert main(["export", str(tmp_path / "ours"), "--out", str(tmp_path / "out")]) == 0
    again = load_policy(tmp_path / "out")
    for name, tensor in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described["architectures"] == ["DeepseekV41ForCausalLM"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "DeepseekV41ForCausalLM" in card and "transformers" not in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    names = {"FOLDER": str(tmp_path / "out")}
    exec(code, names)
    assert isinstance(names["policy"], Policy)


def test_a_folder_that_is_there_is_left_alone(hf_folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert main(["export", str(hf_folder), "--out", str(tmp_path / "out")]) == 2
    assert "is there already" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    assert issubclass(TargetError, ValueError)


def test_what_cannot_be_read_leaves_nothing(hf_folder, tmp_path):
    next(hf_folder.glob("*.safetensors")).write_bytes(b"nothing")
    assert main(["export", str(hf_folder), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_the_folder_has_its_name_when_all_of_it_is_on_disk(hf_folder, tmp_path, monkeypatch):
    fsync, synced, out = os.fsync, set(), tmp_path / "out"

    def noted(fd):
        synced.add((Path(os.readlink(f"/proc/self/fd/{fd}")).name, out.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    assert main(["export", str(hf_folder), "--out", str(out)]) == 0
    assert synced >= {(file.name, False) for file in out.iterdir()} | {(".out.partial", False)}
    assert (tmp_path.name, True) in synced


def test_a_run_that_was_killed_is_exported(hf_folder, tmp_path):
    with JsonlLog(tmp_path / "metrics.jsonl") as log:
        log.write(row("eval", 7, {"eval/calc/greedy/score.mean": 0.5, "eval/calc/greedy/n": 9.0}))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"family": "ev')
    target = replace(find_target(str(hf_folder), tmp_path), run=tmp_path)
    assert _measured(target)[-1] == "| calc/greedy | 7 | 0.500 | 9 |"
