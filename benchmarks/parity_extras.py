"""Parity of the drafter and of image inputs, both with the weights of an unquantised model file."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from benchmarks.parity_data import Case, ModelFile, worst
from benchmarks.parity_model import LOGITS_LIMIT, TAP_LIMIT, CleanRun
from model.batch import Trace
from model.policy import PackedTokens
from model.vision import ImageTokens


@torch.inference_mode()
def check_drafter(file: ModelFile, name: str, data: dict[str, Tensor]) -> list[Case]:
    """Every draft step after a prefill."""
    drafter = file.policy.mtp
    if drafter is None:
        return [Case(name, False, "the model file has no drafter")]
    seed = data["in.prefill_main_hidden"]
    window = drafter.new_window(seed.shape[0])
    drafter.observe(window, seed, file.policy.fake_quant)
    cases = []
    for step, position in enumerate(data["in.position"].tolist()):
        trace = Trace()
        drafter.observe(window, data["in.main_hidden"][step], file.policy.fake_quant)
        anchor = data["in.anchor"][step].reshape(-1)
        draft = drafter.draft(file.policy, window, anchor, trace=trace)
        equal = torch.equal(draft.token_ids, data["out.out_ids"][step][:, 1:])
        equal = equal and torch.equal(anchor, data["out.out_ids"][step][:, 0])
        equal = equal and bool((window.next == position + 1).all())
        errors = [
            worst(draft.logits, data["out.logits"][step]) / LOGITS_LIMIT,
            worst(draft.confidence, data["out.confidence"][step]) / TAP_LIMIT,
        ]
        for key, value in data.items():
            if match := re.match(r"tap\.(mtp\.\d+\.(streams|next_A))$", key):
                errors.append(worst(trace.values[match[1]], value[step]) / TAP_LIMIT)
        detail = f"tokens {'equal' if equal else 'differ'}, worst {max(errors):.2f} of its limit"
        cases.append(Case(f"{name} step {step}", equal and max(errors) <= 1, detail))
    known = ("in.", "out.out_ids", "out.logits", "out.confidence", "tap.mtp.")
    return cases + [Case(f"{name} {key}", False, "no check") for key in data if not key.startswith(known)]


@torch.inference_mode()
def check_images(file: ModelFile, name: str, data: dict[str, Tensor]) -> list[Case]:
    """Tower and aligner of each image, then the policy over text and images."""
    policy = file.policy
    if policy.vision is None:
        return [Case(name, False, "the model file has no image tower")]
    numbers = sorted({int(match[1]) for key in data if (match := re.match(r"in\.image(\d+)\.patches", key))})
    cases, placed = [], []
    for number in numbers:
        patches, grid = data[f"in.image{number}.patches"], tuple(data[f"in.image{number}.grid_hw"].tolist())
        features = policy.vision(patches, grid)
        rows = policy.encode_image(patches, grid)
        errors = {"vision": features, "aligner": rows}
        for kind, value in errors.items():
            error = worst(value, data[f"out.image{number}.{kind}"])
            cases.append(Case(f"{name} image {number} {kind}", error <= TAP_LIMIT, f"worst {error:.1e}"))
        placed.append((tuple(data[f"in.image{number}.row_start"].tolist()), rows))
    ids = data["in.ids"]
    rows = torch.cat([rows for _, rows in sorted(placed, key=_place)])
    images = ImageTokens(data["in.token_types"].flatten(), rows)
    trace = Trace()
    tokens = PackedTokens(ids.flatten(), torch.arange(ids.shape[0] + 1) * ids.shape[1], images)
    logits = policy.logits(policy(tokens, trace=trace).hidden)
    run = CleanRun(file, data, trace, logits, name)
    return cases + run.cases() + [_extended(file, name, data, images)]


def _place(item: tuple[tuple[int, ...], Tensor]) -> tuple[int, ...]:
    return item[0]


def _extended(file: ModelFile, name: str, data: dict[str, Tensor], images: ImageTokens) -> Case:
    """The same through a cache."""
    ids, policy = data["in.ids"], file.policy
    cache = policy.new_cache(*ids.shape)
    slots = torch.tensor([cache.allocate() for _ in range(ids.shape[0])])
    lengths = torch.full((ids.shape[0],), ids.shape[1])
    hidden = policy.extend(
        cache, slots, ids, lengths, images=ImageTokens(images.types.view(ids.shape), images.rows)
    )
    error = worst(policy.logits(hidden), data["out.logits"][:, -1])
    return Case(f"{name} prefill", error <= LOGITS_LIMIT, f"worst {error:.1e}")
