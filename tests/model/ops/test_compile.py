"""Every kernel compiles for sm_90 at official shapes and takes no more than recorded in `resources.json`.

Spills and shared memory decide speed on the card and are visible without one. Figures are kept per Triton
version, because register allocation differs between them.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton, an optional dependency")

from model.ops.candidates import triton as candidates  # noqa: E402
from model.ops.decode_rows import triton as decode_rows  # noqa: E402
from model.ops.engram_gate import triton as engram  # noqa: E402
from model.ops.exact_linear import triton as exact_linear  # noqa: E402
from model.ops.experts import product, route_gradients  # noqa: E402
from model.ops.experts import triton as experts  # noqa: E402
from model.ops.experts.plan import Plan, most_tiles  # noqa: E402
from model.ops.hyper_boundary import gradients  # noqa: E402
from model.ops.hyper_boundary import triton as boundary  # noqa: E402
from model.ops.index_decode import triton as index_decode  # noqa: E402
from model.ops.index_loss import triton as index_loss  # noqa: E402
from model.ops.indexer import triton as indexer  # noqa: E402
from model.ops.latents import triton as latents  # noqa: E402
from model.ops.linear_logprob import triton as logprob  # noqa: E402
from model.ops.linear_reverse_kl import triton as reverse_kl  # noqa: E402
from model.ops.pack_keys import triton as packing  # noqa: E402
from model.ops.packed_experts import Stack  # noqa: E402
from model.ops.packed_experts import triton as packed  # noqa: E402
from model.ops.rotary import triton as rotary  # noqa: E402
from model.ops.row_sums import triton as row_sums  # noqa: E402
from model.ops.sampling import triton as sampling  # noqa: E402
from model.ops.sparse_attention import backward, gluon  # noqa: E402
from model.ops.sparse_attention import triton as attention  # noqa: E402
from model.ops.sparse_attention.inverse import InverseIndex  # noqa: E402
from model.ops.sparse_decode import triton as decode  # noqa: E402
from model.ops.topk import triton as topk  # noqa: E402
from model.ops.unpack_keys import triton as unpacking  # noqa: E402
from model.ops.verification import triton as verification  # noqa: E402
from model.ops.window_rows import triton as window_rows  # noqa: E402

pytestmark = pytest.mark.slow

RECORDS = json.loads((Path(__file__).parent / "resources.json").read_text())
T, H, D, E, K, W = 4096, 64, 512, 32768, 512, 128
SCALE = D**-0.5
BF16, FP32, INT, BYTE, FP8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn


def _t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _keys() -> attention.KeyRows:
    return attention.KeyRows(_t(T, K + W, dtype=INT), _t(T, 2, dtype=INT), K, 64)


def _decode(compiled, batch, exact, heads=H):
    records, window = _t(E, 288, dtype=BYTE), _t(batch * W, 528, dtype=BYTE)
    return compiled(
        decode.decode,
        *(_t(batch, heads, D), records, _t(batch, K, dtype=INT), window),
        *(_t(batch, W, dtype=INT), _t(heads, dtype=FP32)),
        scale=SCALE,
        counts=_t(batch, 2, dtype=INT),
        rope=(_t(batch, 32, dtype=FP32), _t(batch, 32, dtype=FP32)),
        exact=exact,
    )


def _decode_site(compiled):
    rows, width, long = 64, 5120, torch.int64
    streams, squares = _t(rows, 4, width), _t(rows, dtype=FP32)
    site = _t(24, dtype=FP32), _t(3, dtype=FP32)
    split, matrices = _t(4 * width, 64), (_t(1, 1280, width), _t(1, 512, width))
    out = _t(1, rows, 1792)
    kernels = compiled(exact_linear.product, _t(1, rows, width), matrices[0], out, matrices[1])
    angles = _t(rows, 32, dtype=FP32), _t(rows, 32, dtype=FP32)
    ring = _t(E, 528, dtype=BYTE), _t(rows, dtype=long)
    norms = _t(1280), _t(512)
    joint = _t(rows, 1280), norms[0], _t(rows, 512), norms[1]
    kernels += compiled(latents.latents, *joint, *angles, 1e-6, False, *ring, None)
    kernels += compiled(latents.latent_norm, _t(T, 1280), norms[0], 1e-6)
    placed = {"place": _t(rows, 7, dtype=INT)}
    kernels += compiled(
        boundary.update, streams, _t(rows * 7, width), _t(rows, 24, dtype=FP32), _t(width), 1e-6, **placed
    )
    kernels += compiled(boundary.coefficients, streams, squares, split, *site)
    where = _t(rows, dtype=long), _t(rows, dtype=long), _t(2, rows, dtype=long)
    return kernels + compiled(window_rows.window_rows, *where, 192, W)


def _forward(compiled, module, **options):
    arguments = (_t(T, H, D), _t(E + T, D), _keys(), _t(H, dtype=FP32))
    return compiled(module.forward, *arguments, scale=SCALE, **options)


def _kept(tiles):
    return attention.Kept.empty(_t(T, H, D), _keys(), tiles)


def _backward(compiled, heads, kept=None):
    query, row = _t(T, heads, D), _t(T, heads, dtype=FP32)
    saved = backward.Saved(query, _t(E + T, D), _keys(), _t(T, K, dtype=INT), query, row, SCALE, W, E, kept)
    inverse = InverseIndex(T, [_t(E + 1, dtype=INT)], [_t(T * K, dtype=INT)])
    return compiled(backward.backward, saved, query, inverse, row)


def _scores(compiled, dtype):
    tensors = _t(1024, 32, 128, dtype=dtype), _t(E, 128, dtype=dtype), _t(1024, 32, dtype=FP32)
    return compiled(indexer.index_scores, *tensors, begins=_t(1024, dtype=INT), ends=_t(1024, dtype=INT))


def _logprob(compiled):
    hidden, weight, labels = _t(8192, 5120), _t(129280, 5120), _t(8192, dtype=torch.int64)
    row = _t(8192, dtype=FP32)
    kernels = compiled(logprob.forward, hidden, weight, labels, temperature=1.0)
    return kernels + compiled(
        logprob.logit_gradients,
        *(hidden, weight, labels, row, row, row, row),
        temperature=0.7,
        columns=slice(20480, 40960),
        out=_t(8192, 20480),
    )


def _reverse_kl(compiled):
    heads = _t(8192, 5120), _t(129280, 5120), _t(8192, 7168), _t(129280, 7168)
    row = _t(8192, dtype=FP32)
    kernels = compiled(reverse_kl.forward, *heads, temperature=1.0)
    return kernels + compiled(
        reverse_kl.logit_gradients,
        *heads,
        (row, row, row, row),
        temperature=0.7,
        columns=slice(20480, 40960),
        out=_t(8192, 20480),
    )


def _pack(compiled, kind, width, ratio):
    values = _t(E * ratio, width, dtype=FP32)
    rope = _t(E, 32, dtype=FP32), _t(E, 32, dtype=FP32)
    gates = values if ratio > 1 else None
    return compiled(packing.pack_keys, kind, values, gates, ratio, _t(E, dtype=INT), _t(width), 1e-6, rope)


def _boundary(compiled):
    streams, branch, k = _t(E, 4, 5120), _t(E, 5120), _t(E, 24, dtype=FP32)
    kernels = compiled(boundary.split_projection, _t(24, 20480, dtype=FP32))
    kernels += compiled(boundary.update, streams, branch, k, _t(5120), 1e-6)
    site = _t(20480, 64), _t(24, dtype=FP32), _t(3, dtype=FP32)
    for count in (8192, E):
        kernels += compiled(boundary.coefficients, _t(count, 4, 5120), _t(count, dtype=FP32), *site)
    return kernels


def _rows(compiled):
    row = _t(T, dtype=INT)
    return compiled(attention.joint_rows, _t(T, K, dtype=INT), row, row, entries=E, window_size=W, width=D)


def _rotary(compiled):
    angles = _t(T, 32, dtype=FP32), _t(T, 32, dtype=FP32)
    kernels = compiled(rotary.rotary_, _t(T, H, D), *angles, 1.0)
    kernels += compiled(rotary.turned_gradient_, _t(T, H, D), _t(T, H, D), *angles)
    ring = {"ring": _t(E, 528, dtype=BYTE), "target": _t(T, dtype=torch.int64)}
    kernels += compiled(rotary.window_keys, _t(T, D), _t(D), *angles, eps=1e-6, rounded=True, **ring)
    kernels += compiled(rotary.window_keys_backward, _t(T, D), _t(D), *angles, _t(T, D), eps=1e-6)
    return kernels + compiled(rotary.index_heads, _t(T, 32, 128), *angles, rounded=True)


def _plan(tokens: int) -> Plan:
    items, experts = tokens * 7, 385
    tables = _t(items, dtype=INT), _t(tokens, 7, dtype=INT), _t(experts, dtype=INT)
    return Plan(*tables, _t(most_tiles(items, experts) + 1, 2, dtype=INT))


def _experts(compiled):
    width, inner, count, chosen = 5120, 2304, 384, 6
    ids, loads = _t(T, chosen, dtype=torch.int64), _t(T // 16, count, dtype=INT)
    weights, rows, plan = _t(T, chosen, dtype=FP32), T * (chosen + 1), _plan(T)
    kernels = compiled(
        experts.route, _t(T, width), _t(count, width), _t(count, dtype=FP32), chosen, 1.5, 1.0, None
    )
    affinity = _t(T, count, dtype=FP32)
    options = {"factor": 1.5, "temperature": 1.0}
    kernels += compiled(route_gradients.logit_gradients, affinity, ids, None, weights, **options)
    for above in (1, 1 << 30):
        kernels += compiled(experts.plan, ids, loads, 1, above)
    kernels += compiled(experts.swiglu, _t(rows, 2 * inner), weights, plan, 10.0)
    kernels += compiled(experts.swiglu_backward, _t(rows, 2 * inner), weights, plan, 10.0, _t(rows, inner))
    return kernels + compiled(experts.combine, _t(rows, width), plan)


def _expert_products(compiled):
    tokens, weights, plan = _t(T, 5120), _t(T, 6, dtype=FP32), _plan(T)
    hidden, rows, active = _t(T * 7, 4608), _t(T * 7, 5120), _t(T * 7, 2304)
    w13, w2 = _t(385, 4608, 5120), _t(385, 5120, 2304)
    kernels = compiled(product.activated, tokens, w13, weights, plan, 10.0)
    kernels += compiled(product.grouped, tokens, w13, plan, of_tokens=True)
    kernels += compiled(product.grouped, active, w2, plan)
    kernels += compiled(product.input_gradient, hidden, w13, plan)
    kernels += compiled(product.input_gradient, rows, w2, plan)
    kernels += compiled(product.plain, tokens, w13, plan, of_tokens=True, weights=weights, limit=10.0)
    kernels += compiled(product.plain, active, w2, plan)
    kernels += compiled(product.plain, rows, w2, plan, back=True)
    kernels += compiled(product.weight_gradient, hidden, rows, plan)
    return kernels + compiled(product.weight_gradient, rows, active, plan)


def _few_experts(compiled):
    matrices = _t(385, 4608, 5120), _t(385, 5120, 2304)
    return compiled(product.few, _t(64, 5120), *matrices, _t(64, 6, dtype=FP32), _plan(64), 10.0)


def _packed_experts(compiled, tokens, exact):
    def stack(rows, columns):
        codes = _t(384, rows, columns // 2, dtype=BYTE)
        return Stack(codes, _t(384, rows, columns // 32, dtype=BYTE), _t(1, rows, columns))

    matrices = stack(4608, 5120), stack(5120, 2304)
    arguments = _t(tokens, 5120), *matrices, _t(tokens, 6, dtype=FP32), _plan(tokens)
    return compiled(packed.packed_experts, *arguments, limit=10.0, rounded=False, exact=exact)


def _boundary_gradients(compiled, count):
    width = 2048
    streams, branch, k = _t(count, 4, width), _t(count, width), _t(count, 24, dtype=FP32)
    kernels = compiled(gradients.site_input, streams, k, _t(width), 1e-6)
    sites = (streams, streams, branch, k, _t(width), 1e-6, streams, branch)
    kernels += compiled(gradients.site_backward, *sites)
    row, split, raw = _t(count, dtype=FP32), _t(4 * width, 64), _t(count, 32)
    products, scale = _t(count, 64, dtype=FP32), _t(3, dtype=FP32)
    kernels += compiled(gradients.logit_gradients, products, row, _t(24, dtype=FP32), scale, k, 4 * width)
    return kernels + compiled(gradients.stream_gradients, streams, raw, row, split, streams)


def _decode_index(compiled, listed):
    blocks = _t(64, 2048, dtype=INT) if listed else None
    kernels = compiled(
        index_decode.decode_scores,
        *(_t(64, 32, 128), _t(64, 32), _t(E * 64, 68, dtype=BYTE)),
        *(_t(64, 2048, dtype=torch.int64), _t(64, dtype=INT)),
        width=16384 if listed else 131072,
        page_groups=64,
        blocks=blocks,
        block_size=8,
        factor=0.02,
    )
    chosen, table = _t(64, K, dtype=INT), _t(64, 2048, dtype=torch.int64)
    return kernels + compiled(decode_rows.decode_rows, chosen, table, _t(64, dtype=INT), 64)


def _candidates(compiled):
    visible, blocks, scores = _t(1024, dtype=INT), _t(1024, 2048, dtype=INT), _t(1024, 65536, dtype=FP32)
    kernels = compiled(candidates.block_maxima, scores, visible, 8)
    asked = _t(1024, 32, 128), _t(65536, 128), _t(1024, 32, dtype=FP32)
    kernels += compiled(candidates.scores_of_blocks, *asked, visible, blocks, 8)
    return kernels + compiled(topk.topk, scores, K, ends=visible, blocks=blocks, block_size=8)


def _index_loss(compiled, heads):
    student = _t(T, heads, 128), _t(T, heads, dtype=FP32), _t(E, 128)
    indices, chosen = _t(T, K, dtype=INT), _t(T, K, dtype=FP32)
    teacher = _t(T, H, D), _t(E, D), _t(T, H, dtype=FP32)
    kernels = compiled(index_loss.forward, *student, *teacher, indices, scale=SCALE)
    inverse = InverseIndex(T, [_t(E + 1, dtype=INT)], [_t(T * K, dtype=INT)])
    return kernels + compiled(index_loss.backward, *student, indices, chosen, _t(T, dtype=FP32), inverse)


def _engram(compiled):
    streams, projected, weight, text = _t(T, 4, 5120), _t(T, 5 * 5120), _t(4, 5120), _t(T, dtype=torch.bool)
    given = streams, projected, weight, weight
    kernels = compiled(engram.forward, *given, None, eps=1e-6)
    kernels += compiled(engram.backward, *given, text, streams, eps=1e-6)
    lookups = _t(T * 16, 512), _t(T * 16, dtype=torch.int64), _t(9999, dtype=torch.int64)
    return kernels + compiled(row_sums.launch, *lookups)


def _sampling(compiled, truncate):
    rules = _t(5, 64, dtype=torch.int64)
    return compiled(sampling.launch, _t(64, 129280, dtype=FP32), rules, truncate=truncate)


def _verification(compiled):
    long, double, requests, slots = torch.int64, torch.float64, 64, 5
    rows = (
        _t(requests, slots + 1, dtype=long),
        _t(requests, slots, dtype=long),
        _t(requests, dtype=long),
        _t(requests, slots, dtype=double),
        _t(requests, dtype=double),
    )
    proposed = _t(slots, requests, 129280, dtype=FP32)
    return compiled(verification.verification, _t(384, 129280, dtype=FP32), proposed, *rows)


def _exact(compiled, rows, columns=5120, depth=8192):
    out = _t(1, rows, columns)
    return compiled(exact_linear.product, _t(1, rows, depth), _t(1, columns, depth), out)


CASES = {
    "decode_large": lambda c: _decode(c, 64, False),
    "decode_small": lambda c: _decode(c, 16, False),
    "decode_exact": lambda c: _decode(c, 64, True),
    "decode_plain": lambda c: _decode(c, 64, True, heads=32),
    "decode_site": _decode_site,
    "attention_rows": _rows,
    "attention_fast": lambda c: _forward(c, gluon),
    "attention_plain": lambda c: _forward(c, attention),
    "attention_exact": lambda c: _forward(c, attention, exact=True),
    "attention_kept": lambda c: _forward(c, gluon, kept=_kept(2)),
    "attention_exact_kept": lambda c: _forward(c, attention, exact=True, kept=_kept(1)),
    "attention_backward": lambda c: _backward(c, H),
    "attention_backward_kept": lambda c: _backward(c, H, _kept(2)),
    "attention_backward_exact_kept": lambda c: _backward(c, H, _kept(1)),
    "attention_backward_wide": lambda c: _backward(c, 2 * H),
    "topk_few": lambda c: c(topk.topk, _t(64, 131072, dtype=FP32), 512),
    "topk_many": lambda c: c(topk.topk, _t(1024, E, dtype=FP32), 512, ends=_t(1024, dtype=INT)),
    "candidates": _candidates,
    "scores_bf16": lambda c: _scores(c, BF16),
    "scores_fp8": lambda c: _scores(c, FP8),
    "logprob": _logprob,
    "reverse_kl": _reverse_kl,
    "pack_main": lambda c: _pack(c, "main", 512, 2),
    "pack_index": lambda c: _pack(c, "index", 128, 1),
    "pack_window": lambda c: _pack(c, "window", 512, 1),
    "unpack": lambda c: c(unpacking.unpack_keys, _t(E, 288, dtype=BYTE)),
    "boundary": _boundary,
    "boundary_gradients": lambda c: _boundary_gradients(c, T),
    "boundary_gradients_of_one": lambda c: _boundary_gradients(c, 1),
    "rotary": _rotary,
    "experts": _experts,
    "experts_products": _expert_products,
    "experts_few": _few_experts,
    "packed_experts_alone": lambda c: _packed_experts(c, 1, False),
    "packed_experts_few": lambda c: _packed_experts(c, 64, False),
    "packed_experts_some": lambda c: _packed_experts(c, 1024, False),
    "packed_experts_many": lambda c: _packed_experts(c, T, False),
    "packed_experts_exact": lambda c: _packed_experts(c, 64, True),
    "packed_experts_unpacked": lambda c: c(
        packed.unpack, _t(32, 4608, 2560, dtype=BYTE), _t(32, 4608, 160, dtype=BYTE)
    ),
    "index_decode": lambda c: _decode_index(c, False),
    "index_decode_listed": lambda c: _decode_index(c, True),
    "index_loss": lambda c: _index_loss(c, 32),
    "index_loss_few_heads": lambda c: _index_loss(c, 8),
    "engram": _engram,
    "sampling": lambda c: _sampling(c, False),
    "sampling_truncated": lambda c: _sampling(c, True),
    "verification": _verification,
    "exact_few": lambda c: _exact(c, 64),
    "exact_many": lambda c: _exact(c, T),
    "exact_wide": lambda c: _exact(c, T, 32768, 1280),
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_within_the_recorded_resources(compiled, case):
    version = ".".join(triton.__version__.split(".")[:2])
    found = [asdict(r) for r in CASES[case](compiled)]
    assert all(r["shared"] <= 227 * 1024 for r in found), found
    recorded = RECORDS.get(version, {}).get(case)
    assert recorded is not None, (
        f"no figures for Triton {version}; add to resources.json: {json.dumps(found)}"
    )
    assert [r["kernel"] for r in found] == [r["kernel"] for r in recorded]
    for now, before in zip(found, recorded, strict=True):
        for name in ("registers", "stack", "shared"):
            assert now[name] <= before[name], (
                f"{now['kernel']} takes more {name} than recorded: {now} / {before}"
            )
