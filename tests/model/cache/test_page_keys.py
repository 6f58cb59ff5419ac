"""Names agree exactly as far as histories and policies do."""

import random
from dataclasses import replace

import pytest

from model.cache.page_keys import Fingerprint, ImageMark, KeyChain
from model.config import PolicyConfig

NANO = PolicyConfig.preset("nano")
BASE = Fingerprint.of(NANO, model="run", version=3, tokenizer="t", numerics={"replay": "bounded"})


def chain(ids, images=(), of=BASE, page=4):
    return KeyChain(of.digest(), ids, images, page)


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a.pages, b.pages, strict=False)) if x != y), len(b.pages))


def test_names_agree_up_to_the_page_of_the_first_difference():
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(3) for _ in range(draw.randrange(4, 40))]
        at = draw.randrange(len(ids))
        other = [*ids[:at], 3, *ids[at + 1 :]]
        assert shared(chain(ids), chain(other)) == min(at // 4, len(ids) // 4)
        assert (
            len({*chain(ids).pages, *chain(other).pages}) == 2 * (len(ids) // 4) - at // 4
            or at >= len(ids) // 4 * 4
        )


def test_a_tail_is_named_after_exactly_its_tokens():
    names = {chain(range(40)).tail(length) for length in range(41)}
    assert len(names) == 41
    assert chain(range(40)).tail(13) == chain([*range(13), 7, 7]).tail(13)
    assert chain(range(40)).tail(13) != chain([*range(12), 7]).tail(13)
    assert not names & set(chain(range(40)).pages)


def test_images_count_from_where_they_begin():
    ids = [9] * 16
    plain, red, blue = chain(ids), chain(ids, [ImageMark(6, b"red")]), chain(ids, [ImageMark(6, b"blue")])
    assert shared(plain, red) == shared(red, blue) == 1
    assert red.tail(6) == plain.tail(6) and red.tail(7) != plain.tail(7) != blue.tail(7) != red.tail(7)
    assert shared(red, chain(ids, [ImageMark(5, b"red")])) == 1
    with pytest.raises(ValueError, match="history has 16"):
        chain(ids, [ImageMark(16, b"red")])


@pytest.mark.parametrize(
    "other",
    [
        BASE.at(4),
        replace(BASE, model="another run"),
        replace(BASE, tokenizer="u"),
        Fingerprint.of(
            replace(NANO, index_topk=7), model="run", version=3, tokenizer="t", numerics={"replay": "bounded"}
        ),
        Fingerprint.of(NANO, model="run", version=3, tokenizer="t", numerics={"replay": "exact"}),
    ],
)
def test_another_policy_shares_no_name(other):
    ours, theirs = chain(range(40)), chain(range(40), of=other)
    assert not set(ours.pages) & set(theirs.pages) and ours.tail(9) != theirs.tail(9)
    assert (other.family == BASE.family) == (other.version != BASE.version)


def test_page_sizes_do_not_mix():
    assert not set(chain(range(8)).pages) & set(chain(range(8), page=8).pages)


def test_a_nameless_policy_is_refused():
    with pytest.raises(ValueError, match="would match other policies"):
        replace(BASE, model="")
    with pytest.raises(ValueError, match="counts updates"):
        BASE.at(-1)
