import pytest
import torch

from model.ops.dispatch import paths
from model.ops.records import pack, unpack
from model.ops.sparse_attention import invert, sparse_attention
from model.ops.sparse_decode import sparse_decode

T, H, D, E, K, W = 12, 4, 64, 9, 5, 4
SCALE = D**-0.5


def _inputs(dtype=torch.float64):
    torch.manual_seed(1)
    indices = torch.stack([torch.randperm(E)[:K].sort().values for _ in range(T)]).int()
    indices[0] = -1
    indices[3, 2:] = -1
    first = torch.where(torch.arange(T) < 7, 0, 7).int()
    tensors = [torch.randn(*s, dtype=dtype) for s in ((T, H, D), (E, D), (T, D), (H,))]
    return [*(x.requires_grad_() for x in tensors), indices, first]


def _dense(query, entries, window, sink, indices, first):
    """The same sum, written as a loop over queries and heads."""
    out = torch.zeros_like(query)
    for t in range(T):
        keys = [entries[i] for i in indices[t].tolist() if i >= 0]
        keys += [window[j] for j in range(max(int(first[t]), t - W + 1), t + 1)]
        k = torch.stack(keys)
        for h in range(H):
            e = torch.exp(SCALE * (k @ query[t, h]))
            out[t, h] = (e / (e.sum() + torch.exp(sink[h]))) @ k
    return out


def test_definition_equals_the_sum_written_out():
    query, entries, window, sink, indices, first = _inputs()
    out, lse = sparse_attention(query, entries, indices, window, first, sink, scale=SCALE, window_size=W)
    torch.testing.assert_close(out, _dense(query, entries, window, sink, indices, first))
    assert not lse.requires_grad and lse.shape == (T, H)
    assert paths()["sparse_attention"] == "reference"


def test_gradients_of_query_entries_window_and_sink():
    query, entries, window, sink, indices, first = _inputs()

    def run(*x):
        return sparse_attention(x[0], x[1], indices, x[2], first, x[3], scale=SCALE, window_size=W)[0]

    assert torch.autograd.gradcheck(run, (query, entries, window, sink), fast_mode=True)


def test_a_sink_only_takes_probability_away():
    query, entries, window, sink, indices, first = (x.detach() for x in _inputs())
    low, _ = sparse_attention(query, entries, indices, window, first, sink - 1e4, scale=SCALE, window_size=W)
    high, _ = sparse_attention(query, entries, indices, window, first, sink + 1e4, scale=SCALE, window_size=W)
    assert high.abs().max() < 1e-6 < low.abs().max()


def test_rows_do_not_depend_on_the_rest_of_the_batch():
    query, entries, window, sink, indices, first = (x.detach() for x in _inputs(torch.float32))
    own = torch.arange(T, dtype=torch.int32)
    whole, _ = sparse_attention(query, entries, indices, window, first, sink, scale=SCALE, window_size=W)
    row = slice(8, 9)
    alone, _ = sparse_attention(
        query[row], entries, indices[row], window, first[row], sink, scale=SCALE, window_size=W, last=own[row]
    )
    torch.testing.assert_close(alone, whole[row])


def test_decode_equals_attention_over_the_unpacked_records():
    query, entries, window, sink, indices, first = (x.detach() for x in _inputs(torch.float32))
    records, recent = pack("main", entries), pack("window", window)
    rows = torch.arange(T)[:, None] - torch.arange(W - 1, -1, -1)
    rows = torch.where(rows >= first[:, None], rows, T).sort(1).values
    rows = torch.where(rows < T, rows, -1).int()
    out = sparse_decode(query, records, indices, recent, rows, sink, scale=SCALE)
    expected, _ = sparse_attention(
        query,
        unpack("main", records),
        indices,
        unpack("window", recent),
        first,
        sink,
        scale=SCALE,
        window_size=W,
    )
    torch.testing.assert_close(out, expected)


def test_the_inverse_lists_every_selection_once_in_order():
    *_, indices, _first = _inputs()
    inverse = invert(indices, E, chunk=5)
    for c, part in enumerate(indices.split(5)):
        for e in range(E):
            begin, end = inverse.pointers[c][e], inverse.pointers[c][e + 1]
            expected = (part.reshape(-1) == e).nonzero()[:, 0].tolist()
            assert inverse.slots[c][begin:end].tolist() == expected


def test_shapes_that_do_not_fit_are_refused():
    query, entries, window, sink, indices, first = (x.detach() for x in _inputs(torch.float32))
    with pytest.raises(ValueError, match="pass `last`"):
        sparse_attention(query, entries, indices, window[:3], first, sink, scale=SCALE)
    with pytest.raises(ValueError, match="channels and heads"):
        sparse_attention(query, entries[:, :32], indices, window, first, sink, scale=SCALE)
    with pytest.raises(ValueError, match="rows of indices"):
        sparse_decode(
            query, pack("main", entries), indices[:2], pack("window", window), indices, sink, scale=SCALE
        )
