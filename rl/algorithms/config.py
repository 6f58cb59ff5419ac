"""The algorithm's configuration: choices by name, settings by the algorithm that has them.

A setting left at None takes the default of the algorithm that has it (a clip range differs between PPO and
GSPO by three orders of magnitude). A setting that no chosen algorithm has is refused, so that a run never
carries a number that does nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rewards.overlong import OverlongConfig
from rl.algorithms.advantages.registry import ADVANTAGES, needs_critic, needs_group
from rl.algorithms.aggregation import MODES
from rl.algorithms.corrections import CORRECTIONS
from rl.algorithms.kl import NAMES as KL_NAMES
from rl.algorithms.losses import LOSSES
from rl.algorithms.registry import AlgorithmError, settings_of

_CHOICES = {"group_size", "advantage", "loss", "corrections", "aggregation", "max_length"}
_CHOICES |= {"overlong", "kl", "kl_coef", "kl_in", "options"}
_ENTROPY = ("entropy_rate", "entropy_limit", "entropy_decay_from")
_CHOICES |= {"entropy_coef", "entropy_target", *_ENTROPY}


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """Which estimator, loss, corrections and regularisers to use.

    The default is DeepSeek-V4's recipe: rewards centred within a (task, effort) group, the clipped ratio
    against the sampler, the one-sided off-policy sequence mask, no KL.

    Attributes:
        group_size: trajectories per draw of a task.
        advantage: estimator, by name or import path `module:function`.
        loss: policy loss, by name or import path.
        corrections: off-policy weights and masks, multiplied together, by name or import path.
        aggregation: how token losses are averaged (`rl.algorithms.aggregation`).
        max_length: the constant of `seq_mean_token_sum_norm`.
        kl: estimator of the KL to the reference policy: none, k1, k2, k3, unbiased.
        kl_coef: weight of the KL.
        kl_in: `loss` adds it to the loss, `reward` subtracts it from the token's advantage.
        entropy_coef: weight of the entropy bonus; with a target, its weight in the first step.
        entropy_target: entropy in nats a token, below which the weight rises and above which it falls
            (`rl.algorithms.entropy`); 0 keeps the weight constant.
        entropy_rate: most that the weight changes in a step.
        entropy_limit: greatest weight.
        entropy_decay_from: share of `trainer.steps` after which the target falls, to 0 in the last step.
        overlong: penalty for answers near the greatest length, added to the rewards; null: none.
        options: settings of a user's own functions.
    """

    group_size: int = 8
    advantage: str = "mean_centered"
    loss: str = "ppo_clip"
    corrections: tuple[str, ...] = ("opsm",)
    aggregation: str = "token_mean"
    max_length: int | None = None
    kl: str = "none"
    kl_coef: float = 0.0
    kl_in: str = "loss"
    entropy_coef: float = 0.0
    entropy_target: float = 0.0
    entropy_rate: float = 1e-3
    entropy_limit: float = 0.05
    entropy_decay_from: float = 0.6
    overlong: OverlongConfig | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float | None = None
    tau_negative: float | None = None
    dppo_low: float | None = None
    dppo_high: float | None = None
    dppo_kl: float | None = None
    passk_std: bool | None = None
    gae_gamma: float | None = None
    gae_lambda: float | None = None
    gae_whiten: bool | None = None
    tis_cap: float | None = None
    sequence_tis_cap: float | None = None
    icepop_low: float | None = None
    icepop_high: float | None = None
    behave_cap: float | None = None
    geometric_low: float | None = None
    geometric_high: float | None = None
    opsm_delta: float | None = None
    max_staleness: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "corrections", tuple(self.corrections))
        _check_choices(self)
        _check_settings(self)
        _check_corrections(self)

    @property
    def anchored_at_trainer(self) -> bool:
        """Whether the ratio is taken against the trainer's own log-probabilities, not the sampler's."""
        return any(_needs_anchor(CORRECTIONS.load(name)) for name in self.corrections)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is needed, for a KL term."""
        return self.kl_coef != 0

    @property
    def needs_critic(self) -> bool:
        """Whether a critic must say the value of each token."""
        return needs_critic(ADVANTAGES.load(self.advantage))

    @property
    def regularised(self) -> bool:
        """Whether something beside a trajectory's advantage teaches, so that one of zero is kept."""
        entropy = self.entropy_coef != 0 or self.entropy_target != 0
        return self.kl_coef != 0 or entropy or self.needs_critic

    def settings_for(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The settings that this configuration gives to an algorithm; its own defaults fill the rest."""
        chosen = {**self._set(), **self.options}
        return {name: chosen[name] for name in settings_of(function) if name in chosen}

    def _set(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _CHOICES}
        return {name: value for name, value in values.items() if value is not None}

    def _functions(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield f"advantage {self.advantage!r}", ADVANTAGES.load(self.advantage)
        yield f"loss {self.loss!r}", LOSSES.load(self.loss)
        for name in self.corrections:
            yield f"correction {name!r}", CORRECTIONS.load(name)


def _needs_anchor(correction: Callable[..., Any]) -> bool:
    return getattr(correction, "importance", False) or getattr(correction, "needs_trainer_anchor", False)


def _check_choices(config: AlgorithmConfig) -> None:
    if config.group_size < 1:
        raise AlgorithmError(f"group_size is {config.group_size}; it must be at least 1")
    if config.group_size == 1 and needs_group(ADVANTAGES.load(config.advantage)):
        raise AlgorithmError(
            f"group_size 1 with advantage {config.advantage!r}, which compares the members of a group: every "
            "advantage would be 0; take a larger group or an estimator that needs none (reinforce_pp)"
        )
    if config.aggregation not in MODES:
        raise AlgorithmError(f"unknown aggregation {config.aggregation!r}; there are {', '.join(MODES)}")
    normed = config.aggregation == "seq_mean_token_sum_norm"
    if normed != (config.max_length is not None) or (config.max_length is not None and config.max_length < 1):
        raise AlgorithmError(
            f"max_length is {config.max_length} with aggregation {config.aggregation!r}; it is the positive "
            "constant of seq_mean_token_sum_norm and has no effect elsewhere"
        )
    _check_regularisers(config)


def _check_regularisers(config: AlgorithmConfig) -> None:
    if config.kl != "none" and config.kl not in KL_NAMES:
        raise AlgorithmError(f"unknown kl {config.kl!r}; there are none, {', '.join(KL_NAMES)}")
    if (config.kl == "none") != (config.kl_coef == 0):
        raise AlgorithmError(
            f"kl={config.kl!r} with kl_coef={config.kl_coef} has no effect; set both, or neither"
        )
    if config.kl_in not in ("loss", "reward"):
        raise AlgorithmError(f"kl_in is {config.kl_in!r}; it is 'loss' or 'reward'")
    if config.kl_in == "reward" and config.kl == "none":
        raise AlgorithmError("kl_in='reward' has no effect without a kl; set kl and kl_coef, or leave it out")
    for name in ("kl_coef", "entropy_coef"):
        if not 0 <= getattr(config, name) < math.inf:
            raise AlgorithmError(
                f"{name} is {getattr(config, name)}; it must not be negative, and must be finite"
            )
    _check_entropy(config)


def _check_entropy(config: AlgorithmConfig) -> None:
    if not 0 <= config.entropy_target < math.inf:
        raise AlgorithmError(f"entropy_target is {config.entropy_target}; it is in nats, at least 0")
    if not config.entropy_target:
        fields = config.__dataclass_fields__
        if given := [name for name in _ENTROPY if getattr(config, name) != fields[name].default]:
            raise AlgorithmError(
                f"{', '.join(given)} has no effect without a target: set entropy_target, or leave it out"
            )
        return
    if not (0 < config.entropy_rate < math.inf and 0 < config.entropy_limit < math.inf):
        raise AlgorithmError(
            f"entropy_rate is {config.entropy_rate} and entropy_limit {config.entropy_limit}; with an "
            "entropy_target both must be positive"
        )
    if config.entropy_coef > config.entropy_limit:
        raise AlgorithmError(
            f"entropy_coef is {config.entropy_coef}, above entropy_limit={config.entropy_limit}; begin with "
            "less"
        )
    if not 0 <= config.entropy_decay_from < 1:
        raise AlgorithmError(
            f"entropy_decay_from is {config.entropy_decay_from}; it is a share of the steps, from 0 to "
            "below 1"
        )


def _check_settings(config: AlgorithmConfig) -> None:
    owners = {name: settings_of(function) for name, function in config._functions()}
    known = {setting for settings in owners.values() for setting in settings}
    for setting in (*config._set(), *config.options):
        if setting not in known:
            raise AlgorithmError(
                f"setting {setting!r} has no effect with {', '.join(owners)}; remove it, or choose "
                f"an algorithm that has it. These have {', '.join(sorted(known)) or 'no settings'}"
            )
    if both := set(config._set()) & set(config.options):
        raise AlgorithmError(f"{', '.join(sorted(both))} is given twice, in options too; give it once")
    given = {**config._set(), **config.options}
    for owner, settings in owners.items():
        for setting, default in settings.items():
            if default is inspect.Parameter.empty and setting not in given:
                raise AlgorithmError(f"{owner} needs the setting {setting!r}; it has no default")
    _check_ranges(config._set())


def _check_ranges(settings: Mapping[str, Any]) -> None:
    positive = {"dual_clip", "tau_positive", "tau_negative", "tis_cap", "sequence_tis_cap", "behave_cap"}
    for name, value in settings.items():
        if not 0 <= value < math.inf or (name in positive and value == 0):
            raise AlgorithmError(
                f"{name} is {value}; it must be {'positive' if name in positive else 'at least 0'} and finite"
            )
    for name in ("gae_gamma", "gae_lambda", "dppo_low", "dppo_high"):
        if settings.get(name, 0.0) > 1:
            raise AlgorithmError(f"{name} is {settings[name]}; it is from 0 to 1")
    for name in ("icepop", "geometric"):
        low, high = settings.get(f"{name}_low", 0.0), settings.get(f"{name}_high", math.inf)
        if not low <= 1 <= high:
            raise AlgorithmError(
                f"{name}_low={low:g} and {name}_high={high:g} leave out the ratio 1, at which trainer and "
                f"sampler agree, so that the best tokens would be dropped; set {name}_low to at most 1 and "
                f"{name}_high to at least 1"
            )
    if settings.get("dual_clip", 2.0) <= 1:
        raise AlgorithmError(f"dual_clip is {settings['dual_clip']}; it must be above 1")


def _check_corrections(config: AlgorithmConfig) -> None:
    names = config.corrections
    if len(set(names)) != len(names):
        raise AlgorithmError(f"corrections {', '.join(names)} name one twice; give each once")
    importance = [name for name in names if getattr(CORRECTIONS.load(name), "importance", False)]
    if len(importance) > 1:
        raise AlgorithmError(
            f"corrections {' and '.join(importance)} both weigh by pi_old / pi_sampler; choose one of them"
        )
    if importance and getattr(LOSSES.load(config.loss), "anchored_at_sampler", False):
        raise AlgorithmError(
            f"correction {importance[0]!r} with loss {config.loss!r}, whose ratio is taken against the "
            "sampler already: the correction would count twice; remove it"
        )
