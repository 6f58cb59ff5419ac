"""What was saved is found by whoever has the same beginning and the same policy, and by nobody else."""

import random
from dataclasses import replace

import pytest
import torch

from model.cache.page_keys import Fingerprint, ImageMark
from model.cache.policy_cache import CacheFull, PolicyCache, tokens_of_page
from model.cache.prefix import PrefixStore, PrefixTiers
from model.config import PolicyConfig
from model.replay import decode_from
from tests.model.cache.written import append, check

NANO = PolicyConfig.preset("nano")
BASE = Fingerprint.of(NANO, model="run", version=0, tokenizer="t", numerics={})
PAGE, REPLAY = 64, 16
IDS = random.Random(1).choices(range(64), k=1000)


class Clock:
    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tiers(memory_folder, tmp_path):
    return PrefixTiers(
        host_folder=memory_folder,
        host_bytes=1 << 20,
        disk_folder=tmp_path / "disk",
        disk_bytes=1 << 22,
        memory_bytes=1 << 24,
    )


def store(tiers, clock, fingerprint=BASE, config=NANO, replay="bounded"):
    assert tokens_of_page(config) == PAGE and NANO.sliding_window == REPLAY
    return PrefixStore(fingerprint, tiers, config=config, replay=replay, clock=clock)


def cache(pages=40):
    return PolicyCache(NANO, 8, 600, torch.float32, torch.device("cpu"), "packed", pages)


def none_before(_):
    return torch.zeros(3, dtype=torch.int64)


def save(store, where, tokens, images=()):
    slot = where.allocate()
    assert append(where, slot, [], tokens) == list(tokens)
    store.save(where, slot, tokens, images)
    where.free(slot)


def drop_windows(tiers):
    for path in tiers.host_folder.glob("windows/v1/*/*/*/*"):
        path.unlink()


def drop_host(tiers):
    for path in tiers.host_folder.glob("pages/v1/*/*/*/*"):
        path.unlink()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 300])
def test_a_session_goes_on_where_it_stopped(tiers, clock, length):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:length])
    theirs, there = store(tiers, clock), cache()
    hit = theirs.lookup(IDS[: length + 9])
    assert (hit.global_tokens, hit.window) == (length, True)
    loaded = theirs.load(there, hit, none_before)
    assert (loaded.global_tokens, loaded.replay) == (length, 0)
    check(there, loaded.slot, IDS[:length], tail=True)
    append(there, loaded.slot, IDS[:length], IDS[length : length + 70])
    check(there, loaded.slot, IDS[: length + 70], tail=True)


@pytest.mark.parametrize("source", ["accelerator", "host", "disk"])
def test_keys_without_windows_come_by_the_page_from_each_tier(tiers, clock, source):
    ours, where = store(tiers, clock), cache()
    save(ours, where, IDS[:300])
    drop_windows(tiers)
    if source == "disk":
        drop_host(tiers)
    if source != "accelerator":
        where = cache()
    hit = ours.lookup(IDS[:500], cache=where)
    assert (hit.global_tokens, hit.window) == (256, False)
    loaded = ours.load(where, hit, none_before)
    assert (loaded.global_tokens, loaded.replay, loaded.replay_starts) == (256, REPLAY, ())
    check(where, loaded.slot, IDS[:256], tail=False)
    usage = ours.stats().usage
    assert getattr(usage, f"{source}_pages") == 4
    assert usage.accelerator_pages + usage.host_pages + usage.disk_pages == 4
    again = ours.load(cache(), hit, none_before)
    assert again.global_tokens == 256 and ours.stats().usage.host_pages == (8 if source == "host" else 4)


def test_the_last_token_is_always_left_to_compute(tiers, clock):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:128])
    assert not ours.lookup([]) and not ours.lookup(IDS[:1])
    hit = ours.lookup(IDS[:128])
    assert (hit.global_tokens, hit.window) == (64, False)
    assert ours.lookup(IDS[:129]).global_tokens == 128


