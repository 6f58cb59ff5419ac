"""Plain folders of `transformers`, read and written: weights, configuration, tokenizer and chat format.

Nothing is fetched: a folder has everything, or the name of a local folder that its adapters belong to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from model.chat import ChatFormat
from model.checkpoint_files import CheckpointError, MissingTensor
from model.checkpoint_writer import ShardWriter
from model.hf.adapters import FILE_PREFIX, adapter_config
from model.hf.policy import HFPolicy
from model.hf.settings import Dtype, HFPolicyError, LoraSettings
from model.hf.weights import published

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SHARD_BYTES = 4 << 30
_OURS = "deepseek_v41"


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder holds a model of `transformers`, or adapters for one, and not a policy of ours."""
    if (folder / ADAPTER_CONFIG).is_file():
        return True
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(described, dict) and described.get("model_type") not in (None, _OURS)


def open_hf(folder: Path, *, dtype: Dtype | None = None, lora: LoraSettings | None = None) -> HFPolicy:
    """Reads a policy from a folder of weights, or of adapters (which names the folder of their model).

    Args:
        folder: where it is.
        dtype: of the weights in memory; None: as stored.
        lora: fresh adapters to add.

    Raises:
        CheckpointError: Files are missing or do not fit together.
        HFPolicyError: The model does something that this policy does not reproduce.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        return _open_adapters(folder, dtype, lora)
    policy = HFPolicy(_load_model(folder, dtype), lora)
    policy.base = str(folder.resolve())
    return policy


def save_hf(policy: HFPolicy, folder: Path, chat: ChatFormat | None = None, *, merge: bool = True) -> None:
    """Writes a plain folder.

    Args:
        policy: what to write.
        folder: where; made if need be.
        chat: its wording and tokenizer are written too.
        merge: add adapters to the weights; otherwise they alone are written, and the name of their model's
            folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if policy.lora is not None and not merge:
        _write_adapters(policy, folder)
    else:
        with ShardWriter(folder, _SHARD_BYTES) as writer:
            for name, tensor in published(policy).items():
                writer.add(name, tensor)
            writer.finish()
    if chat is not None:
        chat.save(folder)
    described = policy.model.config.to_dict()
    described["architectures"] = [type(policy.model).__name__]
    described["dtype"] = str(next(iter(policy.model.parameters())).dtype).removeprefix("torch.")
    described = {name: value for name, value in described.items() if not name.startswith("_")}
    (folder / CONFIG).write_text(json.dumps(described, indent=1, default=str))


def _load_model(folder: Path, dtype: Dtype | None) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: it is not a folder of a model")
    kind = "auto" if dtype is None else getattr(torch, dtype)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=kind,
            local_files_only=True,
            trust_remote_code=False,  # nor is anybody asked whether code of the folder may run
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be read as a causal language model ({error})") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise MissingTensor(f"{folder} lacks {len(missing)} tensors of this model, first {missing[0]!r}")
    if wrong := sorted(map(str, report["mismatched_keys"])):
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors have another shape than {CONFIG} says: {wrong[0]}"
        )
    return model


def _open_adapters(folder: Path, dtype: Dtype | None, lora: LoraSettings | None) -> HFPolicy:
    from safetensors.torch import load_file

    if lora is not None:
        raise HFPolicyError(
            f"{folder} holds adapters already: write the merged weights with `temper export`, and add fresh "
            "adapters to these, or leave policy.lora out"
        )
    described = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = Path(described["base_model_name_or_path"] or "")
    if not (base / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds adapters for the model in {base}, which is not there: put it back, or change "
            f"base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    targets = described["target_modules"]
    known = LoraSettings(
        rank=described["r"],
        alpha=described["lora_alpha"],
        targets=() if isinstance(targets, str) else tuple(sorted(targets)),
    )
    policy = open_hf(base, dtype=dtype, lora=known)
    stored = load_file(folder / ADAPTER_WEIGHTS)
    policy.load_state_dict({name.removeprefix(FILE_PREFIX): value for name, value in stored.items()})
    return policy


def _write_adapters(policy: HFPolicy, folder: Path) -> None:
    from safetensors.torch import save_file

    assert policy.lora is not None
    described = adapter_config(policy.lora)
    described.base_model_name_or_path = policy.base
    described.inference_mode = True
    described.save_pretrained(str(folder))
    tensors = {FILE_PREFIX + name: value.cpu().contiguous() for name, value in policy.state_dict().items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
