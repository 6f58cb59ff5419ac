import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.ops.indexer import index_topk, queries_at_once
from model.ops.topk import topk

_VALUES = st.sampled_from(
    [0.0, -0.0, 1.0, 1.5, -2.0, 3e38, -3e38, 1e-45, float("inf"), float("-inf"), float("nan")]
)


def _expected(row, k, begin, end):
    usable = [i for i in range(begin, end) if row[i] > float("-inf")]
    chosen = sorted(sorted(usable, key=lambda i: (-row[i], i))[:k])
    return chosen + [-1] * (k - len(chosen))


@settings(max_examples=60, deadline=None)
@given(st.lists(_VALUES, min_size=1, max_size=24), st.integers(1, 8), st.data())
def test_choice_is_by_value_then_lowest_column(values, k, data):
    begin = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(0, len(values)))
    scores = torch.tensor([values], dtype=torch.float32)
    got = topk(scores, k, begins=torch.tensor([begin]).int(), ends=torch.tensor([end]).int())
    assert got[0].tolist() == _expected(scores[0].tolist(), k, begin, end)


def test_choice_does_not_depend_on_the_width():
    torch.manual_seed(0)
    scores = torch.relu(torch.randn(4, 300))
    wide = torch.cat([scores, torch.full((4, 700), float("-inf"))], 1)
    assert torch.equal(topk(scores, 64), topk(wide, 64))


def test_indexer_sums_weighted_relus_and_respects_the_visible_range():
    query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).repeat(2, 1, 1)
    keys = torch.tensor([[2.0, 3.0], [1.0, -5.0], [-4.0, 4.0], [0.5, 0.5]])
    weights = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    # Scores: row 0 [-1, 1, -4, 0], row 1 [5, 1, 4, 1].
    begins, ends = torch.tensor([0, 1]).int(), torch.tensor([4, 4]).int()
    assert index_topk(query, keys, weights, 2, begins=begins, ends=ends).tolist() == [[1, 3], [1, 2]]


def test_scores_of_a_million_keys_take_no_more_memory_than_those_of_many_queries():
    assert [queries_at_once(keys) for keys in (0, 131072, 200_000, 1 << 20, 1 << 24)] == [
        1024,
        1024,
        640,
        128,
        64,
    ]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="fp32 scores"):
        topk(torch.zeros(2, 3, dtype=torch.float64), 1)
    with pytest.raises(ValueError, match="must agree"):
        index_topk(torch.zeros(1, 2, 4), torch.zeros(3, 5), torch.zeros(1, 2), 1, begins=None, ends=None)  # type: ignore
