"""Policies and documents for the diagnostics: from disk, or made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from model.batch import PackedTokens
from model.checkpoint import load_policy
from model.config import PolicyConfig
from model.policy import Policy


class NotFiniteError(ArithmeticError):
    """A policy that cannot even write a document."""


_MADE_HERE = ("nano", "pico")


def open_policy(name: str, seed: int) -> Policy:
    """The policy in the folder `name`, or the preset `name` with weights drawn from `seed`.

    Raises:
        ValueError: it is neither, or the folder does not hold a checkpoint.
    """
    if Path(name).is_dir():
        return load_policy(name)
    if name not in _MADE_HERE:
        raise ValueError(
            f"{name!r} is neither a checkpoint folder nor one of the presets {', '.join(_MADE_HERE)}"
        )
    policy = Policy(PolicyConfig.preset(name))
    policy.reset_parameters(seed)
    return policy


def pack(documents: Sequence[Tensor]) -> PackedTokens:
    """Documents laid end to end."""
    bounds = [0, *accumulate(len(document) for document in documents)]
    return PackedTokens(torch.cat(list(documents)), torch.tensor(bounds))


def read_documents(file: Path, vocab_size: int, tokens: int, length: int) -> list[Tensor]:
    """Documents from a file with one JSON list of token ids a line, cut at `length`, up to `tokens` in all.

    Raises:
        ValueError: a line is no list of token ids of this policy, or no document has two tokens.
    """
    documents, total = [], 0
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or total >= tokens:
            continue
        ids = _ids(line, f"{file}, line {number}", vocab_size)[:length]
        if len(ids) > 1:
            documents.append(torch.tensor(ids))
            total += len(ids)
    if not documents:
        raise ValueError(f"{file} holds no document of two tokens or more: give one JSON list of ids a line")
    return documents


def _ids(line: str, where: str, vocab_size: int) -> list[int]:
    try:
        ids = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): give one list of token ids a line") from error
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ValueError(f"{where} is not a list of token ids 0 .. {vocab_size - 1}")
    return ids


@torch.inference_mode()
def write_documents(policy: Policy, count: int, length: int, seed: int, *, greedy: bool = False) -> Tensor:
    """[count, length] documents that the policy writes: a first token drawn evenly, then its own choices.

    They go on after an end token: what is measured is the network, not what it has to say.

    Raises:
        NotFiniteError: the policy gives logits that are not finite.
    """
    generator = torch.Generator(device=policy.device).manual_seed(seed)
    vocab = policy.config.vocab_size
    ids = torch.randint(0, vocab, (count, 1), generator=generator, device=policy.device)
    cache = policy.new_cache(count, length)
    slots = torch.tensor([cache.allocate() for _ in range(count)], device=policy.device)
    one = torch.ones(count, dtype=torch.int64)
    for _ in range(length - 1):
        logits = policy.logits(policy.extend(cache, slots, ids[:, -1:], one))
        if not bool(logits.isfinite().all()):
            raise NotFiniteError(
                "the policy gives logits that are not finite: nothing can be drawn from them"
            )
        if greedy:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = logits.softmax(-1).multinomial(1, generator=generator)
        ids = torch.cat([ids, new], dim=1)
    return ids.clone()
