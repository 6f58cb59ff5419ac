"""The policy that a KL term pulls to is the one RL began with, through checkpoints and resumes."""

import pytest
import torch

from rl.checkpoint import CheckpointStore
from rl.launch.compose import ConfigError, load_config
from rl.trainers.base import TrainerStateError
from rl.trainers.learner import Learner

KL = ["experiment=calc", "model=pico", "algorithm.kl=unbiased", "algorithm.kl_coef=0.01"]


def learner(folder, overrides=KL):
    return Learner(load_config(["launcher.sft_threads=1", "launcher.trainer_threads=1", *overrides]), folder)


def moved(own):
    with torch.no_grad():
        for parameter in own.policy.parameters():
            parameter.add_(1.0)
    return own


def same(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_rl_begins_with_a_frozen_copy_that_outlives_a_resume(tmp_path):
    own = learner(tmp_path)
    own.begin_learning()
    reference = own.rl.reference
    assert same(reference, own.policy) and not any(p.requires_grad for p in reference.parameters())
    assert not same(reference, moved(own).policy)
    own.save(1, {})
    resumed = learner(tmp_path)
    resumed.restore(CheckpointStore(tmp_path).latest())
    assert same(resumed.rl.reference, reference) and same(resumed.policy, own.policy)


def test_a_kl_term_cannot_be_switched_on_where_no_reference_was_kept(tmp_path):
    plain = learner(tmp_path, KL[:2])
    plain.begin_learning()
    assert plain.rl.reference is None
    plain.save(1, {})
    with pytest.raises(TrainerStateError, match="written without a KL term"):
        learner(tmp_path).restore(CheckpointStore(tmp_path).latest())


def test_a_reference_is_not_divided_over_processes():
    with pytest.raises(ConfigError, match="reference policy is not divided"):
        load_config([*KL, "trainer.parallel.data=2"])
