"""What each engine can do, so that a run that needs more is refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rl.launch.config import RunConfig

EngineName = Literal["native", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine offers beyond tokens, log-probabilities, interruption and new weights in flight.

    Attributes:
        own_policy: serves our own network.
        position_draws: the draw of a token depends on seed and position alone, so that a turn that goes on
            after an interruption has the tokens of one that was not interrupted.
        session_caches: caches of a session's running turn can be saved, moved and gone on with.
        speculation: drafts of the policy's own drafter.
        packed_caches: rounded keys on pages, and how much of a prompt the decoder replays.
        prefix_store: beginnings of histories in tiers that outlive the process.
        exact: the trainer's log-probabilities to the last bit.
        expert_ids: the experts that tokens went to.
        selections: the keys that attention selected.
        sampling_mask: the ids that truncation (top-k, top-p) left.
        images: images in the history.
        roles: prompts and images computed by other processes.
        shared_weights: samples with the trainer's own tensors, in its process.
        block_scales: counts block scales at their limits.
    """

    own_policy: bool = False
    position_draws: bool = False
    session_caches: bool = False
    speculation: bool = False
    packed_caches: bool = False
    prefix_store: bool = False
    exact: bool = False
    expert_ids: bool = False
    selections: bool = False
    sampling_mask: bool = False
    images: bool = False
    roles: bool = False
    shared_weights: bool = False
    block_scales: bool = False


CAPABILITIES: dict[EngineName, Capabilities] = {
    "native": Capabilities(**{field.name: True for field in fields(Capabilities)}),
    "vllm": Capabilities(expert_ids=True),
}


def check_engine(config: RunConfig) -> None:
    """Refuses a run that needs what its engine lacks.

    Raises:
        ValueError: Names every such setting and what to set.
    """
    name = config.engine.name
    able = CAPABILITIES[name]
    if wrong := [setting for flag, setting in _needs(config) if not getattr(able, flag)]:
        raise ValueError(f"engine={name} cannot do what this run needs: {'; '.join(wrong)}; or engine=native")
    _check_vllm(config)


def _needs(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The capabilities that a run needs, each with the setting that asks for it."""
    engine, launcher, choices = config.engine, config.launcher, config.trainer.replay_choices
    store, helpers = engine.prefix_store, launcher.prefill_replicas
    asked = [
        ("own_policy", config.policy.kind == "native", "policy=native (set policy=hf)"),
        ("speculation", engine.speculate != "off", f"engine.speculate={engine.speculate} (set off)"),
        ("speculation", engine.draft_length is not None, "engine.draft_length (leave it out)"),
        ("packed_caches", engine.storage != "dense", f"engine.storage={engine.storage} (set dense)"),
        ("packed_caches", engine.replay != "off", f"engine.replay={engine.replay} (set off)"),
        ("prefix_store", store != "off", f"engine.prefix_store={store} (set off)"),
        ("block_scales", engine.scales_every > 0, f"engine.scales_every={engine.scales_every} (set 0)"),
        ("sampling_mask", engine.top_p < 1, f"engine.top_p={engine.top_p:g} (set 1)"),
        ("sampling_mask", engine.top_k > 0, f"engine.top_k={engine.top_k} (set 0)"),
        ("exact", config.model.exact is True, "model.exact=true (set auto)"),
        ("packed_caches", config.trainer.fake_quant, "trainer.fake_quant=true (set false)"),
        ("expert_ids", choices == "experts", "trainer.replay_choices=experts (set off)"),
        ("selections", choices == "selections", "trainer.replay_choices=selections (set off)"),
        ("roles", helpers > 0, f"launcher.prefill_replicas={helpers} (set 0)"),
        ("shared_weights", launcher.placement == "colocated", "launcher.placement=colocated (set split)"),
    ]  # fmt: skip
    return ((flag, setting) for flag, needed, setting in asked if needed)


def _check_vllm(config: RunConfig) -> None:
    settings = config.engine.vllm
    if config.engine.name != "vllm":
        if settings != type(settings)():
            raise ValueError(
                "engine.vllm.* has no effect with engine=native: set engine=vllm, or leave it out"
            )
        return
    if config.trainer.replay_choices == "experts" and not settings.expert_ids:
        raise ValueError(
            "trainer.replay_choices=experts repeats the experts that the engine records: set "
            "engine.vllm.expert_ids=true, or trainer.replay_choices=off"
        )
    shares = settings.tensor_parallel * settings.data_parallel
    if config.launcher.weights == "collective" and shares > 1:
        raise ValueError(
            f"launcher.weights=collective reaches one worker of a replica, and engine.vllm.tensor_parallel="
            f"{settings.tensor_parallel} with engine.vllm.data_parallel={settings.data_parallel} makes "
            f"{shares}: set launcher.weights=shared_memory (one host) or object_store"
        )
