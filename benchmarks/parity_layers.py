"""Parity of a quantised model file, layer by layer.

End to end such a model is chaotic: one rounding step early flips a code or a route later. So every layer is
fed the reference's own input and shared state (ours where the file lacks them), and compared with the
reference's output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.parity_data import CHOICES, DECODE_KEY, Case, ModelFile, choices, fitted, worst
from benchmarks.parity_margins import margin
from benchmarks.parity_model import decode_logits
from model.batch import Batch, Trace
from model.cache.main_kv import KeySource, TensorKeys
from model.config import AttentionMode
from model.layers.attention import Globals, RunOptions
from model.layers.hyper_connections import collapse
from model.layers.selection import Selection
from model.policy import PackedTokens

LIMITS = {"quant_bf16": (0.01, 0.02), "quant_fp8_fp4": (0.04, 0.10)}
"""Relative RMS difference per row: median and 95th percentile."""
_SAME_ROUNDING = 1e-3
"""Median where our rounding points are the reference's: everywhere but in scores, and in attention over more
than one of its tiles of keys."""
_TILE = 64
_CHAINED = 4
"""So many times the median where a layer is fed our own state; outliers are then to be expected."""
_SHIFT = 1e-3
"""A common shift of all values, as a share of their size; rounding has no preferred direction."""
_BF16_STEPS = 4 * 2.0**-8
"""The reference scores in bfloat16: a choice, or a margin, may differ by a few steps of the scores."""
_ENDS = {"tap.engram_hash_ids", "out.logits", "out.main_hidden"}


class LayerRun:
    """Every layer of one file, each on the reference's own input."""

    def __init__(self, file: ModelFile) -> None:
        self.file, self.config, self.reference = file, file.config, file.tensors
        self.batch, self.length = file.token_ids.shape
        median, self.high = LIMITS[file.mode]
        one_tile = self.config.sliding_window + self.config.index_topk <= _TILE
        self.exact_median, self.median = (_SAME_ROUNDING if one_tile else median), median
        self.ours: dict[int, tuple[Tensor, Tensor, Globals]] = {}
        """What our layers gave: streams, A, and what they handed on."""
        self.boundary: Tensor | None = None
        """What the first layer of the decoder reads, once it has."""

    def cases(self) -> list[Case]:
        """One case a layer, and the ends."""
        with torch.inference_mode():
            layers = [self._layer(layer) for layer in range(self.config.num_hidden_layers)]
            found = [case for case in layers if case is not None]
            return found + self._ends() + self._unknown()

    def _tap(self, layer: int, name: str) -> Tensor | None:
        return self.reference.get(f"tap.layers.{layer}.{name}")

    def _state(self, layer: int) -> tuple[Tensor, Tensor]:
        """Streams and A after `layer`; before the first one: the embeddings and one-hot."""
        if layer >= 0:
            streams, weights = self._tap(layer, "streams"), self._tap(layer, "next_A")
            if streams is None or weights is None:
                return self.ours[layer][:2]
            return streams.flatten(0, 1), weights.flatten(0, 1)
        table: Tensor = self.file.policy.embed.weight  # pyright: ignore[reportAssignmentType]
        embedded = table[self.file.token_ids.flatten()]
        weights = torch.zeros(len(embedded), self.config.hc_mult)
        weights[:, 0] = 1.0
        return embedded.unsqueeze(1).repeat(1, self.config.hc_mult, 1), weights

    def _is_own(self, layer: int) -> bool:
        """Whether the state after `layer` is ours: then a rounding step may have flipped in some rows."""
        return layer >= 0 and (self._tap(layer, "streams") is None or self._tap(layer, "next_A") is None)

    def _shared(self, layer: int, batch: Batch) -> Globals:
        config = self.config
        if config.mode(layer) in (AttentionMode.WINDOW, AttentionMode.FULL):
            return Globals()
        owner, chooser = config.kv_owner(layer), config.index_owner(layer)
        own = self.ours[owner][2]
        main, keys = self._keys(owner, "main_kv", own.main), self._keys(owner, "index_k", own.index_keys)
        if config.mode(layer) is AttentionMode.REINDEX:
            return Globals(main, keys, None, self._candidates(layer))
        index = self._tap(chooser, "index_topk")
        if index is None:
            chosen = self.ours[chooser][2].selection
            assert chosen is not None
            index = chosen.index
        visible = batch.rows[0].visible(config.ratio(layer))
        selection = Selection(visible, main.dense().shape[1], None if index is None else index.long())
        return Globals(main, keys, selection)

    def _keys(self, owner: int, name: str, own: KeySource | None) -> KeySource:
        tap = self._tap(owner, name)
        assert own is not None
        return own if tap is None else TensorKeys(tap)

    def _candidates(self, layer: int) -> Tensor | None:
        source = self.config.candidate_source_layer_id
        if not self.config.uses_candidates(layer):
            return None
        mask = self._tap(source, "candidate_mask")
        if mask is None:
            return self.ours[source][2].candidates
        blocks = mask[..., :: self.config.candidate_block_size]
        return torch.where(blocks, torch.arange(blocks.shape[-1]), -1)

    def _layer(self, layer: int) -> Case | None:
        trace, ids, policy = Trace(), self.file.token_ids, self.file.policy
        tokens = PackedTokens(ids.flatten(), torch.arange(self.batch + 1) * self.length)
        batch = Batch.of_documents(tokens, self.config.sliding_window, trace)
        block, (streams, weights) = policy.blocks[layer], self._state(layer - 1)
        injected = self._tap(layer, "engram_out")
        if block.engram is not None:
            streams = block.inject(streams, batch, policy._document_engram(tokens.token_ids, batch))
            streams = streams if injected is None else injected.flatten(0, 1)
        options = RunOptions(policy.fake_quant, policy.dense_limit)
        x = block.attention_input(streams, weights)
        if layer == self.config.decoder_start:
            self.boundary = x
        if self.config.mode(layer) is AttentionMode.FULL:
            # In the decoder every source of keys projects what its first layer reads.
            read = x if self.boundary is None else self.boundary
            shared = block.attn.add_keys(read, batch, None, options)
        else:
            shared = [self._shared(layer, batch)]
        streams, weights, shared, _ = block(streams, x, batch, shared, None, options)
        self.ours[layer] = (streams, weights, shared[0])
        return self._compare(layer, trace.values)

    def _compare(self, layer: int, ours: dict[str, Tensor]) -> Case | None:
        prefix = f"layers.{layer}."
        head = "tap." + prefix
        taps = {
            key.removeprefix(head): value for key, value in self.reference.items() if key.startswith(head)
        }
        if not taps:
            return None
        problems: list[str] = []
        agree = torch.ones(self.batch, self.length, dtype=torch.bool)
        for kind in (kind for kind in CHOICES if kind in taps):
            problems += self._choice(layer, kind, ours.get(prefix + kind), taps, agree)
        largest = 0.0
        for kind, expected in taps.items():
            if kind in CHOICES:
                continue
            if kind.endswith("_margin"):
                problems += self._margin(layer, kind, ours, expected, agree)
                continue
            if prefix + kind not in ours:
                problems.append(f"no check for {kind}")
                continue
            value = ours[prefix + kind]
            if kind == "router_weights":
                value, expected = value.view(expected.shape).sort(-1).values, expected.sort(-1).values
            median, found = self._difference(layer, kind, fitted(kind, value, expected), expected, agree)
            largest = max(largest, median)
            problems += [f"{kind} {problem}" for problem in found]
        share = float(agree.float().mean())
        detail = f"worst median {largest:.1e}, rows with equal choices {share:.3f}"
        detail += f"; {', '.join(problems)}" if problems else ""
        return Case(f"{self.file.stem} layer {layer}", not problems, detail)

    def _choice(
        self, layer: int, kind: str, ours: Tensor | None, taps: dict[str, Tensor], agree: Tensor
    ) -> list[str]:
        pair = choices(self.config, layer, kind, ours, taps[kind], self.length)
        if pair is None:
            return [f"no {kind}"]
        differs = (pair[0] != pair[1]).any(-1)
        agree &= ~differs
        if self._is_own(layer - 1) and float(differs.float().mean()) < 0.5:
            return []
        margin = taps.get(CHOICES[kind])
        size = 1.0
        if kind != "router_ids" and "index_scores" in taps:
            scores = taps["index_scores"].float()
            size = float(scores[scores > -torch.inf].abs().max())
        bad = differs if margin is None else differs & ~(margin <= _BF16_STEPS * size)
        return [f"{kind} differs in {int(bad.sum())} rows"] if bad.any() else []

    def _margin(
        self, layer: int, kind: str, ours: dict[str, Tensor], expected: Tensor, agree: Tensor
    ) -> list[str]:
        """Margins of scores that were rounded to bfloat16 differ a little, but in no direction."""
        found = margin(self.config, layer, kind, ours, self.length)
        if found is None:
            return [f"no check for {kind}"]
        found = found.view(expected.shape)
        if not torch.equal(found[agree].isfinite(), expected[agree].isfinite()):
            return [f"{kind} is infinite elsewhere"]
        finite = agree & expected.isfinite()
        shift = float((found - expected)[finite].median()) if finite.any() else 0.0
        name = "router_scores" if kind == "router_margin" else "index_scores"
        scores = ours[f"layers.{layer}.{name}"]
        allowed = 2.0**-8 * float(scores[scores > -torch.inf].abs().max())
        return [] if abs(shift) <= allowed else [f"{kind} shifted by {shift:.1e}"]

    def _difference(
        self, layer: int, kind: str, ours: Tensor, expected: Tensor, agree: Tensor
    ) -> tuple[float, list[str]]:
        """Median over rows of the relative RMS difference, and what is wrong."""
        ours, expected = ours.float(), expected.float()
        if not torch.equal(ours == -torch.inf, expected == -torch.inf):
            return torch.inf, ["masks differ"]
        ours, expected = (
            ours.nan_to_num(neginf=0.0, nan=torch.nan),
            expected.nan_to_num(neginf=0.0, nan=torch.nan),
        )
        ours, expected = ours.flatten(2), expected.flatten(2)
        norm = expected.pow(2).mean(-1).sqrt()
        rows = ((ours - expected).pow(2).mean(-1).sqrt() / norm.clamp_min(1e-12)).masked_fill(norm == 0, 0.0)
        shift = (ours - expected).mean(-1)
        by_token = rows.shape == agree.shape
        rows, shift = (rows[agree], shift[agree]) if by_token else (rows.flatten(), shift.flatten())
        if not len(rows):
            return torch.inf, ["no row with equal choices"]
        median, high = float(rows.median()), float(rows.quantile(0.95))
        chained = self._is_own(layer - 1)
        allowed = self.median if kind == "index_scores" else self.exact_median
        allowed = _CHAINED * self.median if chained else allowed
        problems = []
        if not (median <= allowed and (chained or high <= self.high)):
            problems.append(f"median {median:.1e}, 95 % {high:.1e}")
        if not abs(float(shift.median())) <= _SHIFT * float(expected.pow(2).mean().sqrt()):
            problems.append(f"shifted by {float(shift.median()):.1e}")
        return median, problems

    def _ends(self) -> list[Case]:
        """Table rows, the head on the last streams, and the drafter's features before its targets."""
        policy, stem, cases = self.file.policy, self.file.stem, []
        if "tap.engram_hash_ids" in self.reference:
            ids, expected = self.file.token_ids, self.reference["tap.engram_hash_ids"]
            tokens = PackedTokens(ids.flatten(), torch.arange(self.batch + 1) * self.length)
            batch = Batch.of_documents(tokens, self.config.sliding_window)
            rows = policy._document_engram(tokens.token_ids, batch)
            equal = rows is not None and torch.equal(rows, expected.flatten(0, 1))
            cases.append(Case(f"{stem} engram rows", equal, "exact"))
        if "out.logits" in self.reference:
            last = self.config.num_hidden_layers - 1
            streams, weights = self._state(last)
            logits = policy.logits(policy.norm(collapse(weights, streams)))
            cases.append(
                _close(f"{stem} head", logits, self.reference["out.logits"], 2e-2, self._is_own(last))
            )
        if "out.main_hidden" in self.reference:
            features = [self._feature(layer) for layer in self.config.dspark_target_layer_ids]
            ours = torch.cat(features, dim=-1)
            own = any(self._is_own(layer - 1) for layer in self.config.dspark_target_layer_ids)
            cases.append(_close(f"{stem} main_hidden", ours, self.reference["out.main_hidden"], 5e-2, own))
        return cases

    def _feature(self, layer: int) -> Tensor:
        injected = self._tap(layer, "engram_out")
        streams = self._state(layer - 1)[0] if injected is None else injected.flatten(0, 1)
        return streams.float().mean(1).to(streams.dtype)

    def _unknown(self) -> list[Case]:
        keys = (key for key in self.reference if key.startswith(("tap.", "out.")) and key not in _ENDS)
        layers = range(self.config.num_hidden_layers)
        known = tuple(f"tap.layers.{layer}." for layer in layers)
        rest = [key for key in keys if not key.startswith(known)]
        return [Case(f"{self.file.stem} {key}", False, "no check for this tensor") for key in rest]


