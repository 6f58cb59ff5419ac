"""Which kind of policy a run trains, and what that kind does not do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model.hf.settings import PRESETS, Dtype, LoraSettings
from rl.launch.section import Section

if TYPE_CHECKING:
    from rl.launch.config import RunConfig


class PolicySection(Section):
    """The kind of the policy; where its weights come from stands in `model`.

    Attributes:
        kind: our own network (`native`), or any causal language model of `transformers` (`hf`): the folder
            `model.path`, or a small one made on the spot (`model.preset=hf_tiny`, `hf_tiny_moe`).
        dtype: of an hf policy's weights in memory.
        lora: train low-rank adapters and publish these alone; none trains all weights.
        history: what to do when a chat template would write earlier turns otherwise than they were sampled
            (it drops reasoning, say): end with an error, go on in a new branch that begins with the
            template's version (`fork`), or keep what was sampled (`keep`).
        thinking: given to the chat template as `enable_thinking`; null leaves it to the template.
    """

    kind: Literal["native", "hf"] = "native"
    dtype: Dtype = "float32"
    lora: LoraSettings | None = None
    history: Literal["error", "fork", "keep"] = "error"
    thinking: bool | None = None


def check_policy(config: RunConfig) -> None:
    """Refuses settings that belong to the other kind of policy.

    Raises:
        ValueError: Names every such setting and what to set.
    """
    if config.policy.kind == "native":
        _check_native(config)
    else:
        _check_hf(config)


def _check_native(config: RunConfig) -> None:
    if config.policy != PolicySection():
        raise ValueError(
            "policy.dtype, lora, history and thinking belong to models of transformers: set policy=hf, or "
            "leave them out"
        )
    if config.model.preset in PRESETS and not config.model.path:
        raise ValueError(f"model.preset={config.model.preset} is a model of transformers: set policy=hf")


def _check_hf(config: RunConfig) -> None:
    model, engine, trainer, sft = config.model, config.engine, config.trainer, config.sft
    if not model.path and model.preset not in PRESETS:
        raise ValueError(
            f"policy=hf with model.preset={model.preset}: give model.path, or a preset of "
            f"{', '.join(PRESETS)}"
        )
    if config.policy.lora is not None and not model.path:
        raise ValueError("policy.lora adds adapters to a model that has learned something: give model.path")
    lacks = {
        "model.exact=true (set auto)": model.exact is True,
        f"model.sliding_window={model.sliding_window} (leave it out)": model.sliding_window is not None,
        "trainer.fake_quant=true (set false)": trainer.fake_quant,
        "sft.fake_quant=true (set false)": sft.fake_quant,
        f"trainer.replay_choices={trainer.replay_choices} (set off)": trainer.replay_choices != "off",
        f"trainer.scales_every={trainer.scales_every} (set 0)": trainer.scales_every,
        "trainer.balance_coef or sft.balance_coef (set 0)": trainer.balance_coef or sft.balance_coef,
        "trainer.indexer_coef or sft.indexer_coef (set 0)": trainer.indexer_coef or sft.indexer_coef,
        "drafts (set trainer.draft.anchors=0 sft.draft.anchors=0)": trainer.draft.anchors
        or sft.draft.anchors,
        f"trainer.parallel.expert={trainer.parallel.expert} (set 1)": trainer.parallel.expert > 1,
        f"engine.speculate={engine.speculate} (set off)": engine.speculate != "off",
        f"engine.storage={engine.storage} (set dense)": engine.storage != "dense",
        f"engine.replay={engine.replay} (set off)": engine.replay != "off",
        f"engine.prefix_store={engine.prefix_store} (set off)": engine.prefix_store != "off",
        f"engine.scales_every={engine.scales_every} (set 0)": engine.name == "native" and engine.scales_every,
        "opd.balance_coef or opd.indexer_coef (set 0)": config.opd.balance_coef or config.opd.indexer_coef,
        "drafts of a distillation (set opd.draft.anchors=0)": config.opd.draft.anchors,
    }
    if wrong := [name for name, given in lacks.items() if given]:
        raise ValueError(f"policy=hf has no place for {'; '.join(wrong)}")
    if model.path and not Path(model.path).expanduser().is_dir():
        raise ValueError(f"model.path={model.path} is no folder (seen from {Path.cwd()})")
