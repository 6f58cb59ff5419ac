"""Parity of an unquantised model file: choices first, then every intermediate result, then the logits."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from benchmarks.parity_data import CHOICES, DECODE_KEY, Case, ModelFile, choices, fitted, worst
from benchmarks.parity_margins import margin
from model.batch import Trace
from model.policy import PackedTokens

LOGITS_LIMIT = 2e-5
TAP_LIMIT = 1e-4
_SAFE_MARGIN = 1e-5
"""Choices may differ only where the reference itself was this close to choosing otherwise."""


class CleanRun:
    """One traced forward pass over a model file's tokens, and the reference beside it."""

    def __init__(
        self, file: ModelFile, reference: dict[str, Tensor], trace: Trace, logits: Tensor, name: str
    ) -> None:
        self.file, self.reference, self.ours, self.logits = file, reference, trace.values, logits
        self.name = name
        self.batch, self.length = reference["in.ids"].shape
        self.agree = torch.ones(self.batch, self.length, dtype=torch.bool)

    @staticmethod
    def of(file: ModelFile) -> CleanRun:
        """Run the file's own tokens."""
        trace = Trace()
        ids = file.token_ids
        tokens = PackedTokens(ids.flatten(), torch.arange(ids.shape[0] + 1) * ids.shape[1])
        with torch.inference_mode():
            logits = file.policy.logits(file.policy(tokens, trace=trace).hidden)
        return CleanRun(file, file.tensors, trace, logits, file.stem)

    def cases(self) -> list[Case]:
        """All checks; the order matters, since choices decide which rows the values are compared over."""
        name = self.name
        layers = sorted(
            {int(match[1]) for key in self.reference if (match := re.match(r"tap\.layers\.(\d+)\.", key))}
        )
        cases = [self._engram_ids(name)] if "tap.engram_hash_ids" in self.reference else []
        cases += [self._layer(name, layer) for layer in layers]
        cases += self._outputs(name)
        return cases + self._unknown(name)

    def _engram_ids(self, name: str) -> Case:
        expected = self.reference["tap.engram_hash_ids"]
        equal = torch.equal(self.ours["engram_hash_ids"].view_as(expected), expected)
        return Case(f"{name} engram rows", equal, "exact")

    def _outputs(self, name: str) -> list[Case]:
        cases = []
        for key, ours, limit in (
            ("out.logits", self.logits, LOGITS_LIMIT),
            ("out.main_hidden", self.ours.get("main_hidden"), TAP_LIMIT),
        ):
            if key in self.reference:
                error = torch.inf if ours is None else worst(ours, self.reference[key], self.agree)
                share = float(self.agree.float().mean())
                cases.append(
                    Case(f"{name} {key[4:]}", error <= limit, f"worst {error:.1e}, rows compared {share:.3f}")
                )
        return cases

    def _unknown(self, name: str) -> list[Case]:
        known = {"tap.engram_hash_ids", "out.logits", "out.main_hidden"}
        rest = [key for key in self.reference if key.startswith(("tap.", "out.")) and key not in known]
        rest = [key for key in rest if not re.match(r"tap\.layers\.\d+\.|out\.image", key)]
        return [Case(f"{name} {key}", False, "no check for this tensor") for key in rest]

    def _layer(self, name: str, layer: int) -> Case:
        taps = {key: value for key, value in self.reference.items() if key.startswith(f"tap.layers.{layer}.")}
        taps = {key.rsplit(".", 1)[1]: value for key, value in taps.items()}
        problems, largest = [], 0.0
        for kind in (kind for kind in CHOICES if kind in taps):
            problems += self._choice(layer, kind, taps)
        for kind, expected in taps.items():
            if kind in CHOICES:
                continue
            ours = (
                margin(self.file.config, layer, kind, self.ours, self.length)
                if kind.endswith("_margin")
                else self._value(layer, kind, taps)
            )
            if ours is None:
                problems.append(f"no check for {kind}")
                continue
            ours = fitted(kind, ours, expected)
            error = worst(ours, expected, self._rows_of(ours))
            largest = max(largest, error)
            problems += [f"{kind} {error:.1e}"] if error > TAP_LIMIT else []
        detail = f"worst {largest:.1e}" + (f"; {', '.join(problems)}" if problems else "")
        return Case(f"{name} layer {layer}", not problems, detail)

    def _choice(self, layer: int, kind: str, taps: dict[str, Tensor]) -> list[str]:
        """Compare a discrete choice, and exclude what follows a legitimate difference."""
        ours = self.ours.get(f"layers.{layer}.{kind}")
        pair = choices(self.file.config, layer, kind, ours, taps[kind], self.length)
        if pair is None:
            return [f"no {kind}"]
        differs = (pair[0] != pair[1]).any(-1) & self.agree
        margin = taps.get(CHOICES[kind])
        bad = differs if margin is None else differs & (margin > _SAFE_MARGIN)
        self.agree &= differs.cumsum(1) == 0
        return [f"{kind} differs in {int(bad.sum())} rows"] if bad.any() else []

    def _rows_of(self, value: Tensor) -> Tensor | None:
        """Which rows of a tap to compare; taps over groups of tokens are compared as a whole."""
        return self.agree if value.shape[:2] == self.agree.shape else None

    def _value(self, layer: int, kind: str, taps: dict[str, Tensor]) -> Tensor | None:
        ours = self.ours.get(f"layers.{layer}.{kind}")
        if kind != "router_weights" or ours is None:
            return ours
        if "router_ids" not in taps:
            return ours.view(taps[kind].shape).sort(-1).values.gather(-1, taps[kind].argsort(-1).argsort(-1))
        # Order by expert, then undo the reference's own order.
        by_expert = ours.gather(1, self.ours[f"layers.{layer}.router_ids"].argsort(1)).view(taps[kind].shape)
        return by_expert.gather(-1, taps["router_ids"].argsort(-1).argsort(-1))


def check_decode(file: ModelFile, key: str, expected: Tensor) -> Case:
    """A prefill and single-token steps against the reference's own."""
    match = DECODE_KEY.search(key)
    if match is None:
        return Case(f"decode {key}", False, "the key names no prefill length")
    ours = decode_logits(file, int(match[1]))
    error = worst(ours, expected)
    return Case(f"decode {key}", error <= LOGITS_LIMIT, f"worst {error:.1e}")


@torch.inference_mode()
def decode_logits(file: ModelFile, prefill: int) -> Tensor:
    """[B, 1 + S - prefill, V]: logits of the prefill's last token, then one token at a time."""
    ids, policy = file.token_ids, file.policy
    batch, length = ids.shape
    cache = policy.new_cache(batch, length)
    slots = torch.tensor([cache.allocate() for _ in range(batch)])
    hidden = [policy.extend(cache, slots, ids[:, :prefill], torch.full((batch,), prefill))]
    one = torch.ones(batch, dtype=torch.int64)
    hidden += [policy.extend(cache, slots, ids[:, at : at + 1], one) for at in range(prefill, length)]
    return policy.logits(torch.stack(hidden, dim=1))
