"""One switch makes trainer and sampler exact."""

import pytest

from rl import build
from rl.launch.compose import load_config
from rl.trainers.learner import Learner


@pytest.mark.parametrize(("word", "exact"), [("auto", False), ("false", False), ("true", True)])
async def test_the_switch_reaches_trainer_and_sampler(word, exact, tmp_path, monkeypatch):
    config = load_config(["experiment=calc", f"model.exact={word}"])
    learner = Learner(config, tmp_path / "checkpoints")
    assert not learner.policy.exact  # demonstrations are compared with no sampler
    learner.begin_learning()
    assert learner.policy.exact is exact
    made = []
    policy = build.policy
    monkeypatch.setattr(build, "policy", lambda config: made.append(policy(config)) or made[0])
    async with build.open_generator(config, tmp_path / "log", tmp_path / "fleet", "test"):
        assert made[0].exact is exact
