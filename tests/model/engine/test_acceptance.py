"""Both rules leave the distribution of the plain sampler: all sequences, against exact probabilities."""

import itertools

import numpy as np
import pytest
import torch

from model.engine.acceptance import Attempt
from model.engine.sampler import SamplingColumns, distribution, sample

VOCAB, LENGTH, SLOTS = 4, 3, 3
REQUESTS = 20_000
# 99.99th percentile of chi-square with 4^3 - 1 = 63 degrees of freedom.
LIMIT = 111.0


def tables(seed):
    """Logits of the next token for every history of up to LENGTH + SLOTS tokens, by its number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB ** (LENGTH + SLOTS + 1), VOCAB, generator=generator) * 1.2


TARGET, DRAFT = tables(0), tables(1)


def number(history):
    """A history [R, n] as the row of a table: digits after a leading 1."""
    value = np.ones(len(history), np.int64)
    for column in history.T:
        value = value * VOCAB + column
    return value


def columns(count, temperature=1.0, top_k=0, top_p=1.0):
    made = SamplingColumns.empty(count)
    made.temperature[:], made.top_k[:], made.top_p[:] = temperature, top_k, top_p
    made.seed[:] = np.arange(count, dtype=np.uint64) + np.uint64(12345)
    return made


def speculate(sampling, rule, lengths_of, attempt_type=Attempt):
    """The first LENGTH tokens of every request, and the mean of accepted drafts."""
    count = len(sampling.seed)
    history = np.zeros((count, LENGTH + SLOTS), np.int64)
    done, accepted, steps = np.zeros(count, np.int64), 0, 0
    while (rows := np.flatnonzero(done < LENGTH)).size:
        # Rows of one length at a time: a history's number is made from a rectangle.
        rows = rows[done[rows] == done[rows].min()]
        start = int(done[rows[0]])
        attempt = attempt_type(SLOTS, done[rows], sampling.take(rows), rule)
        known = history[rows, :start]
        drafts = known[:, :0]
        for slot in range(SLOTS):
            logits = DRAFT[torch.from_numpy(number(np.hstack([known, drafts])))]
            drafts = np.hstack([drafts, attempt.choose(logits, slot).numpy()[:, None]])
        lengths = lengths_of(rows, start)
        packed = []
        for row, length in enumerate(lengths.tolist()):
            whole = np.concatenate([known[row], drafts[row]])
            packed += [number(whole[None, : start + i])[0] for i in range(length + 1)]
        verified = attempt.verify(TARGET[torch.tensor(packed)], drafts, lengths)
        assert (verified.accepted <= lengths).all() and verified.finite.all() and verified.clean
        for column in range(SLOTS + 1):
            takes = (column <= verified.accepted) & (start + column < LENGTH + SLOTS)
            history[rows[takes], start + column] = verified.token_ids[takes, column]
        done[rows] += verified.accepted + 1
        accepted, steps = accepted + int(verified.accepted.sum()), steps + len(rows)
    return history[:, :LENGTH], accepted / steps


def expected(sampling):
    """Probability of every sequence under plain sampling."""
    one = sampling.take(np.array([0]))
    probabilities = []
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for i, token in enumerate(sequence):
            logits = TARGET[number(np.array([sequence[:i]], np.int64).reshape(1, i))]
            chance *= distribution(logits, one).sampled.double().exp()[0, token].item()
        probabilities.append(chance)
    return np.array(probabilities)


def chi_square(history, probabilities):
    counts = np.bincount(number(history) - VOCAB**LENGTH, minlength=VOCAB**LENGTH)
    assert not counts[probabilities == 0].any()
    likely = probabilities > 0
    wanted = probabilities[likely] * len(history)
    return float(((counts[likely] - wanted) ** 2 / wanted).sum())


def all_slots(rows, start):
    return np.full(len(rows), SLOTS)


def mixed(rows, start):
    return rows % (SLOTS + 1)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("lengths", [all_slots, mixed])
def test_sequences_have_the_plain_distribution(rule, lengths):
    sampling = columns(REQUESTS)
    history, accepted = speculate(sampling, rule, lengths)
    assert chi_square(history, expected(sampling)) < LIMIT
    assert accepted > 0.3


@pytest.mark.parametrize("shape", [{"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.8, "temperature": 1.3}])
def test_temperature_and_truncation_are_those_of_the_sampler(shape):
    sampling = columns(REQUESTS, **shape)
    history, _ = speculate(sampling, "rejection", all_slots)
    assert chi_square(history, expected(sampling)) < LIMIT


class AcceptsTooMuch(Attempt):
    """Acceptance min(1, 1.25 p / q)."""

    def _reject(self, target, index, drafts, lengths, draws):
        return super()._reject(target, index, drafts, lengths, draws / 1.25)


class DrawsRestFromTarget(Attempt):
    """After a refusal, a draw from p in place of what is left of it."""

    def _reject(self, target, index, drafts, lengths, draws):
        accepted, tokens = super()._reject(target, index, drafts, lengths, draws)
        rows = np.arange(len(lengths))
        again = sample(target[torch.from_numpy(index[rows, accepted])], self._columns, self._starts)
        tokens[rows, accepted] = again.token_ids
        return accepted, tokens


@pytest.mark.parametrize("broken", [AcceptsTooMuch, DrawsRestFromTarget])
def test_a_broken_rule_is_noticed(broken):
    sampling = columns(REQUESTS)
    history, _ = speculate(sampling, "rejection", all_slots, broken)
    assert chi_square(history, expected(sampling)) > 3 * LIMIT


def test_a_length_that_follows_the_drafts_is_noticed():
    """Checking the first draft only when it is token 0 shifts the distribution: why budgets come before."""
    sampling = columns(REQUESTS)

    class Peeking(Attempt):
        def verify(self, logits, drafts, lengths):
            peeked = np.where(drafts[:, 0] == 0, 1, 0)
            first = np.cumsum(lengths + 1) - (lengths + 1)
            keep = np.concatenate([first[r] + np.arange(peeked[r] + 1) for r in range(len(lengths))])
            return super().verify(logits[torch.from_numpy(keep)], drafts, peeked)

    history, _ = speculate(sampling, "rejection", all_slots, Peeking)
    assert chi_square(history, expected(sampling)) > 3 * LIMIT


def test_coupled_tokens_are_those_of_plain_decoding():
    sampling = columns(500)
    history, accepted = speculate(sampling, "coupled", mixed)
    plain = np.zeros((500, 0), np.int64)
    for position in range(LENGTH):
        logits = TARGET[torch.from_numpy(number(plain))]
        drawn = sample(logits, sampling, np.full(500, position))
        plain = np.hstack([plain, drawn.token_ids[:, None]])
    assert (history == plain).all() and accepted > 0


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_rows_get_the_greedy_tokens(rule):
    sampling = columns(50, temperature=0.0)
    history, _ = speculate(sampling, rule, all_slots)
    greedy = []
    for _ in range(LENGTH):
        greedy.append(int(TARGET[number(np.array([greedy], np.int64).reshape(1, -1))].argmax()))
    assert (history == greedy).all()


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_more_is_accepted_of_a_better_drafter(rule, monkeypatch):
    sampling = columns(2000)
    _, far = speculate(sampling, rule, all_slots)
    monkeypatch.setitem(globals(), "DRAFT", TARGET + 0.1 * DRAFT)
    _, near = speculate(sampling, rule, all_slots)
    assert near > 2.5 > far


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_draws_depend_on_seed_and_position_alone(rule):
    sampling = columns(64)
    together, _ = speculate(sampling, rule, all_slots)
    order = np.random.default_rng(0).permutation(64)
    shuffled, _ = speculate(sampling.take(order), rule, all_slots)
    assert (shuffled == together[order]).all()
    alone, _ = speculate(sampling.take(np.array([17])), rule, all_slots)
    assert (alone[0] == together[17]).all()


def test_logprobs_are_those_of_the_plain_sampler():
    sampling = columns(100, temperature=0.8, top_k=3)
    sampling.temperature[::4] = 0.0
    attempt = Attempt(SLOTS, np.zeros(100, np.int64), sampling, "coupled")
    start = DRAFT[1].expand(100, -1)
    drafts = np.stack([attempt.choose(start, slot).numpy() for slot in range(SLOTS)], 1)
    logits = TARGET[2:402]
    verified = attempt.verify(logits, drafts, np.full(100, SLOTS))
    row = np.repeat(np.arange(100), SLOTS + 1)
    plain = sample(logits, sampling.take(row), np.tile(np.arange(SLOTS + 1), 100))
    kept = np.arange(SLOTS + 1) <= verified.accepted[:, None]
    for place in range(SLOTS + 1):
        rows = np.flatnonzero(kept[:, place])
        ours, theirs = verified.place(rows, place), plain.take(rows * (SLOTS + 1) + place)
        for name in ("token_ids", "logprobs", "full_logprobs", "finite"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert ours.kept is not None and theirs.kept is not None
        assert torch.equal(ours.kept.ids, theirs.kept.ids)
        assert torch.equal(ours.kept.offsets, theirs.kept.offsets)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_poisoned_draft_fails_only_whom_it_reaches(rule):
    sampling = columns(2, temperature=0.0)
    attempt = Attempt(SLOTS, np.zeros(2, np.int64), sampling, rule)
    likes = torch.eye(VOCAB)[[1, 1]]
    drafts = np.stack([attempt.choose(likes, slot).numpy() for slot in range(SLOTS)], 1)
    logits = torch.eye(VOCAB)[[1, 1, 1, 1, 2, 2, 2, 2]].clone()
    logits[[3, 6]] = torch.nan
    verified = attempt.verify(logits, drafts, np.full(2, SLOTS))
    assert not verified.clean
    # The first request comes to the poison after three drafts, the second one's first draft is refused.
    assert verified.finite[0].tolist() == [True, True, True, False]
    assert verified.accepted.tolist() == [3, 0] and verified.finite[1, 0] and verified.token_ids[1, 0] == 2