def test_a_tail_far_behind_is_worth_less_than_a_replay(tiers, clock):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:100])
    save(ours, cache(), IDS[:300])
    (newest,) = (path for path in tiers.host_folder.glob("windows/v1/*/*/*/*-300.tail"))
    newest.unlink()
    assert ours.lookup(IDS[:400]).global_tokens == 256
    assert not ours.lookup(IDS[:400]).window
    off = store(tiers, clock, replay="off")
    assert off.lookup(IDS[:400]).global_tokens == 100 and off.lookup(IDS[:400]).window


def test_keys_that_a_replay_would_cover_anyway_are_no_hit(tiers, clock):
    save(store(tiers, clock), cache(), IDS[:90])
    drop_windows(tiers)
    wide, narrow = (store(tiers, clock, config=replace(NANO, sliding_window=w)) for w in (64, 63))
    assert not wide.lookup(IDS[:90])
    assert narrow.lookup(IDS[:90]).global_tokens == 64
    # Exactly: the decoder runs from 45 tokens before the last one, the encoder from 45 before that.
    exact = store(tiers, clock, replay="exact")
    assert not exact.lookup(IDS[:90])
    save(store(tiers, clock), cache(), IDS[:300])
    drop_windows(tiers)
    loaded = exact.load(cache(), exact.lookup(IDS[:500]), none_before)
    assert (loaded.global_tokens, loaded.replay) == (256, 45)
    loaded = exact.load(cache(), exact.lookup(IDS[:301]), none_before)
    assert (loaded.global_tokens, loaded.replay) == (256, 256 - (300 - 45 - 45))


@pytest.mark.parametrize(
    "other",
    [
        BASE.at(1),
        replace(BASE, model="another run"),
        replace(BASE, tokenizer="another"),
        Fingerprint.of(replace(NANO, rms_norm_eps=1e-6), model="run", version=0, tokenizer="t", numerics={}),
        Fingerprint.of(NANO, model="run", version=0, tokenizer="t", numerics={"replay": "exact"}),
    ],
)
def test_another_policy_never_hits(tiers, clock, other):
    where = cache()
    save(store(tiers, clock), where, IDS[:300])
    assert not store(tiers, clock, other).lookup(IDS[:301], cache=where)
    assert store(tiers, clock).lookup(IDS[:301], cache=where).global_tokens == 300


def test_an_update_puts_old_keys_out_of_reach_and_collects_them(tiers, clock):
    ours, where = store(tiers, clock), cache()
    save(ours, where, IDS[:300])
    ours.set_version(1)
    assert not ours.lookup(IDS[:301], cache=where)
    stats = ours.stats()
    assert stats.host.nbytes == stats.disk.nbytes == stats.windows.nbytes == 0
    assert stats.disk.counters.outdated == 4 and stats.windows.counters.outdated == 1
    save(ours, where, IDS[:300])
    assert ours.lookup(IDS[:301]).global_tokens == 300


def test_other_images_are_another_history(tiers, clock):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:300], [ImageMark(130, b"red")])
    hits = [ours.lookup(IDS[:301], marks) for marks in ([ImageMark(130, b"red")], [ImageMark(130, b"blue")])]
    assert [(hit.global_tokens, hit.window) for hit in hits] == [(300, True), (128, False)]


def test_lifetimes_windows_minutes_keys_days(tiers, clock):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:300])
    clock.now += 601
    assert not ours.lookup(IDS[:301]).window and ours.lookup(IDS[:301]).global_tokens == 256
    clock.now += 72 * 3600 - 700
    assert ours.load(cache(), ours.lookup(IDS[:301]), none_before).global_tokens == 256
    clock.now += 72 * 3600 - 1
    assert ours.lookup(IDS[:301]).global_tokens == 256
    clock.now += 2
    assert not ours.lookup(IDS[:301])