def _close(name: str, ours: Tensor, expected: Tensor, largest: float, chained: bool) -> Case:
    """Results of one further step: nearly all of them equal, or some where the state is our own."""
    error, difference = worst(ours, expected), (ours.reshape(expected.shape).float() - expected.float()).abs()
    equal = float((difference <= 1e-3).float().mean())
    passed = equal >= 0.1 if chained else error <= largest and equal >= 0.95
    return Case(name, passed, f"worst {error:.1e}, equal {equal:.3f}")


def check_quantised_decode(file: ModelFile, key: str, expected: Tensor) -> Case:
    """Our decoding against our own full forward, as the reference's against its own.

    Ours are equal in exact mode, the reference's but for rare flips. The reference's logits depend on its own
    rounding: of those only some part is asked to agree, which a file of another model cannot offer.
    """
    match = DECODE_KEY.search(key)
    if match is None:
        return Case(f"decode {key}", False, "the key names no prefill length")
    prefill = int(match[1])
    ids, policy = file.token_ids, file.policy
    policy.exact = True
    ours = decode_logits(file, prefill)
    with torch.inference_mode():
        tokens = PackedTokens(ids.flatten(), torch.arange(ids.shape[0] + 1) * ids.shape[1])
        whole = policy.logits(policy(tokens).hidden).unflatten(0, ids.shape)[:, prefill - 1 :]
    policy.exact = False
    errors = (ours - whole).abs().amax(-1).flatten()
    median, high = float(errors.median()), float(errors.quantile(0.95))
    passed = ours.shape == expected.shape and median <= 1e-4 and high <= 5e-2
    detail = f"against our own prefill: median {median:.1e}, 95 % {high:.1e}"
    if "out.logits" in file.tensors and ours.shape == expected.shape:
        theirs = (expected - file.tensors["out.logits"][:, prefill - 1 :]).abs().flatten()
        low = float(theirs.quantile(0.1))
        passed = passed and low <= 1e-3
        detail += f"; the reference against its own: lowest tenth {low:.1e}"
    return Case(f"decode {key}", passed, detail)
