"""What `model.exact` comes to, and that everything reads it from one place."""

import json
from dataclasses import replace

import pytest
import yaml

from model.config import PolicyConfig
from rl.launch.compose import ConfigError, load_config
from rl.launch.config import RunConfig
from rl.launch.config_exact import BOUND, COSTS
from rl.launch.resume import ResumeError, check_changes
from rl.launch.run import as_plain, open_run
from rl.trainers.learner import Learner

CALC = ["experiment=calc"]
GPUS = ["launcher.learner_gpus=1", "launcher.replica_gpus=1"]


def folder_of(tmp_path, dtype):
    (tmp_path / "config.json").write_text(
        json.dumps(replace(PolicyConfig.preset("nano"), dtype=dtype).to_published())
    )
    return f"model.path={tmp_path}"


def exactness(*words):
    return load_config([*CALC, *words]).exactness


def test_auto_is_on_where_it_costs_little(tmp_path):
    path = folder_of(tmp_path, "bfloat16")
    assert COSTS["cuda"] <= BOUND < COSTS["cpu"]
    for gpus in (GPUS, ["launcher.placement=colocated", "launcher.learner_gpus=1"]):
        assert exactness(path, *gpus).on and f"within {BOUND}x" in exactness(path, *gpus).why
    assert not exactness(path).on and str(COSTS["cpu"]) in exactness(path).why
    assert not exactness().on


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (GPUS[:1], "trained on cuda and sampled from on cpu"),
        (GPUS[1:], "trained on cpu and sampled from on cuda"),
        ([*GPUS, "trainer.parallel.data=2"], "trained on cpu and sampled from on cuda"),
        (GPUS, "float32"),
        (["policy=hf", *GPUS], "transformers"),
        (["policy=hf", "engine=vllm", *GPUS], "vLLM"),
    ],
)
def test_auto_is_off_elsewhere_and_says_why(words, why):
    found = exactness(*words)
    assert not found.on and why in found.why and str(found).startswith("exact mode is off")


@pytest.mark.parametrize("on", [True, False])
def test_what_is_said_holds(on, tmp_path):
    word = f"model.exact={str(on).lower()}"
    assert exactness(word).on is on
    assert exactness(word, folder_of(tmp_path, "bfloat16"), *GPUS).on is on


def test_kept_caches_do_not_forbid_exact_mode():
    assert exactness("model.exact=true", "rollout.kv_on_update=keep", "rollout.staleness=2").on


@pytest.mark.parametrize(
    ("words", "repeated"),
    [
        (["rollout.kv_on_update=recompute"], "off"),
        (["rollout.kv_on_update=recompute", "rollout.staleness=0"], "experts"),
        (["rollout.kv_on_update=recompute", "model.exact=false"], "experts"),
        (["rollout.kv_on_update=keep"], "experts"),
    ],
)
async def test_over_recomputed_caches_an_exact_trainer_chooses_for_itself(words, repeated, tmp_path):
    config = load_config([*CALC, "model.exact=true", "rollout.staleness=1", *words])
    assert config.replay_choices == repeated
    assert ("recorded choices" in str(config.exactness)) == (repeated == "off")
    learner = Learner(config, tmp_path / "checkpoints")
    learner.begin_learning()
    assert learner.rl is not None and learner.rl.config.replay_choices == repeated


def test_two_kinds_of_devices_cannot_be_exact():
    with pytest.raises(ConfigError, match=r"launcher\.learner_gpus, launcher\.replica_gpus"):
        load_config([*CALC, "model.exact=true", "launcher.learner_gpus=1"])


def test_the_resolved_configuration_says_whether_it_is_on(tmp_path):
    words = [*CALC, folder_of(tmp_path, "bfloat16"), *GPUS]
    plain = as_plain(load_config(words))
    assert plain["model"]["exact"] is True
    assert RunConfig.model_validate(plain).exactness.on
    assert as_plain(load_config(CALC))["model"]["exact"] is False


def test_a_run_of_before_is_resumed_as_it_was(tmp_path):
    def config(*words):
        return load_config([*CALC, f"run.root={tmp_path}", "name=old", *words])

    folder = open_run(config())
    stored = as_plain(config())
    assert stored["model"]["exact"] is False  # as older versions wrote it
    (folder.path / "resolved.yaml").write_text(yaml.safe_dump(stored))
    assert check_changes(config("resume=true")) == []
    with pytest.raises(ResumeError, match=r"model\.exact: False before, True now"):
        check_changes(config("resume=true", "model.exact=true"))
