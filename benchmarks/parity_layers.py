"""Parity of a quantised model file, layer by layer.

End to end such a model is chaotic: one rounding step early flips a code or a route later. So every layer is
fed the reference's own input and shared state, and compared with the reference's output.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from benchmarks.parity_data import Case, ModelFile, worst
from benchmarks.parity_model import decode_logits
from model.batch import Batch, Trace
from model.cache.main_kv import TensorKeys
from model.config import AttentionMode
from model.layers.attention import Globals, RunOptions
from model.layers.hyper_connections import collapse
from model.layers.selection import Selection
from model.policy import PackedTokens

LIMITS = {"quant_bf16": (0.01, 0.02), "quant_fp8_fp4": (0.04, 0.10)}
"""Relative RMS difference per row: median and 95th percentile."""
_BF16_STEPS = 4 * 2.0**-8
"""The reference scores in bfloat16: a choice, or a margin, may differ by a few steps of the scores."""
_CHOICES = {"router_ids": "router_margin", "index_topk": "index_margin", "candidate_mask": "candidate_margin"}


class LayerRun:
    """Every layer of one file, each on the reference's own input."""

    def __init__(self, file: ModelFile) -> None:
        self.file, self.config, self.reference = file, file.config, file.tensors
        self.batch, self.length = file.token_ids.shape
        self.limits = LIMITS[file.mode]

    def cases(self) -> list[Case]:
        """One case a layer, and the head."""
        with torch.inference_mode():
            return [self._layer(layer) for layer in range(self.config.num_hidden_layers)] + self._ends()

    def _tap(self, layer: int, name: str) -> Tensor:
        return self.reference[f"tap.layers.{layer}.{name}"]

    def _input(self, layer: int) -> tuple[Tensor, Tensor]:
        if layer == 0:
            table: Tensor = self.file.policy.embed.weight  # pyright: ignore[reportAssignmentType]
            embedded = table[self.file.token_ids.flatten()]
            weights = torch.zeros(len(embedded), self.config.hc_mult)
            weights[:, 0] = 1.0
            return embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1), weights
        return self._tap(layer - 1, "streams").flatten(0, 1), self._tap(layer - 1, "next_A").flatten(0, 1)

    def _shared(self, layer: int, batch: Batch) -> Globals:
        config = self.config
        if config.mode(layer) in (AttentionMode.WINDOW, AttentionMode.FULL):
            return Globals()
        owner, candidates = config.kv_owner(layer), None
        main = self._tap(owner, "main_kv")
        if config.uses_candidates(layer):
            mask = self._tap(config.candidate_source_layer_id, "candidate_mask")
            blocks = mask[..., :: config.candidate_block_size]
            candidates = torch.where(blocks, torch.arange(blocks.shape[-1]), -1)
        visible = batch.rows[0].visible(config.ratio(layer))
        index = self._tap(config.index_owner(layer), "index_topk").long()
        keys = TensorKeys(self._tap(owner, "index_k"))
        return Globals(TensorKeys(main), keys, Selection(visible, main.shape[1], index), candidates)

    def _key_input(self, layer: int, x: Tensor) -> Tensor:
        """What the compressor of `layer` reads, whose attention reads `x`."""
        start = self.config.decoder_start
        if start is None or layer <= start:
            return x
        streams, weights = self._input(start)
        if f"tap.layers.{start}.engram_out" in self.reference:
            streams = self._tap(start, "engram_out").flatten(0, 1)
        return self.file.policy.blocks[start].attention_input(streams, weights)

    def _layer(self, layer: int) -> Case:
        trace, ids, policy = Trace(), self.file.token_ids, self.file.policy
        tokens = PackedTokens(ids.flatten(), torch.arange(self.batch + 1) * self.length)
        batch = Batch.of_documents(tokens, self.config.sliding_window, trace)
        block, (streams, weights) = policy.blocks[layer], self._input(layer)
        problems: list[str] = []
        if f"tap.layers.{layer}.engram_out" in self.reference:
            rows = policy._document_engram(tokens.token_ids, batch)
            if rows is None or not torch.equal(rows, self.reference["tap.engram_hash_ids"].flatten(0, 1)):
                problems.append("engram rows differ")
            block.inject(streams, batch, rows)
            streams = self._tap(layer, "engram_out").flatten(0, 1)
        options = RunOptions(policy.fake_quant, policy.dense_limit)
        x = block.attention_input(streams, weights)
        if self.config.mode(layer) is AttentionMode.FULL:
            shared = block.attn.add_keys(self._key_input(layer, x), batch, None, options)
        else:
            shared = [self._shared(layer, batch)]
        block(streams, x, batch, shared, None, options)
        return self._compare(layer, trace.values, problems)

    def _compare(self, layer: int, ours: dict[str, Tensor], problems: list[str]) -> Case:
        prefix = f"layers.{layer}."
        head = "tap." + prefix
        taps = {
            key.removeprefix(head): value for key, value in self.reference.items() if key.startswith(head)
        }
        agree = torch.ones(self.batch, self.length, dtype=torch.bool)
        for kind in (kind for kind in _CHOICES if kind in taps):
            problems += self._choice(layer, kind, ours[prefix + kind], taps, agree)
        largest = 0.0
        for kind, expected in taps.items():
            if kind in _CHOICES or kind.endswith("_margin"):
                continue
            if prefix + kind not in ours:
                problems.append(f"no check for {kind}")
                continue
            value = ours[prefix + kind]
            if kind == "router_weights":
                order = ours[prefix + "router_ids"].argsort(-1)
                value = value.gather(-1, order)
                expected = expected.gather(-1, taps["router_ids"].argsort(-1).long())
            median, high = self._difference(value, expected, agree)
            largest = max(largest, median)
            if median > self.limits[0] or high > self.limits[1]:
                problems.append(f"{kind} median {median:.1e}, 95 % {high:.1e}")
        share = float(agree.float().mean())
        detail = f"worst median {largest:.1e}, rows with equal choices {share:.3f}"
        detail += f"; {', '.join(problems)}" if problems else ""
        return Case(f"{self.file.stem} layer {layer}", not problems, detail)

    def _choice(
        self, layer: int, kind: str, ours: Tensor, taps: dict[str, Tensor], agree: Tensor
    ) -> list[str]:
        expected, ours = taps[kind], ours.view(taps[kind].shape)
        if kind == "router_ids":
            ours, expected = ours.sort(-1).values, expected.sort(-1).values
        elif kind == "candidate_mask":
            seen = (torch.arange(self.length) + 1) // self.config.ratio(layer)
            visible = torch.arange(expected.shape[-1]) < seen[:, None]
            ours, expected = ours & visible, expected & visible
        differs = (ours != expected).any(-1)
        agree &= ~differs
        margin = taps.get(_CHOICES[kind])
        size = 1.0
        if kind != "router_ids" and "index_scores" in taps:
            scores = taps["index_scores"].float()
            size = float(scores[scores > -torch.inf].abs().max())
        bad = differs if margin is None else differs & (margin > _BF16_STEPS * size)
        return [f"{kind} differs in {int(bad.sum())} rows"] if bad.any() else []

    def _difference(self, ours: Tensor, expected: Tensor, agree: Tensor) -> tuple[float, float]:
        """Median and 95th percentile over rows of the relative RMS difference."""
        ours, expected = ours.reshape(expected.shape).float(), expected.float()
        if not torch.equal(ours == -torch.inf, expected == -torch.inf):
            return torch.inf, torch.inf
        ours, expected = ours.nan_to_num(neginf=0.0).flatten(2), expected.nan_to_num(neginf=0.0).flatten(2)
        norm = expected.pow(2).mean(-1).sqrt()
        rows = ((ours - expected).pow(2).mean(-1).sqrt() / norm.clamp_min(1e-12)).masked_fill(norm == 0, 0.0)
        chosen = rows[agree] if rows.shape == agree.shape else rows.flatten()
        return float(chosen.median()), float(chosen.quantile(0.95))

    def _ends(self) -> list[Case]:
        """The head fold on the last tap, and the drafter's features on the taps before its targets."""
        policy, last = self.file.policy, self.config.num_hidden_layers - 1
        cases = []
        if "out.logits" in self.reference:
            weights, streams = (self._tap(last, name).flatten(0, 1) for name in ("next_A", "streams"))
            logits = policy.logits(policy.norm(collapse(weights, streams)))
            error = worst(logits, self.reference["out.logits"])
            cases.append(Case(f"{self.file.stem} head", error <= 2e-2, f"worst {error:.1e}"))
        if "out.main_hidden" in self.reference:
            features = [self._feature(layer) for layer in self.config.dspark_target_layer_ids]
            error = worst(torch.cat(features, dim=-1), self.reference["out.main_hidden"])
            cases.append(Case(f"{self.file.stem} main_hidden", error <= 5e-2, f"worst {error:.1e}"))
        return cases

    def _feature(self, layer: int) -> Tensor:
        key = f"tap.layers.{layer}.engram_out"
        streams = self.reference[key] if key in self.reference else self._tap(layer - 1, "streams")
        return streams.float().mean(2).to(streams.dtype)


def check_quantised_decode(file: ModelFile, key: str, expected: Tensor) -> Case:
    """Our decoding against our own full forward; the reference's logits depend on its own rounding."""
    match = re.search(r"prefill(\d+)\.logits$", key)
    if match is None:
        return Case(f"decode {key}", False, "the key names no prefill length")
    prefill = int(match[1])
    ids, policy = file.token_ids, file.policy
    ours = decode_logits(file, prefill)
    with torch.inference_mode():
        tokens = PackedTokens(ids.flatten(), torch.arange(ids.shape[0] + 1) * ids.shape[1])
        whole = policy.logits(policy(tokens).hidden).unflatten(0, ids.shape)[:, prefill - 1 :]
    errors = (ours - whole).abs().amax(-1).flatten()
    median, high = float(errors.median()), float(errors.quantile(0.95))
    passed = ours.shape == expected.shape and median <= 1e-4 and high <= 5e-2
    return Case(f"decode {key}", passed, f"against our own prefill: median {median:.1e}, 95 % {high:.1e}")
