"""The folder that vLLM serves: what its weights are called and their shapes, read from the files' headers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from safetensors import safe_open

from model.hf.folder import ADAPTER_CONFIG, is_hf_folder
from rl.engines.vllm_settings import Dtype

_HEAD = "lm_head.weight"


class ModelFolderError(ValueError):
    """A folder that holds no model for vLLM, or not for so many tokens: what to give or to set."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A Hugging Face folder.

    Attributes:
        folder: Where.
        vocab_size: Token ids are below it.
        shapes: Of all tensors by name.
        tied: Whether the output layer is the embedding.
        context: The most tokens of a sequence that it was made for.
        dtype: Of its weights; None: its configuration says none that vLLM computes in.
    """

    folder: Path
    vocab_size: int
    shapes: Mapping[str, tuple[int, ...]]
    tied: bool
    context: int
    dtype: Dtype | None

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a folder's description.

        Raises:
            ModelFolderError: It is none of transformers, lacks weights, or has adapters only.
        """
        if (folder / ADAPTER_CONFIG).is_file():
            raise ModelFolderError(
                f"{folder} holds adapters: give the folder that `temper export {folder} --out DIR` writes"
            )
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ModelFolderError(f"{file} cannot be read ({error}): give a Hugging Face folder") from error
        if not is_hf_folder(folder):
            raise ModelFolderError(
                f"{folder} holds no model of transformers (its {file.name} names none, or our own network), "
                "and engine=vllm serves nothing else: take engine=native"
            )
        text = config.get("text_config", config)
        if missing := {"vocab_size", "max_position_embeddings"} - text.keys():
            raise ModelFolderError(
                f"{file} has no {min(missing)}: give the folder of a causal language model"
            )
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelFolderError(f"{folder} has no *.safetensors: save the weights there")
        context = int(text["max_position_embeddings"])
        shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
        stored = config.get("dtype", config.get("torch_dtype"))
        dtype = stored if stored in get_args(Dtype) else None
        return cls(folder, int(text["vocab_size"]), shapes, bool(_tied(config, text)), context, dtype)

    def check_context(self, max_tokens: int) -> None:
        """Returns when sequences of so many tokens are no longer than the model was made for.

        Raises:
            ModelFolderError: They are.
        """
        if max_tokens > self.context:
            raise ModelFolderError(
                f"the model in {self.folder} was made for {self.context} tokens (max_position_embeddings), "
                f"and {max_tokens} are asked for: set engine.max_tokens (temper eval: max_tokens, temper "
                f"serve: --context) to {self.context} or less"
            )

    def misfit(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Says what does not fit in weights of these shapes; nothing when all does."""
        known, given = dict(self.shapes), dict(shapes)
        if self.tied:
            known.pop(_HEAD, None)
            given.pop(_HEAD, None)
        if missing := sorted(known.keys() - given.keys()):
            return f"{missing[0]} is missing ({len(missing)} in all)"
        if unknown := sorted(given.keys() - known.keys()):
            return f"{unknown[0]} is not known to the model ({len(unknown)} in all)"
        for name, shape in known.items():
            if tuple(given[name]) != shape:
                return f"{name} is {tuple(given[name])}, the model's {shape}"
        return ""


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="np") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
