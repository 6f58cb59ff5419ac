"""Exact mode without a card: kernels that must agree in every bit round the same expressions.

What the interpreter cannot see is checked on kernels compiled for sm_90: in which order a sum over a tile
runs, and which additions are fused to multiplications. Shapes are those of the policy of
`benchmarks.model_gpu_setup`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="no Triton on this platform")

from model.ops.candidates import triton as candidates
from model.ops.exact_linear import triton as exact_linear
from model.ops.experts import product
from model.ops.experts import triton as experts
from model.ops.experts.plan import Plan, most_tiles
from model.ops.hyper_boundary import triton as boundary
from model.ops.index_decode import triton as index_decode
from model.ops.indexer import triton as indexer
from model.ops.latents import triton as latents
from model.ops.pack_keys import triton as packing
from model.ops.rotary import triton as rotary
from model.ops.sparse_attention import triton as attention
from model.ops.sparse_decode import triton as decode
from tests.model.ops import arithmetic
from tests.model.ops.test_compile import CASES

pytestmark = pytest.mark.slow

MANY, D, WIDTH, EXPERTS, CHOSEN = 4096, 2048, 512, 12, 4
BF16, FP32, INT, LONG, BYTE = torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8


def _t(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(scope="module")
def rounds(compiled_kernels):
    """`rounds(launcher, ...)`: the expressions that each launched kernel rounds."""

    def call(launcher, *args, **options):
        return [arithmetic.rounded(k.asm["ptx"]) for _, k in compiled_kernels(launcher, *args, **options)]

    return call


@pytest.fixture(scope="module")
def sums(compiled_kernels):
    """`sums(launcher, ...)`: which elements the sums of the launched kernel add up, and where."""

    def call(launcher, *args, **options):
        ((_, kernel),) = compiled_kernels(launcher, *args, **options)
        return [arithmetic.sums(kernel.asm["ttgir"])]

    return call


def _update(rounds, rows, terms=0):
    place = _t(rows, terms, dtype=INT) if terms else None
    branch = _t(rows * max(terms, 1), D)
    coefficient = _t(rows, 24, dtype=FP32)
    (found,) = rounds(boundary.update, _t(rows, 4, D), branch, coefficient, _t(D), 1e-6, place=place)
    return found


@pytest.mark.parametrize("rows", [1, 8, 64, 300])
def test_an_update_of_streams(rounds, rows):
    many = _update(rounds, MANY)
    assert len(many) >= 5 and _update(rounds, rows) == many
    (combined,) = rounds(experts.combine, _t(rows * 5, D), _plan(rows))
    assert combined == {arithmetic.sum_of(5)}
    assert _update(rounds, rows, 5) == many | combined


def _latents(rounds, rows, joint, **options):
    angles = _t(rows, 32, dtype=FP32), _t(rows, 32, dtype=FP32)
    values, window = _t(rows, 1280), _t(rows, WIDTH)
    if joint:
        values, window = _t(rows, 1280 + WIDTH).split([1280, WIDTH], 1)
    given = {"rounded": True, "ring": None, "target": None, "out": None, **options}
    (found,) = rounds(latents.latents, values, _t(1280), window, _t(WIDTH), *angles, 1e-6, **given)
    return found


def test_latents_of_a_step_of_a_pass_and_of_training(rounds):
    ring, target = _t(8192, 528, dtype=BYTE), _t(MANY, dtype=LONG)
    step = _latents(rounds, 64, True, rounded=False, ring=ring, target=target[:64])
    prefill = _latents(rounds, MANY, False, ring=ring, target=target)
    assert prefill == _latents(rounds, MANY, False) and step < prefill
    (norm,) = rounds(latents.latent_norm, _t(MANY, 1280), _t(1280), 1e-6)
    angles = _t(MANY, 32, dtype=FP32), _t(MANY, 32, dtype=FP32)
    (window,) = rounds(rotary.window_keys, _t(MANY, WIDTH), _t(WIDTH), *angles, eps=1e-6, rounded=True)
    factor = {root for root in norm if root.startswith("rsqrt(")}
    assert len(factor) == 1 and norm - factor < prefill and window < prefill
    assert (norm - factor) | window == prefill


def _dense_scores(compile, heads, count, keys):
    query, weights = _t(count, heads, 128), _t(count, heads, dtype=FP32)
    seen = {name: _t(count, dtype=INT) for name in ("begins", "ends")}
    return compile(indexer.index_scores, query, _t(keys, 128), weights, **seen)[0]


def _scores_of_blocks(compile, heads):
    query, ends, blocks = _t(64, heads, 128), _t(64, dtype=INT), _t(64, 256, dtype=INT)
    weights = _t(64, heads, dtype=FP32)
    return compile(candidates.scores_of_blocks, query, _t(8192, 128), weights, ends, blocks, 8)[0]


def _step_scores(compile, heads, listed):
    records, table = _t(8192, 68, dtype=BYTE), _t(64, 32, dtype=LONG)
    blocks = _t(64, 256, dtype=INT) if listed else None
    options = {"width": 2048, "page_groups": 64, "blocks": blocks, "block_size": 8, "factor": 2.0**-6}
    given = _t(64, heads, 128), _t(64, heads), records, table, _t(64, dtype=INT)
    return compile(index_decode.decode_scores, *given, **options)[0]


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_index_scores(rounds, heads):
    many = _dense_scores(rounds, heads, 1024, 4096)
    assert len(many) == 1 and "m" in next(iter(many))
    assert next(iter(many)).count("fma(") == heads - 4
    assert _dense_scores(rounds, heads, 1023, 4099) == _dense_scores(rounds, heads, 1, 4099) == many
    assert _scores_of_blocks(rounds, heads) == many
    for listed in (False, True):
        assert {root for root in _step_scores(rounds, heads, listed) if "m," in root} == many


def _keys():
    return attention.KeyRows(_t(MANY, 640, dtype=INT), _t(MANY, 2, dtype=INT), 512, 64)


def _training(compile, heads, kept=None):
    given = _t(MANY, heads, WIDTH), _t(8192, WIDTH), _keys(), _t(heads, dtype=FP32)
    return compile(attention.forward, *given, scale=WIDTH**-0.5, exact=True, kept=kept)[0]


def _decoding(compile, batch, heads):
    main, window = _t(8192, 288, dtype=BYTE), _t(8192, 528, dtype=BYTE)
    keys, recent = _t(batch, 512, dtype=INT), _t(batch, 128, dtype=INT)
    given = _t(batch, heads, WIDTH), main, keys, window, recent, _t(heads, dtype=FP32)
    rope, counts = (_t(batch, 32, dtype=FP32), _t(batch, 32, dtype=FP32)), _t(batch, 2, dtype=INT)
    return compile(decode.decode, *given, scale=WIDTH**-0.5, counts=counts, rope=rope, exact=True)[0]


def test_attention_that_keeps_its_probabilities_for_the_backward(rounds):
    kept = attention.Kept.empty(_t(MANY, 64, WIDTH), _keys(), 1)
    assert _training(rounds, 64, kept) == _training(rounds, 64)


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize("batch", [1, 64])
def test_attention(rounds, batch, heads):
    """Of any number of heads: what differs most easily is the order in which a row of weights is summed."""
    forward, step = _training(rounds, heads), _decoding(rounds, batch, heads)
    weight = {root for root in forward if root.startswith("ex2(")}
    assert len(weight) == 1 and weight <= step
    sums = {root for root in arithmetic.outermost(forward, "add") if "ex2(" in root}
    assert len(sums) == 1
    assert {root for root in arithmetic.outermost(step, "add") if "ex2(" in root} == sums
    if heads == 64:
        (logarithm,) = (root for root in forward if root.startswith("mul(0f3F317218,"))
        assert {root for root in step if "ex2(" in root} == forward - {logarithm}


def test_sums_of_streams_and_records_take_their_elements_in_one_order(sums):
    many = _update(sums, MANY)
    assert {size for size, _ in many} == {32, 1024}
    for rows in (1, 7, 64):
        assert _update(sums, rows) == _update(sums, rows, 5) == many
    given = _t(64, 4, D), _t(64, D), _t(64, 24, dtype=FP32), _t(D)
    assert sums(boundary.update, *given, 1e-6, warps=1) != [many]
    for kind, width in (("main", WIDTH), ("index", 128)):
        found = [
            sums(
                packing.pack_keys,
                kind,
                _t(groups, width),
                None,
                1,
                _t(groups, dtype=INT),
                _t(width),
                1e-6,
                None,
            )
            for groups in (1, 64, MANY)
        ]
        assert found[0][0] and found[0] == found[1] == found[2]


@pytest.mark.parametrize("queries", [1280, 1000])
def test_norms_of_a_step_take_their_elements_in_the_order_of_training(sums, queries):
    """Also where the row stride of what one product gives is no multiple of 16, and so not specialised."""
    angles, ring = (_t(MANY, 32, dtype=FP32), _t(MANY, 32, dtype=FP32)), _t(8192, 528, dtype=BYTE)

    def of(rows, values, window, **options):
        turns = [angle[:rows] for angle in angles]
        given = {"rounded": True, "ring": None, "target": None, "out": None, **options}
        return sums(latents.latents, values, _t(queries), window, _t(WIDTH), *turns, 1e-6, **given)[0]

    many = of(MANY, _t(MANY, queries), _t(MANY, WIDTH))
    assert {size for size, _ in many} == {1 << (queries - 1).bit_length(), WIDTH}
    for rows in (1, 64):
        joint = _t(rows, queries + WIDTH).split([queries, WIDTH], 1)
        assert of(rows, *joint, rounded=False, ring=ring, target=_t(rows, dtype=LONG)) == many
    (norm,) = sums(latents.latent_norm, _t(MANY, queries), _t(queries), 1e-6)
    (window,) = sums(rotary.window_keys, _t(MANY, WIDTH), _t(WIDTH), *angles, eps=1e-6, rounded=True)
    assert norm | window == many


@pytest.mark.parametrize("heads", [16, 64])
def test_attention_takes_the_weights_of_a_tile_in_one_order(sums, heads):
    many = _training(sums, heads)
    assert {size for size, _ in many} == {64}
    assert _decoding(sums, 1, heads) == _decoding(sums, 64, heads) == many


def _plan(tokens):
    items = tokens * (CHOSEN + 1)
    tiles = _t(most_tiles(items, EXPERTS + 1) + 1, 2, dtype=INT)
    return Plan(_t(items, dtype=INT), _t(tokens, CHOSEN + 1, dtype=INT), _t(EXPERTS + 1, dtype=INT), tiles)


@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
def test_experts(rounds, tokens):
    w13, w2 = _t(EXPERTS + 1, 1024, D), _t(EXPERTS + 1, D, WIDTH)
    weights = _t(MANY, CHOSEN, dtype=FP32)
    (many,) = rounds(product.activated, _t(MANY, D), w13, weights, _plan(MANY), 10.0)
    (apart,) = rounds(experts.swiglu, _t(5 * MANY, 1024), weights, _plan(MANY), 10.0)
    few, second = rounds(product.few, _t(tokens, D), w13, w2, weights[:tokens], _plan(tokens), 10.0)
    assert many == apart == few and len(few) == 1 and not second


@pytest.mark.parametrize(("kind", "ratio"), [("main", 2), ("main", 1), ("index", 1)])
def test_records(rounds, kind, ratio):
    width, dtype = (128 if kind == "index" else WIDTH), (FP32 if ratio > 1 else BF16)

    def packed(groups):
        values, starts = _t(groups * ratio, width, dtype=dtype), _t(groups, dtype=INT)
        angles = _t(groups, 32, dtype=FP32), _t(groups, 32, dtype=FP32)
        gates = values if ratio > 1 else None
        return rounds(packing.pack_keys, kind, values, gates, ratio, starts, _t(width), 1e-6, angles)[0]

    many = packed(MANY)
    assert len(many) >= 3
    assert all(packed(groups) == many for groups in (1, 8, 64, 653))


@pytest.mark.parametrize(("columns", "depth"), [(1280, D), (512, D), (D, 8192), (32, D), (32768, 1280)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_products_add_their_parts_in_order(rounds, columns, depth, dtype):
    def product_of(rows):
        out = _t(1, rows, columns, dtype=dtype)
        return rounds(exact_linear.product, _t(1, rows, depth), _t(1, columns, depth), out)[0]

    parts, one = exact_linear.parts(columns, depth), {arithmetic.sum_of(1)}
    assert product_of(MANY) == product_of(257) == one
    for rows in (1, 64, 256):
        assert product_of(rows) == one | {arithmetic.sum_of(parts)}


EXACT = (
    "decode_exact", "decode_plain", "decode_site", "attention_exact", "attention_exact_kept", "boundary",
    "boundary_gradients", "candidates", "engram", "exact_few", "exact_many", "exact_wide", "experts",
    "experts_few", "experts_products", "index_decode", "index_decode_listed", "pack_main", "pack_index",
    "pack_window", "packed_experts_exact", "rotary", "scores_bf16", "scores_fp8",
)  # fmt: skip
BACKWARD = {
    "backward", "site_backward", "stream_gradients", "swiglu_backward", "turned_gradient", "weights",
    "window_backward",
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_only_the_source_says_what_is_fused(compiled_kernels, case):
    """Of two products that are added up, compiler and assembler may fuse either: not the same everywhere."""
    found = {}

    def compiled(launcher, *args, **options):
        for name, kernel in compiled_kernels(launcher, *args, **options):
            if name not in BACKWARD and "logit_gradients" not in name:
                found[name] = arithmetic.left_to_fuse(kernel.asm["ptx"])
                if kernel.metadata.enable_fp_fusion:
                    found[name] += arithmetic.fused(kernel.asm["ptx"])
        return []

    CASES[case](compiled)
    assert found and not any(found.values()), found


@pytest.mark.parametrize(
    "case",
    [
        "attention_exact", "boundary", "candidates", "decode_exact", "decode_plain", "decode_site",
        "exact_few", "exact_many", "exact_wide", "experts_few", "experts_products", "index_decode",
        "index_decode_listed", "scores_bf16",
    ],
)  # fmt: skip
def test_few_and_many_rows_multiply_by_one_kind_of_instruction(compiled_kernels, case):
    """Two kinds cut a long sum into other parts, where operands are converted on the way."""
    kinds = set()

    def compiled(launcher, *args, **options):
        kinds.update(*(_products(kernel) for kernel in compiled_kernels(launcher, *args, **options)))
        return []

    CASES[case](compiled)
    assert kinds == {"wgmma"}


@pytest.mark.parametrize("heads", [16, 32])
def test_fewer_heads_multiply_by_the_same_instruction(compiled_kernels, heads):
    assert _products(_training(compiled_kernels, heads)) == {"wgmma"}
    assert _products(_decoding(compiled_kernels, 1, heads)) == {"wgmma"}


def _products(compiled):
    _, kernel = compiled
    names = {name.split(".")[0] for name, _ in arithmetic.instructions(kernel.asm["ptx"])}
    return {name for name in names if name.endswith("mma")}
