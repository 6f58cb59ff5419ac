"""Interrupted turns keep their caches on disk; whatever is wrong with a file, the turn's tokens come out."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from envs.types import FinishReason
from model.config import PolicyConfig
from model.engine.columns import ContextState
from model.engine.sampler import SamplingParams
from model.policy import Policy
from rl.engines.base import Completion, GenerateRequest
from rl.engines.native import NativeEngine
from rl.engines.saved import SavedTurns

SAMPLING = SamplingParams(max_tokens=40, seed=5, stop_ids=frozenset())


def engine_in(folder: Path, least: int = 1, **options) -> NativeEngine:
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    return NativeEngine(
        policy, max_requests=4, max_tokens=64, exact=True, saved=SavedTurns(folder, least), **options
    )


def request(session: str = "s", completed: Completion | None = None) -> GenerateRequest:
    return GenerateRequest(session, 0, (1, 2, 3, len(session)), SAMPLING, completed)


async def interrupted(folder: Path, *sessions: str, least: int = 1) -> dict[str, Completion]:
    """Samples some of each turn, is told to go, and returns what came so far."""
    engine = engine_in(folder, least)
    turns = {s: asyncio.create_task(engine.generate(request(s))) for s in sessions}
    async with asyncio.timeout(60):
        while engine.stats()["generated_tokens"] < 6 * len(sessions):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    await engine.pause()
    await engine.persist()
    for session in sessions:
        await engine.release(session)
    await engine.close()
    return {session: await turn for session, turn in turns.items()}


async def test_a_turn_that_was_whole_before_it_came_has_nothing_to_keep(tmp_path: Path) -> None:
    (part,) = (await interrupted(tmp_path / "before", "s")).values()
    tokens = (part.token_ids * 40)[:40]
    done = Completion(tokens, (-0.5,) * 40, (0,) * 40, FinishReason.ABORT)
    engine = engine_in(tmp_path / "turns")
    await engine.pause()
    with engine._wake:  # the engine's thread takes both at once
        turn = asyncio.create_task(engine.generate(request("s", done)))
        kept = asyncio.create_task(engine.persist())
        await asyncio.sleep(0)
    assert await kept == 0
    assert (await turn).token_ids == tokens
    await engine.close()


async def whole(session: str, folder: Path) -> Completion:
    engine = engine_in(folder)
    done = await engine.generate(request(session))
    await engine.close()
    return done


async def test_a_successor_goes_on_with_the_caches_and_draws_the_same_tokens(tmp_path: Path) -> None:
    begun = await interrupted(tmp_path / "turns", "s", "longer")
    assert all(part.finish is FinishReason.ABORT for part in begun.values())
    engine = engine_in(tmp_path / "turns")
    for session, part in begun.items():
        done = await engine.generate(request(session, part))
        assert done == replace(await whole(session, tmp_path / "other"), states=done.states)
        assert set(done.states) == {ContextState.OWN}
    stats = engine.stats()
    assert (stats["turns_taken"], stats["turns_refused"], stats["prefilled_tokens"]) == (2, 0, 0)
    assert not list((tmp_path / "turns").iterdir())
    await engine.close()


@pytest.mark.parametrize("damage", ["torn", "other tokens", "gone", "small"])
async def test_a_file_that_does_not_fit_costs_time_alone(tmp_path: Path, damage: str) -> None:
    least = 1000 if damage == "small" else 1
    part = (await interrupted(tmp_path / "turns", "s", least=least))["s"]
    engine = engine_in(tmp_path / "turns")
    files = list((tmp_path / "turns").iterdir())
    assert len(files) == (0 if damage == "small" else 1)
    if damage == "torn":
        files[0].write_bytes(files[0].read_bytes()[:-9])
    if damage == "gone":
        files[0].unlink()
    if damage == "other tokens":
        part = replace(part, **{name: getattr(part, name)[:-1] for name in COLUMNS})
    done = await engine.generate(request("s", part))
    assert done.token_ids == (await whole("s", tmp_path / "other")).token_ids
    stats = engine.stats()
    assert (stats["turns_taken"], stats["turns_refused"]) == (0, 0 if damage == "small" else 1)
    assert stats["prefilled_tokens"] > 0
    await engine.close()


COLUMNS = ("token_ids", "logprobs", "policy_versions", "full_logprobs", "states")


@pytest.mark.parametrize(("caches", "state"), [("keep", ContextState.MIXED), ("recompute", None)])
async def test_under_new_weights_caches_are_kept_or_recomputed_by_choice(tmp_path, caches, state) -> None:
    part = (await interrupted(tmp_path / "turns", "s"))["s"]
    engine = engine_in(tmp_path / "turns", version=1, caches=caches)
    done = await engine.generate(request("s", part))
    assert set(done.policy_versions) == {0, 1}
    later = done.states[len(part.token_ids) :]
    assert (set(later) == {state}) if state is not None else ContextState.MIXED not in later
    assert (engine.stats()["prefilled_tokens"] > 0) is (caches == "recompute")
    await engine.close()


async def test_a_full_disk_keeps_no_caches_and_stops_nothing(tmp_path, monkeypatch, caplog) -> None:
    def full(self, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.engine.state.RequestState.write", full)
    part = (await interrupted(tmp_path / "turns", "s"))["s"]
    assert "No space left on device" in caplog.text and len(part.token_ids) >= 6
