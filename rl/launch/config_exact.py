"""Whether a run computes in exact mode, decided in one place from its whole configuration.

Exact mode makes the trainer's log-probabilities those of the sampler to the last bit. That is worth having by
default where it costs little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rl.launch.config import RunConfig
    from rl.trainers.choices import ReplayChoices

Device = Literal["cpu", "cuda"]

BOUND = 1.25
"""Most that exact mode may cost where it is the default: its time / that of fast mode."""

COSTS: dict[Device, float] = {"cuda": 1.24, "cpu": 1.35}
"""What it costs at most: `benchmarks.model_gpu --parts exact` on a card, `benchmarks.exact` on a CPU."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """Whether trainer and sampler are exact, and why."""

    on: bool
    why: str

    def __str__(self) -> str:
        return f"exact mode is {'on' if self.on else 'off'}: {self.why}"


def exactness(config: RunConfig) -> Exactness:
    """What `model.exact` comes to in this run."""
    found = _decided(config)
    if repeated_choices(config, found.on) == config.trainer.replay_choices:
        return found
    note = "recorded choices are not repeated, for the trainer makes those of the recomputed caches itself"
    return Exactness(found.on, f"{found.why}; {note}")


def repeated_choices(config: RunConfig, exact: bool) -> ReplayChoices:
    """Which of the sampler's choices training repeats.

    Caches that new weights recompute hold what these choose. The trainer in exact mode chooses the same, and
    would not with what earlier weights chose for the tokens before.
    """
    recomputed = config.rollout.kv_on_update == "recompute" and config.rollout.staleness > 0
    return "off" if exact and recomputed else config.trainer.replay_choices


def _decided(config: RunConfig) -> Exactness:
    if config.model.exact != "auto":
        return Exactness(config.model.exact, f"model.exact={str(config.model.exact).lower()}")
    if config.policy.kind == "hf" or config.engine.name == "vllm":
        what = "vLLM" if config.engine.name == "vllm" else "a model of transformers"
        return Exactness(False, f"{what} has none")
    trainer, engine = config.trainer_device, config.engine_device
    if trainer != engine:
        return Exactness(False, f"the policy is trained on {trainer} and sampled from on {engine}")
    if trainer == "cuda" and (dtype := _dtype(config)) != "bfloat16":
        return Exactness(False, f"a policy in {dtype} does not run on kernels, whose cost is known")
    return of_device(trainer)


def of_device(device: Device) -> Exactness:
    """What model.exact=auto comes to where trainer and engine both compute on `device`."""
    cost = COSTS[device]
    on, where = cost <= BOUND, "a GPU" if device == "cuda" else "a CPU"
    return Exactness(on, f"on {where} it costs {cost}x, {'within' if on else 'more than'} {BOUND}x")


def check_exact(config: RunConfig) -> None:
    """Refuses a promise that no two devices keep.

    Raises:
        ValueError: The policy is to be exact, trained on one kind of device and sampled from on another.
    """
    if config.model.exact is True and config.trainer_device != config.engine_device:
        raise ValueError(
            f"model.exact=true, and the policy is trained on {config.trainer_device} and sampled from on "
            f"{config.engine_device}, whose sums differ in the last bits: reserve GPUs for both "
            "(launcher.learner_gpus, launcher.replica_gpus) or for neither, or set model.exact=auto"
        )


def _dtype(config: RunConfig) -> str:
    from model.checkpoint import CheckpointError, read_config

    if not config.model.path:
        return config.model.fresh().dtype
    try:
        return read_config(Path(config.model.path).expanduser()).dtype
    except (CheckpointError, ValueError):  # said when the run begins
        return "an unknown type"
