import pytest
import torch

from model.layers.indexer import CandidateRule
from model.ops.candidates import best_blocks, topk_in_blocks
from model.ops.indexer import index_scores
from model.ops.topk import topk


def _case(queries=9, keys=203, heads=4, width=16):
    torch.manual_seed(0)
    query, key = torch.randn(queries, heads, width).bfloat16(), torch.randn(keys, width).bfloat16()
    visible = torch.tensor([0, 1, 7, 8, 9, 60, 150, 202, 203]).int()
    return query, key, torch.randn(queries, heads), visible


def _blocks_by_rule(rule, scores, visible):
    masked = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)
    found = rule.choose(masked[None], visible[None].long())[0]
    found = torch.where(found >= 0, found, 1 << 30).sort(1).values
    return torch.where(found < 1 << 30, found, -1).int()


@pytest.mark.parametrize("size", [1, 3, 8])
def test_blocks_and_the_choice_among_them_are_those_of_the_rule(size):
    query, keys, weights, visible = _case()
    scores, rule = (
        index_scores(query, keys, weights, begins=visible * 0, ends=visible),
        CandidateRule(5, size),
    )
    unseen = torch.arange(len(keys)) >= visible[:, None]
    blocks = best_blocks(scores.masked_fill(unseen, torch.nan), visible, rule.blocks, size)
    assert torch.equal(blocks, _blocks_by_rule(rule, scores, visible))
    allowed = rule.expand(blocks[None].long(), len(keys))[0] & ~unseen
    expected = topk(scores.masked_fill(~allowed, -torch.inf), 4)
    given = {"visible": visible, "blocks": blocks, "size": size}
    assert torch.equal(topk_in_blocks(query, keys, weights, 4, **given), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_a_choice_in_blocks_is_by_value_then_lowest_column(packed):
    torch.manual_seed(0)
    scores = torch.relu(torch.randn(3, 40)).round(decimals=1)
    blocks = torch.tensor([[0, 3, 9], [2, 13, -1], [-1, -1, -1]]).int()
    columns = (blocks[:, :, None] * 3 + torch.arange(3)).flatten(1)
    held = (blocks >= 0).repeat_interleave(3, 1) & (columns < 40)
    given = scores.gather(1, columns.clamp(0, 39).long()).masked_fill(~held, -torch.inf)
    got = topk(given if packed else scores, 5, blocks=blocks, block_size=3, packed=packed)
    allowed = torch.zeros(3, 120, dtype=torch.bool).scatter_(1, columns.clamp_min(0).long(), held)[:, :40]
    assert torch.equal(got, topk(scores.masked_fill(~allowed, -torch.inf), 5))
