"""Engines that share a prefix store: a session goes on elsewhere as if it had stayed."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model.cache.page_keys import Fingerprint
from model.cache.prefix import PrefixStore, PrefixTiers
from model.config import PolicyConfig
from model.engine.columns import ContextState
from model.engine.engine import Engine
from model.engine.prefixes import image_marks
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.engine.speculative import Speculation
from model.policy import Policy
from model.vision import ImageTokens

NANO = PolicyConfig.preset("nano")
LONGEST = 640
IDS = np.random.default_rng(5).integers(0, 64, LONGEST).tolist()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def policy():
    policy = Policy(NANO)
    policy.reset_parameters(3)
    policy.fake_quant = True
    with torch.no_grad():
        policy.head.weight *= 8  # a distribution that is neither flat nor a point  # pyright: ignore
    return policy


@pytest.fixture
def tiers(tmp_path):
    memory = Path(tempfile.mkdtemp(prefix="prefix-test-", dir="/dev/shm"))
    yield PrefixTiers(
        host_folder=memory,
        host_bytes=1 << 22,
        disk_folder=tmp_path / "disk",
        disk_bytes=1 << 22,
        memory_bytes=1 << 25,
    )
    shutil.rmtree(memory)


def store(tiers, version=0, replay="bounded", config=NANO):
    fingerprint = Fingerprint.of(config, model="run", version=version, tokenizer="t", numerics={"r": replay})
    return PrefixStore(fingerprint, tiers, config=config, replay=replay)


def engine(policy, tiers=None, *, replay="bounded", version=0, **options):
    kept = None if tiers is None else store(tiers, version, replay, policy.config)
    options = {"max_requests": 4, "max_tokens": LONGEST} | options
    return Engine(policy, replay=replay, version=version, prefix_store=kept, **options)


def run(engine, *requests):
    ids, ended = [engine.submit(request) for request in requests], {}
    while engine.has_work:
        ended |= {finished.request_id: finished for finished in engine.step().finished}
    return [ended[i].turn for i in ids]


def request(history, session="s", seed=1, **options):
    sampling = SamplingParams(max_tokens=12, stop_ids=frozenset(), seed=seed)
    return Request(session, history, sampling, **options)


def same(one, other):
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert (one.states.tolist(), one.replay_starts) == (other.states.tolist(), other.replay_starts)


def lose_windows(tiers):
    for path in tiers.host_folder.glob("windows/v1/*/*/*/*"):
        path.unlink()


def lose_host(tiers):
    for path in tiers.host_folder.glob("*/v1/*/*/*/*"):
        path.unlink()


@pytest.mark.parametrize("replay", ["bounded", "exact", "off"])
@pytest.mark.parametrize("result", [3, 100])
def test_a_session_that_moves_goes_on_as_if_it_had_stayed(policy, tiers, replay, result):
    stays, moves = (engine(policy, tiers, replay=replay, exact=True) for _ in range(2))
    first = request(IDS[:300])
    (turn,) = run(stays, first)
    history = [*first.token_ids, *turn.token_ids.tolist()]
    second = request([*history, *IDS[300 : 300 + result]], continues=True)
    before = moves.counters.prefilled_tokens
    (moved,) = run(moves, second)
    assert moves.counters.prefilled_tokens - before == result + 1
    (stayed,) = run(stays, second)
    same(moved, stayed)
    assert set(moved.states.tolist()) == {ContextState.OWN}


def test_a_session_with_drafts_moves_with_what_its_drafter_saw(tiers):
    drafting = Policy(PolicyConfig.preset("nano_draft"))
    drafting.reset_parameters(3)
    drafting.fake_quant = True
    way = {"speculate": Speculation(rule="coupled", length=3), "exact": True}
    stays, moves = (engine(drafting, tiers, **way) for _ in range(2))
    (turn,) = run(stays, request(IDS[:200]))
    second = request([*IDS[:200], *turn.token_ids.tolist(), 7], continues=True)
    (moved,), (stayed,) = run(moves, second), run(stays, second)
    same(moved, stayed)
    assert moves.counters.prefilled_tokens == 2
    assert moves.speculator.counters.checked > 0


def test_lost_windows_are_replayed_from_disk_and_flagged(policy, tiers):
    first, second = engine(policy, tiers), engine(policy, tiers)
    (turn,) = run(first, request(IDS[:300]))
    lose_host(tiers)
    history = [*IDS[:300], *turn.token_ids.tolist(), *IDS[300:320]]
    (moved,) = run(second, request(history, continues=True))
    assert second.counters.prefilled_tokens == len(history) - (256 - NANO.sliding_window)
    assert set(moved.states.tolist()) == {ContextState.REPLAYED}
    (kept,) = run(first, request(history))
    # Another approximation of the same context.
    agree = next((i for i in range(12) if moved.token_ids[i] != kept.token_ids[i]), 12)
    assert agree >= 1 and np.abs(moved.logprobs[:agree] - kept.logprobs[:agree]).max() < 1.0


def test_lost_windows_are_restored_exactly_where_replay_is_exact(policy, tiers):
    options = {"replay": "exact", "exact": True}
    cold, first, second = (
        engine(policy, None, **options),
        *(engine(policy, tiers, **options) for _ in range(2)),
    )
    run(first, request(IDS[:300]))
    lose_host(tiers)
    (hit,), (computed,) = (run(e, request(IDS[:330], "t", 7)) for e in (second, cold))
    same(hit, computed)
    assert second.counters.prefilled_tokens < 200 < cold.counters.prefilled_tokens
    assert second.scheduler.served == 0 and set(hit.states.tolist()) == {ContextState.OWN}


def test_sessions_share_a_beginning_and_samples_of_a_prompt_share_the_rest(policy, tiers):
    first, second = engine(policy, tiers, exact=True), engine(policy, tiers, exact=True)
    run(first, request(IDS[:200], "a"))
    group = [request([*IDS[:200], *IDS[400:430]], f"g{i}", i) for i in range(4)]
    turns = run(second, *group)
    replayed = NANO.sliding_window
    assert second.counters.prefilled_tokens == 30 + 200 - 192 + replayed and second.scheduler.forks == 3
    assert {turn.replay_starts for turn in turns} == {()} and len({*map(str, turns)}) > 1
    assert {state for turn in turns for state in turn.states.tolist()} == {ContextState.REPLAYED}


def test_new_weights_hit_nothing_of_the_old_and_kept_caches_are_not_saved(policy, tiers):
    ours, other = engine(policy, tiers), engine(policy, tiers, version=1)
    (turn,) = run(ours, request(IDS[:200]))
    ours.load_state(policy.state_dict(), 1)
    history = [*IDS[:200], *turn.token_ids.tolist(), *IDS[200:210]]
    (mixed,) = run(ours, request(history))
    assert set(mixed.states.tolist()) == {ContextState.MIXED}
    run(other, request([*history, 5], "other"))
    assert other.counters.prefilled_tokens == len(history) + 1
    # What the new weights computed from the beginning is found.
    run(ours, request([*history, 5, 6], "new"))
    assert ours.counters.prefilled_tokens == 200 + 11 + NANO.sliding_window + len(history) + 2 - 192


def test_who_gives_way_comes_back_through_the_store(policy, tiers):
    batch = [request(IDS[i : i + 120], f"s{i}", i) for i in range(3)]
    batch = [replace(r, sampling=replace(r.sampling, max_tokens=20)) for r in batch]
    options = {"max_tokens": 192, "idle_sessions": 0, "exact": True}
    roomy = run(engine(policy, None, **options), *batch)
    tight = engine(policy, tiers, pages=7, **options)
    for one, other in zip(run(tight, *batch), roomy, strict=True):
        same(one, other)
    assert tight.scheduler.preemptions > 0
    assert tight.counters.prefilled_tokens < 3 * 120 + tight.scheduler.preemptions * 30
    for each in batch:
        tight.release(each.session)
    assert tight._cache.pages.free_pages == 7


def test_pages_that_only_get_windows_anew_are_not_counted_twice(policy, tiers):
    first, tight = engine(policy, tiers), engine(policy, tiers, pages=4, max_tokens=256, max_requests=1)
    run(first, request(IDS[:200]))
    lose_windows(tiers)
    (turn,) = run(tight, request(IDS[:244], "t"))
    assert len(turn.token_ids) == 12 and tight.counters.prefilled_tokens == 244 - 192 + NANO.sliding_window


def test_a_store_that_does_not_fit_is_refused(policy, tiers):
    with pytest.raises(ValueError, match="version 0 does not fit an engine of version 1"):
        Engine(policy, max_requests=1, max_tokens=8, version=1, prefix_store=store(tiers))
    with pytest.raises(ValueError, match="packed storage"):
        Engine(policy, max_requests=1, max_tokens=8, storage="dense", prefix_store=store(tiers))
    with pytest.raises(ValueError, match="replay='exact'"):
        Engine(policy, max_requests=1, max_tokens=8, prefix_store=store(tiers, replay="exact"))


def test_images_are_told_apart_by_pixels_and_grid():
    def images(types, rows):
        return ImageTokens(torch.tensor([-1, *types, -1]), rows)

    wide, tall = [0, 1, 1, 2, 3], [0, 1, 2, 1, 2, 3]
    rows = torch.arange(8.0).view(2, 4)
    marks = [
        image_marks(images(wide, rows)),
        image_marks(images(wide, rows + 1)),
        image_marks(images(tall, rows)),
        image_marks(images([*wide, *wide], torch.cat([rows, rows + 1]))),
    ]
    assert [[mark.position for mark in each] for each in marks] == [[1], [1], [1], [1, 6]]
    assert marks[3][0] == marks[0][0] and marks[3][1].digest == marks[1][0].digest
    assert len({mark.digest for each in marks[:3] for mark in each}) == 3
    assert image_marks(None) == []
