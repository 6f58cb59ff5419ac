"""Students and teachers of `transformers`: another architecture, the same tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model.chat import nano_chat
from model.hf.folder import save_hf
from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from model.policies import AnyPolicy
from model.policy import PackedTokens
from rl.algorithms.opd import reverse_kl
from rl.distil.stage import first_mix, resolved
from rl.launch.compose import load_config
from rl.trainers.opd import OPDConfig, OPDTrainer
from rl.trainers.optim import OptimizerConfig
from rl.trainers.teachers import Teachers

FAST = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)


def tiny(seed: int) -> HFPolicy:
    return HFPolicy(tiny_model("hf_tiny", seed))


def logits(policy: AnyPolicy, ids: np.ndarray) -> torch.Tensor:
    tokens = PackedTokens(torch.from_numpy(ids).long(), torch.tensor([0, len(ids)]))
    return policy.logits(policy(tokens).hidden).detach()


@pytest.mark.parametrize("student_is_ours", [True, False])
def test_a_policy_of_ours_and_one_of_transformers_teach_each_other(make_policy, make_sample, student_is_ours):
    rng = np.random.default_rng(0)
    samples = [make_sample(rng.integers(3, 60, size=n), [0, 0] + [1] * (n - 2), id=str(n)) for n in (6, 9)]
    student, teacher = (make_policy(), tiny(1)) if student_is_ours else (tiny(1), make_policy())
    values = [
        reverse_kl(logits(student, s.token_ids), logits(teacher, s.token_ids))[1:-1].numpy() for s in samples
    ]
    teachers = Teachers(64, fake_quant=False)
    teachers.add("all", lambda: teacher)
    taught = teachers.teach(samples, lambda sample: "all")
    trainer = OPDTrainer(student, OPDConfig(optimizer=FAST, fake_quant=False), teachers)
    first = trainer.step(taught)["opd/kl"]
    assert first == pytest.approx(np.concatenate(values).mean(), rel=1e-3)
    for _ in range(4):
        last = trainer.step(taught)["opd/kl"]
    assert last < first


def test_a_folder_of_transformers_is_a_teacher(tmp_path: Path) -> None:
    save_hf(tiny(1), tmp_path / "teacher", nano_chat())
    teacher = f"opd.teachers={{all: {{path: {tmp_path / 'teacher'}}}}}"
    for kind in (["model=pico"], ["policy=hf"]):
        words = ["env=sort", teacher, "trainer.steps=0", f"run.root={tmp_path}", *kind]
        config = load_config(words)
        assert resolved(first_mix(config), config).teachers["all"].path == str(tmp_path / "teacher")
