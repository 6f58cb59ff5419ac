"""Whether a sampler's log-probabilities are the trainer's to the last bit, over turns as an agent takes them.

    python -m benchmarks.model_gpu --parts turns

Several sessions sample turns at a time, between which tool results of many lengths come back. Under way their
caches are lost, their turns move to another engine in the middle, or begin anew with what was sampled before.
Then the trainer computes all tokens in one packed pass, with the windows that the sampler recorded. Only
tokens whose whole context was computed as recorded are claimed to be equal; the others are counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from model.batch import floors_from_starts
from model.choices import truncated_logprobs
from model.engine.columns import Columns, ContextState
from model.engine.engine import Engine
from model.engine.requests import Request
from model.engine.sampler import SamplingParams
from model.policy import PackedTokens, Policy
from model.replay import Replay

DISTURBANCES = ("nothing", "caches lost", "moved", "taken up again")
TOKENS = 24


@dataclass(slots=True)
class Session:
    """What an agent's context holds, and the turns that were sampled in it."""

    name: str
    history: list[int]
    turns: list[tuple[int, Columns]] = field(default_factory=list)
    """Position of the first token, and the turn."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of all sampled tokens: the largest difference where exactness is claimed, and how many those are."""

    largest: float
    claimed: int
    tokens: int
    replays: int
    """Windows that began anew after a session's first turn."""


def _engine(policy: Policy, replay: Replay, sessions: int, idle: int) -> Engine:
    return Engine(
        policy,
        max_requests=sessions,
        max_tokens=4096 if policy.device.type == "cuda" else 512,
        idle_sessions=idle,
        prefill_tokens=700,
        storage="packed",
        replay=replay,
        exact=True,
    )


def play(
    policy: Policy, replay: Replay, disturbance: str, results: Iterable[int], sessions: int = 4
) -> Outcome:
    """Sample turns after tool results of these lengths, and compare with the trainer.

    Raises:
        ValueError: an unknown disturbance.
    """
    if disturbance not in DISTURBANCES:
        raise ValueError(f"{disturbance!r} is none of {', '.join(DISTURBANCES)}")
    rng = np.random.default_rng(0)
    words, window = policy.config.vocab_size, policy.config.sliding_window
    idle = 0 if disturbance == "caches lost" else sessions
    engine, other = _engine(policy, replay, sessions, idle), None
    if disturbance in ("moved", "taken up again"):
        other = _engine(policy, replay, sessions, idle)
    prompts = [3 * window + 17 * i + 1 for i in range(sessions)]
    played = [Session(f"s{i}", rng.integers(3, words, n).tolist()) for i, n in enumerate(prompts)]
    for number, length in enumerate(results):
        for i, session in enumerate(played):
            session.history += rng.integers(3, words, length + (3 * i if number else 0)).tolist()
        _turn(engine, other, played, number, disturbance)
        if other is not None:
            engine, other = other, engine
        if disturbance == "caches lost":
            _crowd_out(engine, words, number, sessions)
    return _compare(policy, played)


def _request(session: Session, number: int, completed: Columns | None = None) -> Request:
    sampling = SamplingParams(max_tokens=TOKENS, seed=number, stop_ids=frozenset())
    return Request(
        session.name, list(session.history), sampling, completed or Columns(), continues=number > 0
    )


def _turn(engine: Engine, other: Engine | None, played: list[Session], number: int, disturbance: str) -> None:
    numbers = {engine.submit(_request(session, number)): session for session in played}
    ended: dict[str, Columns] = {}
    for _ in range(TOKENS // 2 if other is not None else 0):
        ended |= {f.session: f.turn for f in engine.step().finished}
    if other is not None:
        going = {n: s for n, s in numbers.items() if engine.serves(n)}
        for request, session in going.items():
            if disturbance == "moved":
                other.import_state(engine.export_state(request, remove=True))
            else:
                cut = engine.abort(request)
                assert cut is not None
                other.submit(_request(session, number, cut.turn))
            engine.release(session.name)
    for serving in (engine, other):
        while serving is not None and serving.has_work:
            ended |= {f.session: f.turn for f in serving.step().finished}
    for session in played:
        turn = ended[session.name]
        session.turns.append((len(session.history), turn))
        session.history += turn.token_ids.tolist()


def _crowd_out(engine: Engine, words: int, number: int, sessions: int) -> None:
    """Other sessions take the places of those that wait for their tools."""
    rng = np.random.default_rng(1000 + number)
    for i in range(sessions):
        name = f"other{number}-{i}"
        engine.submit(Request(name, rng.integers(3, words, 9).tolist(), SamplingParams(max_tokens=2)))
    while engine.has_work:
        engine.step()


@torch.no_grad()
def _compare(policy: Policy, played: list[Session]) -> Outcome:
    ids = [torch.tensor(session.history) for session in played]
    starts = [[pair for _, turn in session.turns for pair in turn.replay_starts] for session in played]
    floors = [floors_from_starts(len(i), s) for i, s in zip(ids, starts, strict=True)]
    bounds = torch.tensor([0, *(len(i) for i in ids)]).cumsum(0)
    device = policy.device
    packed = PackedTokens(
        torch.cat(ids).to(device), bounds.to(device), window_floors=torch.cat(floors).to(device)
    )
    hidden = policy(packed).hidden.split([len(i) for i in ids])
    largest, claimed, tokens = 0.0, 0, 0
    for session, states in zip(played, hidden, strict=True):
        for begin, turn in session.turns:
            logits = policy.logits(states[begin - 1 : begin - 1 + len(turn.token_ids)])
            labels = torch.from_numpy(turn.token_ids.astype(np.int64)).to(device)[:, None]
            trained = truncated_logprobs(logits, None).gather(1, labels)[:, 0].cpu().numpy()
            own = np.asarray(turn.states) == ContextState.OWN
            claimed, tokens = claimed + int(own.sum()), tokens + len(own)
            if own.any():
                largest = max(largest, float(np.abs(trained - turn.logprobs)[own].max()))
    replays = sum(len(set(s)) - 1 for s in starts if s)
    return Outcome(largest, claimed, tokens, replays)
