"""A trained policy as a plain folder with a model card, for whoever has never heard of this project.

A model of `transformers` is written by the names of its own files, adapters added in; ours in its published
layout. The folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from model.chat import ChatFormat, NanoChat, load_chat
from model.checkpoint import read_config
from model.durable import new_folder
from model.hf.folder import is_hf_folder, open_hf, save_hf
from rl.evals.target import Target, TargetError
from rl.watch.jsonl import FILE_NAME, Row, read_rows

CARD = "README.md"
_NANO_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}<obs>{{ m.content }}</obs>"
    "{% elif m.role == 'assistant' %}{{ m.reasoning_content or '' }}<answer>{{ m.content }}<end>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)

_USE = (
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    "model = AutoModelForCausalLM.from_pretrained(FOLDER)",
    "tokenizer = AutoTokenizer.from_pretrained(FOLDER)",
)
_USE_OURS = (
    "from pathlib import Path",
    "",
    "from model.chat import load_chat",
    "from model.checkpoint import load_policy",
    "",
    "policy, chat = load_policy(Path(FOLDER)), load_chat(Path(FOLDER))",
)
"""`transformers` does not know our network."""


def export(target: Target, out: Path) -> list[str]:
    """Writes the policy of `target` to the new folder `out`; returns what to say of it.

    Raises:
        TargetError: There is something in `out` already, or it cannot be written.
        CheckpointError: The policy cannot be read.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TargetError(f"{out} is there already: give a new folder")
    try:
        with new_folder(out) as partial:
            lines = _write(target, partial)
    except OSError as error:
        raise TargetError(f"{out} cannot be written ({error}): make room, or give another folder") from error
    return [*lines, str(out)]


def _write(target: Target, folder: Path) -> list[str]:
    chat = load_chat(target.policy)
    if is_hf_folder(target.policy):
        policy = open_hf(target.policy)
        save_hf(policy, folder, chat)
        _write_nano_template(chat, folder)
        kind, count = type(policy.model).__name__, sum(p.numel() for p in policy.model.parameters())
        base = policy.base if policy.lora is not None else ""
    else:
        read_config(target.policy)
        shutil.copytree(target.policy, folder, dirs_exist_ok=True)
        kind, count, base = "DeepseekV41ForCausalLM", 0, ""
    (folder / CARD).write_text(card(target, chat, kind, count, base), encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return [f"{kind}, {size / 1e6:.1f} MB of weights, from {target.name}"]


def _write_nano_template(chat: ChatFormat, folder: Path) -> None:
    """What `transformers` needs to read the tokenizer of our small presets."""
    if isinstance(chat, NanoChat):
        tokens = {"eos_token": "<end>", "pad_token": "<pad>", "bos_token": "<bos>", "unk_token": "<unk>"}
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _NANO_TEMPLATE, **tokens}
        (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=1), encoding="utf-8")


def card(target: Target, chat: ChatFormat, kind: str, count: int, base: str) -> str:
    """The model card: where the model comes from, what was measured, how to use it, what is not known."""
    stops = ", ".join(f"`{chat.tokenizer.decode([i])}`" for i in sorted(chat.stop_ids))
    weights = f", {count / 1e6:.1f} million parameters" if count else ""
    library = ["library_name: transformers"] if count else []
    lines = ["---", *library, "pipeline_tag: text-generation", "tags: [tempering]", "---"]
    lines += [f"# {target.name}", "", f"A `{kind}`{weights}, trained with Tempering."]
    if base:
        lines.append(f"Its adapters, trained on `{base}`, are added to the weights.")
    lines += ["", "## Training", "", *_training(target), "", "## Measured", "", *_measured(target)]
    lines += ["", "## Use", "", "```python", *(_USE if count else _USE_OURS), "```", ""]
    lines += [
        f"A turn ends with {stops}. `temper serve FOLDER` serves it to OpenAI's clients.",
        "",
        "## Limits",
        "",
        "It was trained and measured on the environments above and on nothing else; no evaluation of "
        "safety was made. Its licence is that of the model and the data it comes from: add it here before "
        "you publish.",
    ]
    return "\n".join(lines) + "\n"


def _training(target: Target) -> list[str]:
    if target.run is None:
        return ["The folder does not say how it was trained."]
    config = target.config()
    learned = f"{config.trainer.steps} steps of {config.algorithm.advantage} at most"
    return [
        f"- run `{target.run.name}`, checkpoint of step {target.step}",
        f"- environment {config.env.title}, seed {config.run.seed}",
        f"- {config.sft.steps} steps of imitation, then {learned}, groups of {config.algorithm.group_size}",
        f"- started from {config.model.path or f'fresh weights ({config.model.preset})'}",
    ]


def _measured(target: Target) -> list[str]:
    found: dict[str, tuple[int, float, float]] = {}
    for row in _evaluations(target):
        for name, value in row.metrics.items():
            if name.startswith("eval/") and name.endswith("/score.mean"):
                count = row.metrics.get(name.replace("score.mean", "n"), 0.0)
                found[name.removeprefix("eval/").removesuffix("/score.mean")] = (row.step, value, count)
    if not found:
        return ["Nothing was measured in this run."]
    table = ["| evaluation | after step | score | samples |", "|---|---|---|---|"]
    return table + [f"| {name} | {s} | {v:.3f} | {n:.0f} |" for name, (s, v, n) in sorted(found.items())]


def _evaluations(target: Target) -> list[Row]:
    rows = [] if target.run is None else read_rows(target.run / FILE_NAME)
    return [row for row in rows if row.family == "eval"]
