"""Checkpoints of our network as vLLM's class for it expects them: names, shapes and types of all tensors."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from model.checkpoint import save_policy
from model.config_published import from_published
from model.layers.engram_hash import bucket_primes
from model.policy import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]
HERE = Path(__file__).parent
ORACLE = HERE.parents[1] / "data" / "oracle" / "quant_fp8_fp4.json"
WORDS = 256
"""Of the tokenizer: vLLM takes the token map of the n-gram memory from it."""
PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: described-gpu\nVersion: 0\n",
    "entry_points.txt": "[vllm.platform_plugins]\ndescribed = described_gpu:platform\n",
}
WRONG = {
    "embed.weight": 0, "layers.0.attn.wq_a.weight": 1, "layers.0.attn.wo_b.scale": 0,
    "layers.1.engram.wkv.weight": 1, "layers.1.attn.compressor.wkv.weight": 1, "layers.2.ffn.gate.weight": 0,
    "layers.3.hc_attn_fn": 0, "layers.4.ffn.experts.1.w2.weight": 0, "vision.norm.weight": 0,
}  # fmt: skip
"""Tensors, and the dimension that is made too long; vLLM cuts the first one of those that it stacks."""
TILE = 32
"""Rows that share a published scale; vLLM keeps one for each row."""


def configuration():
    """The published one of the oracle, in the smallest sizes that vLLM's kernels are made for."""
    config = from_published(json.loads(ORACLE.read_text()))
    config = replace(
        config, hidden_size=128, head_dim=512, qk_rope_head_dim=64, index_head_dim=128, vocab_size=WORDS,
        engram_vocab_size=67, engram_compressed_vocab_size=WORDS, engram_token_map=tuple(range(WORDS)),
    )  # fmt: skip
    rows = tuple(sum(map(sum, layer)) for layer in bucket_primes(config))
    return replace(config, engram_num_embeddings=rows)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder, path = tmp_path_factory.mktemp("published"), tmp_path_factory.mktemp("path")
    policy = Policy(configuration())
    policy.reset_parameters(0)
    save_policy(policy, folder)
    words = Tokenizer(models.WordLevel({f"word{i}": i for i in range(WORDS)}, unk_token="word3"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(str(folder))
    (path / "described_gpu-0.dist-info").mkdir()
    for name, text in PLUGIN.items():
        (path / "described_gpu-0.dist-info" / name).write_text(text)
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "load_on_meta.py"),
            str(folder),
            *(f"{name}:{dim}" for name, dim in WRONG.items()),
        ],
        env={
            **os.environ,
            "PYTHONPATH": f"{path}:{HERE}",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=1000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_tensor_is_taken_but_those_of_the_drafter_which_has_a_class_of_its_own(loaded):
    tensors = loaded["tensors"]
    assert loaded["devices"] == ["meta"]
    assert {name: told["error"] for name, told in tensors.items() if "error" in told} == {}
    left = {name for name, told in tensors.items() if not told["into"]}
    assert left and left == {name for name in tensors if name.startswith("mtp.")}
    assert {into for told in tensors.values() for into in told["into"]} == loaded["parameters"].keys()


def test_every_parameter_is_filled_to_its_last_element(loaded):
    filled = dict.fromkeys(loaded["parameters"], 0)
    for told in loaded["tensors"].values():
        for into in told["into"]:
            filled[into] += math.prod(told["shape"]) * (TILE if into.endswith(".weight_scale") else 1)
    short = {
        name: (shape, filled[name])
        for name, (shape, _) in loaded["parameters"].items()
        if filled[name] != math.prod(shape)
    }
    assert {name for name in short if not name.endswith(".attn_sink")} == set()
    assert {filled for _, filled in short.values()} == {configuration().num_attention_heads}, "padded to 64"


def test_every_type_is_the_parameters_own_or_widened(loaded):
    kinds = {
        (told["dtype"].removeprefix("torch."), loaded["parameters"][into][1].removeprefix("torch."))
        for told in loaded["tensors"].values()
        for into in told["into"]
    }
    same = {(kind, kind) for kind in ("bfloat16", "float32", "float8_e4m3fn", "uint8")}
    assert same <= kinds and kinds <= same | {("bfloat16", "float32")}


def test_another_shape_is_refused(loaded):
    assert loaded["refused"].keys() == WRONG.keys()
    assert [name for name, told in loaded["refused"].items() if "error" not in told] == []
