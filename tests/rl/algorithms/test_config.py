import math

import pytest

from rl.algorithms import AlgorithmConfig, AlgorithmError
from rl.algorithms.losses import LOSSES
from rl.algorithms.losses.gspo import gspo
from rl.algorithms.registry import Registry, settings_of


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "reinforce", "clip_low": 0.2}, "'clip_low' has no effect with .*loss 'reinforce'"),
        ({"tis_cap": 2.0}, "'tis_cap' has no effect"),
        ({"advantage": "grpo", "passk_std": True}, "'passk_std' has no effect"),
        ({"options": {"temperature": 1}}, "'temperature' has no effect"),
        ({"clip_low": 0.2, "options": {"clip_low": 0.1}}, "given twice"),
        ({"max_length": 10}, "no effect elsewhere"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "max_length is None"),
        ({"kl": "k3"}, "has no effect; set both"),
        ({"kl_coef": 0.1}, "has no effect; set both"),
        ({"kl_in": "reward"}, "no effect without a kl"),
        ({"kl": "k4", "kl_coef": 0.1}, "unknown kl 'k4'"),
        ({"kl": "k3", "kl_coef": 0.1, "kl_in": "both"}, "'loss' or 'reward'"),
        ({"entropy_coef": -0.1}, "must not be negative"),
        ({"entropy_target": -0.1}, "in nats, at least 0"),
        ({"entropy_rate": 0.01}, "entropy_rate has no effect without a target"),
        (
            {"entropy_limit": 0.1, "entropy_decay_from": 0.5},
            "entropy_limit, entropy_decay_from has no",
        ),
        ({"entropy_target": 0.1, "entropy_rate": 0.0}, "must be positive"),
        ({"entropy_target": 0.1, "entropy_coef": 0.1}, "above entropy_limit=0.05"),
        ({"entropy_target": 0.1, "entropy_decay_from": 1.0}, "from 0 to below 1"),
        ({"loss": "ppo_clp"}, "did you mean 'ppo_clip'"),
        ({"advantage": "gea"}, "unknown advantage 'gea'; did you mean 'gae'"),
        ({"gae_gamma": 0.9}, "'gae_gamma' has no effect"),
        ({"advantage": "gae", "gae_lambda": 1.5}, "from 0 to 1"),
        ({"aggregation": "mean"}, "unknown aggregation"),
        ({"group_size": 0}, "at least 1"),
        ({"group_size": 1}, "every advantage would be 0"),
        ({"corrections": ("staleness_mask",)}, "needs the setting 'max_staleness'"),
        ({"corrections": ("token_tis", "icepop")}, "choose one of them"),
        ({"corrections": ("opsm", "opsm")}, "name one twice"),
        ({"loss": "dppo_tv", "corrections": ("token_tis",)}, "would count twice"),
        ({"loss": "dual_clip", "dual_clip": 0.5}, "above 1"),
        ({"clip_low": -0.1}, "at least 0"),
        ({"corrections": ("token_tis",), "tis_cap": 0}, "must be positive"),
        ({"loss": "no_such_package:loss"}, "cannot be imported"),
        ({"loss": "math:pi"}, "is no function"),
        ({"loss": "os:getcwd"}, r"called with \(inputs\)"),
        ({"loss": "shutil:copyfile"}, r"has the arguments \(src, dst.*called with \(inputs\)"),
        ({"advantage": "shutil:copyfile"}, "lengths or groups if it names them"),
        ({"loss": "ppo"}, "did you mean 'ppo_clip'"),
        ({"kl": "k3", "kl_coef": math.nan}, "kl_coef is nan"),
        ({"kl": "k3", "kl_coef": math.inf}, "kl_coef is inf"),
        ({"entropy_coef": math.nan}, "entropy_coef is nan"),
        ({"clip_low": math.nan}, "clip_low is nan"),
        ({"opsm_delta": math.inf}, "opsm_delta is inf"),
        ({"advantage": "gae", "gae_lambda": math.nan}, "gae_lambda is nan"),
        ({"loss": "dual_clip", "dual_clip": math.nan}, "dual_clip is nan"),
        ({"loss": "dppo_tv", "corrections": (), "dppo_low": 1.5}, "dppo_low is 1.5"),
        ({"corrections": ("icepop",), "icepop_low": 6.0}, "icepop_low=6 .*leave out the ratio 1"),
        ({"corrections": ("geometric_mask",), "geometric_high": 0.9}, "leave out the ratio 1"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(settings, message):
    with pytest.raises(AlgorithmError, match=message):
        AlgorithmConfig(**settings)


def test_a_batch_estimator_needs_no_group():
    assert AlgorithmConfig(group_size=1, advantage="reinforce_pp").group_size == 1


def test_a_setting_left_out_has_the_algorithms_own_default():
    assert AlgorithmConfig(loss="gspo").settings_for(gspo) == {}
    assert AlgorithmConfig(loss="gspo", clip_low=1e-3).settings_for(gspo) == {"clip_low": 1e-3}
    assert settings_of(gspo) == {"clip_low": 3e-4, "clip_high": 4e-4}


def test_a_users_own_is_an_import_path():
    config = AlgorithmConfig(loss="rl.algorithms.losses.sapo:sapo", tau_positive=2.0)
    assert LOSSES.load(config.loss) is LOSSES.load("sapo")


def test_the_anchor_follows_from_the_corrections():
    assert not AlgorithmConfig().anchored_at_trainer
    assert AlgorithmConfig(corrections=("token_tis",)).anchored_at_trainer
    assert AlgorithmConfig(corrections=("opsm", "geometric_mask")).anchored_at_trainer


def test_a_name_is_registered_once():
    registry = Registry("loss", "inputs")
    registry.register("mine")(lambda inputs: inputs)
    with pytest.raises(AlgorithmError, match="registered twice"):
        registry.register("mine")(lambda inputs: inputs)
