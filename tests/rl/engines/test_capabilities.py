import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.engines.capabilities import CAPABILITIES, Capabilities
from rl.engines.vllm_installed import EngineStartError, check_installed
from rl.engines.vllm_model import ModelFolder, ModelFolderError
from rl.engines.vllm_settings import OWNED, VllmSettings
from rl.launch.compose import ConfigError, load_config

ROOT = Path(__file__).parents[3]
VLLM = ["experiment=calc", "policy=hf", "engine=vllm"]


def test_the_run_that_vllm_is_for_is_accepted():
    config = load_config(VLLM)
    assert (config.engine.name, config.policy.kind) == ("vllm", "hf")
    assert CAPABILITIES["native"] != CAPABILITIES["vllm"] != Capabilities()


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("policy.kind=native", "policy=native"),
        ("engine.speculate=coupled", "engine.speculate"),
        ("engine.draft_length=3", "engine.draft_length"),
        ("engine.storage=packed", "engine.storage"),
        ("engine.replay=bounded", "engine.replay"),
        ("engine.scales_every=5", "engine.scales_every"),
        ("engine.top_p=0.9", "engine.top_p"),
        ("engine.top_k=5", "engine.top_k"),
        ("model.exact=true", "model.exact"),
        ("trainer.fake_quant=true", "trainer.fake_quant"),
        ("trainer.replay_choices=selections", "trainer.replay_choices"),
        ("trainer.replay_choices=experts", "trainer.replay_choices"),
        ("launcher.prefill_replicas=1", "launcher.prefill_replicas"),
        ("launcher.placement=colocated", "launcher.placement"),
    ],
)
def test_what_vllm_lacks_is_refused_by_the_name_of_the_setting(word, named):
    overrides = [word] if word.startswith("policy") else ["policy=hf", word]
    with pytest.raises(ConfigError, match=named):
        load_config(["experiment=calc", "engine=vllm", *overrides])


def test_its_settings_without_it_are_refused():
    with pytest.raises(ConfigError, match="engine=vllm"):
        load_config(["experiment=calc", "engine.vllm.compile=true"])


def test_a_broadcast_reaches_one_worker_only():
    with pytest.raises(ConfigError, match=r"launcher\.weights"):
        load_config([*VLLM, "launcher.weights=collective", "engine.vllm.tensor_parallel=2"])


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel": 0}, {"gpu_memory": 1.5}, {"start_s": 0}, {"kv_cache_gb": 0}]
    + [{"arguments": {name: 1}} for name in sorted(OWNED)[:3]],
)
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=r"engine\.vllm"):
        VllmSettings(**options)


def test_a_folder_of_adapters_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelFolderError, match="temper export"):
        ModelFolder.read(tmp_path)


@pytest.fixture
def described(tmp_path):
    def write(**changed):
        config = {"model_type": "qwen3", "vocab_size": 8, "max_position_embeddings": 64, "dtype": "float32"}
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        save_file({"lm_head.weight": np.zeros((8, 2), np.float32)}, tmp_path / "model.safetensors")
        return ModelFolder.read(tmp_path)

    return write


def test_auto_is_the_type_of_the_weights(described):
    assert VllmSettings().of_model(described().dtype).dtype == "float32"
    assert VllmSettings().of_model(described(dtype="float8_e4m3fn").dtype).dtype == "auto"
    assert VllmSettings(dtype="bfloat16").of_model("float32").dtype == "bfloat16"


def test_what_vllm_does_not_serve_is_refused_with_what_to_do(described):
    with pytest.raises(ModelFolderError, match=r"65 are asked for: set engine\.max_tokens"):
        described().check_context(65)
    described().check_context(64)
    with pytest.raises(ModelFolderError, match="take engine=native"):
        described(model_type="deepseek_v41")


def test_another_release_of_vllm_is_refused_by_its_version(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def install(version):
        package = tmp_path / f"vllm-{version}.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return package

    install("0.32.1").rename(tmp_path / "aside")
    install("0.31.4")
    with pytest.raises(EngineStartError, match=r"written for vLLM 0\.32, and 0\.31\.4 is installed"):
        check_installed()
    (tmp_path / "vllm-0.31.4.dist-info").rename(tmp_path / "old")
    (tmp_path / "aside").rename(tmp_path / "vllm-0.32.1.dist-info")
    importlib.invalidate_caches()
    assert check_installed() == "0.32.1"


def test_without_vllm_it_is_said_how_to_get_it():
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); " + (
        "from rl.engines.vllm_installed import check_installed; check_installed()"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "`make vllm`" in done.stderr


def test_parallel_settings_and_more_reach_vllm(tmp_path):
    settings = VllmSettings(tensor_parallel=4, data_parallel=2, arguments={"block_size": 32})
    given = settings.engine_arguments(tmp_path, max_requests=7, max_tokens=99)
    assert (given["tensor_parallel_size"], given["data_parallel_size"], given["block_size"]) == (4, 2, 32)
    assert (given["max_num_seqs"], given["max_model_len"]) == (7, 99)
    assert set(given) - {"block_size"} <= OWNED