def test_windows_are_never_written_to_disk(tiers, clock, tmp_path):
    save(store(tiers, clock), cache(), IDS[:300])
    assert {path.suffix for path in (tmp_path / "disk").glob("v1/**/*.*")} == {".page"}
    assert len(list(tiers.host_folder.glob("windows/v1/**/*.tail"))) == 1
    with pytest.raises(ValueError, match="not in memory"):
        replace(tiers, host_folder=tmp_path)


def test_a_tail_of_other_rings_is_as_good_as_lost(tiers, clock):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:300])
    other = PolicyCache(NANO, 1, 600, torch.float32, torch.device("cpu"), "packed", 40, slack=3)
    loaded = ours.load(other, ours.lookup(IDS[:301]), none_before)
    assert (loaded.global_tokens, loaded.replay) == (256, REPLAY)
    check(other, loaded.slot, IDS[:256], tail=False)


def test_windows_stay_under_their_share_of_memory(tiers, clock):
    ours = store(replace(tiers, memory_bytes=1 << 20), clock)
    for i in range(40):
        clock.now += 1
        save(ours, cache(), IDS[i : i + 100])
    windows = ours.stats().windows
    assert windows.nbytes <= windows.max_bytes == (1 << 20) // 10 and windows.counters.evicted > 20
    assert ours.lookup(IDS[39:200]).window and not ours.lookup(IDS[:200]).window


