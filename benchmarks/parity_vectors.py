"""Parity of the small vectors: number formats, hyper-connections, rotary embedding, n-gram hash."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.parity_data import Case, hex_tensor, worst
from model.config import PolicyConfig, RopeScaling
from model.layers.engram_hash import EngramHash, look_back
from model.layers.hyper_connections import HyperConnection, collapse, mix
from model.layers.rope import Rotation, inverse_frequencies, rotate
from model.quant import blocks, e2m1, e4m3, ue8m0


def _e4m3_byte(scale: Tensor) -> int:
    return int(e4m3.encode(scale).view(torch.uint8))


FORMATS = {
    "fp4_e2m1_scale_e4m3_per16": (blocks.main_scale, e2m1.round_to_grid, e2m1.encode, _e4m3_byte),
    "fp4_e2m1_scale_e8m0_per32": (
        blocks.index_scale,
        e2m1.round_to_grid,
        e2m1.encode,
        lambda scale: int(ue8m0.encode(scale)),
    ),
    "fp8_e4m3_scale_ue8m0_per32": (
        blocks.window_scale,
        e4m3.round_to_grid,
        lambda values: e4m3.encode(values).view(torch.uint8),
        lambda scale: int(ue8m0.encode(scale)),
    ),
}


def check_formats(data: dict[str, Any]) -> list[Case]:
    """Every quantised block, bit by bit."""
    cases = []
    for name, entries in data.items():
        if not isinstance(entries, list):
            continue
        if name not in FORMATS:
            cases.append(Case(f"formats {name}", False, "unknown format"))
            continue
        wrong = [entry["name"] for entry in entries if not _block_equal(name, entry)]
        detail = f"{len(entries) - len(wrong)} of {len(entries)} blocks exact"
        cases.append(
            Case(f"formats {name}", not wrong, detail + (f"; first wrong: {wrong[0]}" if wrong else ""))
        )
    return cases


def _block_equal(name: str, entry: dict[str, Any]) -> bool:
    scale_of, grid, encode, byte_of = FORMATS[name]
    x = hex_tensor(entry["x"])
    scale = scale_of(x)
    values = grid(x / scale)
    codes = encode(values)
    equal = byte_of(scale) == entry["scale_byte"] and codes.tolist() == entry["codes"]
    equal = equal and torch.equal(
        (values * scale).view(torch.int32), hex_tensor(entry["y"]).view(torch.int32)
    )
    if "packed" in entry:
        packed = torch.tensor(entry["packed"], dtype=torch.uint8)
        equal = equal and torch.equal(e2m1.pack(codes), packed) and torch.equal(e2m1.unpack(packed), codes)
    return equal


def check_mhc(data: dict[str, Any]) -> list[Case]:
    """Coefficients from raw values, and whole site updates."""
    config = replace(PolicyConfig.preset("nano"), hc_sinkhorn_iters=data["iterations"], hc_eps=data["eps"])
    site = HyperConnection(replace(config, hc_mult=data["n"], rms_norm_eps=data["rms_eps"]))
    cases = []
    for number, entry in enumerate(data["coefficients"]):
        site.base.data, site.scale.data = hex_tensor(entry["base"]), hex_tensor(entry["scale"])
        pre, post, carry = site.coefficients(hex_tensor(entry["mixes"]).unsqueeze(1))
        error = max(
            worst(pre[0], hex_tensor(entry["pre"])),
            worst(post[0], hex_tensor(entry["post"])),
            worst(carry[..., 0], hex_tensor(entry["comb_in_out"])),
        )
        cases.append(
            Case(f"mhc coefficients {number} ({entry['name']})", error <= 1e-6, f"worst {error:.1e}")
        )
    cases += [_site_update(site, number, entry) for number, entry in enumerate(data["site_update"])]
    return cases


def _site_update(site: HyperConnection, number: int, entry: dict[str, Any]) -> Case:
    dtype = getattr(torch, entry["dtype"])
    site.fn.data = hex_tensor(entry["fn"])
    site.base.data, site.scale.data = hex_tensor(entry["base"]), hex_tensor(entry["scale"])
    streams, update = (
        hex_tensor(entry["X"]).unsqueeze(0).to(dtype),
        hex_tensor(entry["y"]).unsqueeze(0).to(dtype),
    )
    pre, post, carry = site(streams)
    results = {
        "A": pre[0],
        "C": post[0],
        "M_in_out": carry[..., 0],
        "x_in": collapse(hex_tensor(entry["A_prev"]).unsqueeze(0), streams)[0],
        "X_next": mix(carry, streams, post, update)[0],
    }
    passed, largest = True, 0.0
    for name, value in results.items():
        expected = hex_tensor(entry[name])
        # One step of bfloat16 is 2^-7 of the value's binade.
        step = (
            torch.exp2(expected.abs().clamp_min(1e-30).log2().floor() - 7)
            if value.dtype == torch.bfloat16
            else 1e-6
        )
        error = (value.detach().float() - expected).abs()
        passed, largest = passed and bool((error <= step).all()), max(largest, float(error.max()))
    return Case(f"mhc site update {number} ({entry['dtype']})", passed, f"worst {largest:.1e}")


def check_rope(data: dict[str, Any]) -> list[Case]:
    """Frequencies, angles and rotations of both tables."""
    cases = []
    for name, table in data["tables"].items():
        yarn = table["yarn"]
        scaling = yarn and RopeScaling(
            factor=yarn["factor"],
            beta_fast=yarn["beta_fast"],
            beta_slow=yarn["beta_slow"],
            original_max_position_embeddings=yarn["original"],
        )
        expected = hex_tensor(table["freqs"])
        ours = inverse_frequencies(data["rope_dim"], table["theta"], scaling or None)
        relative = float(((ours - expected) / expected).abs().max())
        cases.append(Case(f"rope {name} frequencies", relative <= 2e-7, f"worst relative {relative:.1e}"))
        cases.append(_rotation(name, table, expected))
    return cases


def _rotation(name: str, table: dict[str, Any], frequencies: Tensor) -> Case:
    turn = Rotation.at(torch.tensor(table["positions"]), frequencies)
    unit = max(
        worst(turn.forward.real, hex_tensor(table["cos"])), worst(turn.forward.imag, hex_tensor(table["sin"]))
    )
    x, expected = hex_tensor(table["rotate_in"]), hex_tensor(table["rotate_out"])
    turned = rotate(x, turn)
    there, back = worst(turned, expected), worst(rotate(turned, turn.inverse()), x)
    passed = unit <= 2e-6 and there <= 1e-5 and back <= 1e-5
    return Case(f"rope {name} rotation", passed, f"cos/sin {unit:.1e}, rotated {there:.1e}, back {back:.1e}")


def check_engram(data: dict[str, Any]) -> list[Case]:
    """Primes, multipliers and table rows, as integers."""
    layers = {int(layer): entry for layer, entry in data["layers"].items()}
    config = replace(
        PolicyConfig.preset("official"),
        engram_layer_ids=tuple(data["engram_layer_ids"]),
        engram_num_embeddings=tuple(layers[layer]["table_rows"] for layer in data["engram_layer_ids"]),
        engram_max_ngram_size=data["max_ngram_size"],
        engram_n_heads=data["n_heads"],
        engram_vocab_size=data["first_prime_search_start"],
        engram_compressed_vocab_size=data["compressed_vocab_size"],
    )
    hashing = EngramHash(config)
    cases = []
    for number, layer in enumerate(data["engram_layer_ids"]):
        entry = layers[layer]
        equal = hashing.moduli[number].tolist() == entry["primes"]
        equal = equal and hashing.offsets[number].flatten().tolist() == entry["column_offsets"]
        equal = equal and hashing.factors[number].tolist() == [int(value) for value in entry["multipliers"]]
        cases.append(Case(f"engram layer {layer} constants", equal, "primes, offsets, multipliers"))
    for case in data["cases"]:
        cases.append(_engram_rows(hashing, case, data["engram_layer_ids"]))
    return cases


def _engram_rows(hashing: EngramHash, case: dict[str, Any], layer_ids: list[int]) -> Case:
    ids, reach = torch.tensor(case["compressed_ids"]), hashing.factors.shape[1]
    pad = torch.tensor(case["pad_compressed_id"])
    padded = torch.cat([pad.repeat(reach - 1), ids])
    rows = hashing(look_back(padded.unfold(0, reach, 1).flip(-1), pad))
    equal = all(
        rows[:, number].tolist() == case["rows"][str(layer)] for number, layer in enumerate(layer_ids)
    )
    return Case(f"engram rows ({case['name']})", equal, f"{len(ids)} positions")
