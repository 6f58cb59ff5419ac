"""The ragged mask of what a token could have been, against plain lists."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model.choices import SamplingMask, entropy_of, truncated_logprobs

ROWS = st.lists(st.sets(st.integers(0, 9), max_size=9).map(sorted), min_size=1, max_size=6)


def listed(mask):
    bounds = mask.offsets.tolist()
    return [mask.ids[a:b].tolist() for a, b in pairwise(bounds)]


@given(ROWS, st.data())
def test_a_mask_keeps_what_its_tokens_could_have_been(rows, data):
    mask = SamplingMask.of_rows(rows)
    assert len(mask) == len(rows) and listed(mask) == rows
    allowed = mask.allowed(10)
    for row, ids in zip(allowed.tolist(), rows, strict=True):
        assert [i for i, one in enumerate(row) if one] == (ids or list(range(10)))
    assert listed(SamplingMask.of_allowed(allowed)) == rows
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    assert listed(mask.take(torch.tensor(picks, dtype=torch.int64))) == [rows[i] for i in picks]
    cut = data.draw(st.integers(0, len(rows)))
    assert listed(mask[:cut]) == rows[:cut] and listed(mask[cut:]) == rows[cut:]
    assert listed(SamplingMask.join([mask[:cut], SamplingMask.none(2), mask[cut:]])) == [
        *rows[:cut],
        [],
        [],
        *rows[cut:],
    ]


def test_offsets_that_do_not_cover_the_ids_are_refused():
    with pytest.raises(ValueError, match="rise from 0 to its 3 ids"):
        SamplingMask(torch.arange(3), torch.tensor([0, 2]))


def test_renormalised_values_and_their_entropy():
    logits = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]] * 2)
    logprobs = truncated_logprobs(logits, SamplingMask.of_rows([[0, 2], []]))
    expected = torch.tensor([[math.log(5 / 7), -math.inf, math.log(2 / 7)], logits[1].tolist()])
    torch.testing.assert_close(logprobs, expected)
    entropy = -(5 / 7 * math.log(5 / 7) + 2 / 7 * math.log(2 / 7))
    assert entropy_of(logprobs)[0].item() == pytest.approx(entropy, abs=1e-6)
