"""Candidate blocks on a card: their keys' scores have the same bits in both ways and in decoding."""

import pytest
import torch

from benchmarks import kernel_data as data
from model.ops.candidates import best_blocks, topk_in_blocks
from model.ops.candidates import triton as kernels
from model.ops.dispatch import reference_only
from model.ops.index_decode import decode_scores
from model.ops.indexer import index_scores
from model.ops.pack_keys import pack_keys
from model.ops.records import unpack
from model.ops.topk import topk

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def _case(count, keys):
    query, key = data.mxfp4_values(count, 32, 128).bfloat16(), data.mxfp4_values(keys, 128).bfloat16()
    visible = torch.randint(0, keys + 1, (count,), device="cuda").int()
    visible[:3] = torch.tensor([0, 1, keys])
    return query, key, torch.randn(count, 32, device="cuda"), visible


@pytest.mark.parametrize(("keys", "count", "size"), [(5003, 100, 8), (40000, 2048, 8), (5003, 301, 3)])
def test_blocks_and_the_choice_among_them(keys, count, size):
    query, key, weights, visible = _case(131, keys)
    scores = index_scores(query, key, weights, begins=torch.zeros_like(visible), ends=visible)
    blocks = best_blocks(scores, visible, count, size)
    with reference_only():
        assert torch.equal(blocks, best_blocks(scores, visible, count, size))
        expected = topk(scores, 512, ends=visible, blocks=blocks, block_size=size)
    for dense in (0, 1000):
        given = {"visible": visible, "blocks": blocks, "size": size, "dense": dense}
        for _ in range(2):
            assert torch.equal(kernels.topk_in_blocks(query, key, weights, 512, **given), expected)
    given = {"visible": visible[7:9], "blocks": blocks[7:9], "size": size}
    assert torch.equal(topk_in_blocks(query[7:9], key, weights[7:9], 512, **given), expected[7:9])


def test_a_key_has_the_same_score_in_prefill_and_decode():
    query, key, weights, visible = _case(5, 4096)
    records = pack_keys("index", key)[1]
    key = unpack("index", records).bfloat16()
    blocks = torch.stack([torch.randperm(512, device="cuda")[:300].sort().values for _ in visible]).int()
    blocks[1, 200:] = -1
    listed = kernels.scores_of_blocks(query, key, weights, visible, blocks, 8)
    table = torch.arange(64, device="cuda")[None].expand(5, 64).contiguous()
    decoded = decode_scores(
        query, weights, records, table, visible, width=2400, page_groups=64, blocks=blocks
    )
    assert torch.equal(decoded, listed)
