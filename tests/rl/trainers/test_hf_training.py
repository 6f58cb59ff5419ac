"""Models of transformers under our trainers: SFT, RL, adapters, activations that are computed again."""

import numpy as np
import pytest
import torch

from model.chat import nano_chat
from model.hf.folder import open_hf, save_hf
from model.hf.policy import HFPolicy
from model.hf.settings import HFPolicyError, LoraSettings
from model.hf.tiny import tiny_model
from rl.algorithms import AlgorithmConfig
from rl.trainers import OptimizerConfig, RLConfig, RLTrainer, SFTConfig, SFTTrainer

PLAIN = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)
MUON = OptimizerConfig(learning_rate=3e-3, muon_learning_rate=0.02, warmup_steps=0)
PROMPT = [4, 10, 11, 20]


def rl_config(**settings):
    base = {"fake_quant": False, "scales_every": 0, "replay_choices": "off", "optimizer": PLAIN}
    return RLConfig(**(base | settings))


@pytest.fixture
def samples(make_sample):
    rng = np.random.default_rng(0)
    lengths = (6, 30, 11, 3, 19)
    return [
        make_sample(rng.integers(3, 60, size=n).tolist(), [0, *[1] * (n - 1)], id=str(i))
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def groups(make_turn, make_trajectory, make_group):
    rng = np.random.default_rng(1)
    made = []
    for number in range(3):
        trajectories = []
        for index in range(2):
            ids = rng.integers(3, 60, size=int(rng.integers(2, 9))).tolist()
            turn = make_turn(PROMPT, ids, logprobs=(-4 - rng.random(len(ids))).tolist())
            trajectories.append(make_trajectory([[turn]], float(index), group=number, index=index))
        made.append(make_group(trajectories, number))
    return made


@pytest.mark.parametrize("preset", ["hf_tiny", "hf_tiny_moe"])
@pytest.mark.parametrize("optimizer", [PLAIN, MUON], ids=["adamw", "muon"])
def test_imitation_lowers_the_loss(samples, preset, optimizer):
    trainer = SFTTrainer(HFPolicy(tiny_model(preset, 0)), SFTConfig(steps=20, optimizer=optimizer))
    losses = [trainer.step(samples)["sft/loss"] for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(64), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.evaluate(samples)["sft/eval.loss"] < losses[-2]


def test_how_samples_are_packed_changes_nothing(samples):
    weights = []
    for budget in (30, 4096):
        policy = HFPolicy(tiny_model("hf_tiny", 0))
        SFTTrainer(policy, SFTConfig(token_budget=budget, optimizer=PLAIN)).step(samples)
        weights.append(policy.state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
def test_reinforcement_makes_what_was_rewarded_likelier(groups, recompute):
    policy = HFPolicy(tiny_model("hf_tiny", 0))
    trainer = RLTrainer(policy, rl_config(recompute=recompute), AlgorithmConfig())

    def likelihood(index):
        from rl.trainers.data import trajectory_samples

        chosen = [s for g in groups for s in trajectory_samples(g.trajectories[index], 1.0)]
        return np.mean([row.sum() for row in trainer.logprobs(chosen)])

    before = likelihood(1) - likelihood(0)
    metrics = trainer.step(groups)
    assert metrics["train/updates"] == 1
    assert metrics["train/grad_norm"] > 0
    assert any("mismatch" in name for name in metrics)
    assert likelihood(1) - likelihood(0) > before


def test_adapters_learn_and_nothing_else(samples, tmp_path):
    save_hf(HFPolicy(tiny_model("hf_tiny", 0)), tmp_path, nano_chat())
    policy = open_hf(tmp_path, lora=LoraSettings(rank=8))
    frozen = {n: p.clone() for n, p in policy.model.named_parameters() if "lora_" not in n}
    trainer = SFTTrainer(policy, SFTConfig(steps=30, optimizer=PLAIN))
    losses = [trainer.step(samples)["sft/loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.equal(p, frozen[n]) for n, p in policy.model.named_parameters() if n in frozen)
    state = trainer.state_dict()
    assert set(state["optimizer"]["adamw"]) == set(policy.state_dict())
    again = open_hf(tmp_path, lora=LoraSettings(rank=8))
    again.load_state_dict(policy.state_dict())
    successor = SFTTrainer(again, SFTConfig(steps=30, optimizer=PLAIN))
    successor.load_state_dict(state)
    assert successor.step(samples)["sft/loss"] == pytest.approx(trainer.step(samples)["sft/loss"], abs=1e-4)


def test_bfloat16_weights_learn_by_float32_copies(samples):
    policy = HFPolicy(tiny_model("hf_tiny", 0).to(torch.bfloat16))
    trainer = SFTTrainer(policy, SFTConfig(steps=20, optimizer=PLAIN))
    losses = [trainer.step(samples)["sft/loss"] for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"fake_quant": True}, "fake_quant=false"), ({"indexer_coef": 0.1}, "indexer_coef=0")],
)
def test_what_such_a_policy_lacks_is_refused(samples, settings, named):
    trainer = SFTTrainer(HFPolicy(tiny_model("hf_tiny", 0)), SFTConfig(**settings))
    with pytest.raises(HFPolicyError, match=named):
        trainer.step(samples)
