"""A learner of two processes does what one does, and its checkpoint is one for any number."""

import pytest
import torch

from model.checkpoint import load_policy
from rl.checkpoint import CheckpointStore
from rl.launch.compose import load_config
from rl.trainers.learner import Learner
from rl.trainers.rank_process import LearnerGroup, RankError

SMALL = ["env=sort", "sft.steps=4", "sft.batch_size=6", "sft.token_budget=64", "launcher.sft_threads=1"]


@pytest.mark.slow
def test_two_processes_learn_publish_and_save_as_one(tmp_path):
    config = load_config([*SMALL, "trainer.parallel.data=2", "trainer.parallel.expert=2"])
    alone = Learner(load_config(SMALL), tmp_path / "alone")
    expected = alone.warm_start(2)
    group = LearnerGroup(config, tmp_path / "two")
    try:
        assert group.warm_start(2)["sft/loss"] == pytest.approx(expected["sft/loss"], rel=1e-4)
        group.begin_learning()
        weights, version = group.weights()
        assert version == 0
        for name, tensor in alone.weights()[0].items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4)
        group.save(2, {"cursor": 7})
        with pytest.raises(RankError, match=r"the learner's no_such failed on 2 processes .*no_such"):
            group.no_such()
    finally:
        group.close()
    checkpoint = CheckpointStore(tmp_path / "two").latest()
    assert checkpoint is not None
    published = load_policy(checkpoint.path / "policy").state_dict()
    resumed = Learner(load_config(SMALL), tmp_path / "alone")
    assert resumed.restore(checkpoint) == {"cursor": 7}
    for name, tensor in resumed.weights()[0].items():
        assert torch.equal(tensor, weights[name]) and torch.equal(tensor, published[name]), name
    # The optimiser came along: the next step is that of the learner that was never divided.
    assert resumed.sft.steps == 2
    after = resumed.warm_start(1), alone.warm_start(1)
    assert after[0]["sft/loss"] == pytest.approx(after[1]["sft/loss"], rel=1e-3)