@pytest.mark.parametrize("part", ["pages", "windows"])
def test_what_breaks_between_lookup_and_load_shortens_it(tiers, clock, part):
    ours = store(replace(tiers, disk_folder=None), clock)
    save(ours, cache(), IDS[:300])
    hit = ours.lookup(IDS[:301])
    for path in sorted(tiers.host_folder.glob(f"{part}/v1/*/*/*/*")):
        data = path.read_bytes()
        if part == "windows" or hit.pages[2].hex() in path.name:
            path.write_bytes(data[: len(data) // 2])
    where = cache()
    loaded = ours.load(where, hit, none_before)
    assert (loaded.global_tokens, loaded.replay) == ((128 if part == "pages" else 256), REPLAY)
    check(where, loaded.slot, IDS[: loaded.global_tokens], tail=False)
    stats = ours.stats()
    assert stats.usage.lost == 1
    assert (stats.host.counters.corrupt, stats.windows.counters.corrupt) == (
        (1, 0) if part == "pages" else (0, 1)
    )


def test_nothing_changes_when_pages_are_short(tiers, clock):
    ours = store(tiers, clock)
    save(ours, cache(), IDS[:300])
    small = cache(pages=4)
    hit = ours.lookup(IDS[:301], cache=small)
    with pytest.raises(CacheFull, match="5 pages are needed"):
        ours.load(small, hit, none_before)
    assert small.free_slots == 8 and small.pages.free_pages == 4


def test_replay_starts_travel_with_the_pages(tiers, clock):
    ours, where = store(tiers, clock), cache()
    slot = where.allocate()
    append(where, slot, [], IDS[:300])
    ours.save(where, slot, IDS[:300], replay_starts=[0, 70, 200])
    assert ours.load(where, ours.lookup(IDS[:301], cache=where), none_before).replay_starts == (70, 200)
    assert ours.load(cache(), ours.lookup(IDS[:150]), none_before).replay_starts == (70,)
    assert ours.load(cache(), ours.lookup(IDS[:100]), none_before).replay_starts == ()


def test_the_real_policy_goes_on_bit_for_bit(tiers, clock, nano):
    nano.fake_quant = True
    ours, first, second = store(tiers, clock), *(nano.new_cache(2, 600, storage="packed") for _ in range(2))
    slot = first.allocate()

    def extend(cache, slot, ids):
        with torch.inference_mode():
            return nano.extend(cache, torch.tensor([slot]), torch.tensor([ids]), torch.tensor([len(ids)]))

    extend(first, slot, IDS[:301])
    ours.save(first, slot, IDS[:301])
    loaded = store(tiers, clock).load(second, ours.lookup(IDS[:400]), none_before)
    assert loaded.global_tokens == 301
    for begin, end in ((301, 302), (302, 350), (350, 351)):
        assert torch.equal(extend(first, slot, IDS[begin:end]), extend(second, loaded.slot, IDS[begin:end]))


@pytest.mark.parametrize("source", ["host", "disk"])
def test_the_real_policy_replays_lost_windows_as_if_it_had_kept_the_keys(tiers, clock, nano, source):
    nano.fake_quant = True
    ours, first, second = store(tiers, clock), *(nano.new_cache(2, 600, storage="packed") for _ in range(2))

    def extend(cache, slot, ids, **options):
        counts = torch.tensor([len(ids)])
        with torch.inference_mode():
            return nano.extend(cache, torch.tensor([slot]), torch.tensor([ids]), counts, **options)

    slot = first.allocate()
    extend(first, slot, IDS[:301])
    ours.save(first, slot, IDS[:301])
    drop_windows(tiers)
    if source == "disk":
        drop_host(tiers)
    loaded = ours.load(second, ours.lookup(IDS[:400]), lambda at: nano.look_back_ids(torch.tensor(IDS[:at])))
    begin = loaded.global_tokens - loaded.replay
    assert (loaded.global_tokens, begin) == (256, 240)
    # The same with keys taken over by hand from the cache that computed them.
    resume = nano.look_back_ids(torch.tensor(IDS[:begin]))
    held = first.pages.owned(slot)[:4]
    other = first.adopt(256, begin, resume, held)
    replayed = {"replayed": torch.tensor([loaded.replay])}
    ends = [
        extend(cache, at, IDS[begin:350], **replayed) for cache, at in ((second, loaded.slot), (first, other))
    ]
    assert torch.equal(*ends) and torch.isfinite(ends[0]).all()
    exact = extend(first, slot, IDS[301:350])
    assert not torch.equal(exact, ends[0]) and torch.nn.functional.cosine_similarity(exact, ends[0]) > 0.8


def test_an_exact_replay_goes_on_as_if_nothing_was_lost(tiers, clock, nano):
    nano.fake_quant = nano.exact = True
    ours = store(tiers, clock, replay="exact")
    first, second = (nano.new_cache(2, 600, storage="packed") for _ in range(2))

    def extend(cache, slot, ids, end):
        options = {"decode_from": torch.tensor([decode_from(NANO, "exact", end)])}
        with torch.inference_mode():
            return nano.extend(
                cache, torch.tensor([slot]), torch.tensor([ids]), torch.tensor([len(ids)]), **options
            )

    slot = first.allocate()
    extend(first, slot, IDS[:301], 301)
    ours.save(first, slot, IDS[:301])
    drop_windows(tiers)
    drop_host(tiers)
    kept = extend(first, slot, IDS[301:350], 350)
    loaded = ours.load(second, ours.lookup(IDS[:350]), lambda at: nano.look_back_ids(torch.tensor(IDS[:at])))
    begin = loaded.global_tokens - loaded.replay
    assert 0 < begin < loaded.global_tokens == 256 and loaded.replay_starts == ()
    assert torch.equal(kept, extend(second, loaded.slot, IDS[begin:350], 350))


def test_a_dense_cache_and_other_tokens_are_refused(tiers, clock, nano):
    ours, dense, packed = store(tiers, clock), nano.new_cache(1, 8), cache()
    with pytest.raises(ValueError, match="packed"):
        ours.save(dense, dense.allocate(), [])
    slot = packed.allocate()
    append(packed, slot, [], IDS[:9])
    with pytest.raises(ValueError, match="holds 9 tokens, 8 were given"):
        ours.save(packed, slot, IDS[:8])
