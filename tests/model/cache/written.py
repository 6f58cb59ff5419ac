"""Sequences whose cached state is a function of their tokens: a wrong byte is seen without a policy."""

import hashlib

import numpy as np
import torch

from model.cache.state_bytes import page_rows, places, write_pages


def noise(kind, tokens, size):
    """[size] uint8 that no other tokens have."""
    digest = hashlib.sha256(repr((kind, tuple(tokens))).encode()).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest[:8]))).bytes(size)


def _tail(cache, slot, tokens):
    state = {}
    for name, value in places(cache, slot).items():
        raw = torch.frombuffer(bytearray(noise(name, tokens, value.nbytes)), dtype=torch.uint8)
        # Every byte finite as float32, so that equal means equal.
        state[name] = (raw % 60).view(value.dtype).view(value.shape)
    return state


def _page(tokens, place, page_tokens, size):
    return noise("page", tokens[: (place + 1) * page_tokens], size)


def append(cache, slot, tokens, new):
    """Extend `slot`, which holds `tokens`, by `new`."""
    cache.advance([slot], cache.make_room([slot], [len(new)]))
    whole = [*tokens, *new]
    pages, size = cache.pages.owned(slot), page_rows(cache, [0]).shape[1]
    first = len(tokens) // cache.pages.page_tokens
    contents = [_page(whole, i, cache.pages.page_tokens, size) for i in range(first, len(pages))]
    write_pages(cache, pages[first:], contents)
    for name, value in _tail(cache, slot, whole).items():
        places(cache, slot)[name][...] = value
    return whole


def check(cache, slot, tokens, *, tail):
    """Assert that `slot` holds the state of `tokens`; the tail only when it should."""
    assert cache.length(slot) == len(tokens)
    pages = cache.pages.owned(slot)
    rows = page_rows(cache, pages).numpy()
    for i, row in enumerate(rows):
        assert row.tobytes() == _page(tokens, i, cache.pages.page_tokens, row.size), f"page {i}"
    if tail:
        expected = _tail(cache, slot, tokens)
        for name, value in places(cache, slot).items():
            assert torch.equal(value, expected[name]), name
