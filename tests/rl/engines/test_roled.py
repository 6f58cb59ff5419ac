"""Engines of one role each give what one engine of all gives, and the token log hears of every token."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from model.config import PolicyConfig
from model.engine.sampler import SamplingParams
from model.policy import Policy
from rl.engines.base import Completion, Engine, EngineError, GenerateRequest, StepFrame
from rl.engines.native import EngineClosedError, NativeEngine
from rl.engines.roled import RoledEngine
from rl.restarts import ProcessDiedError


def native(role: str, **options) -> NativeEngine:
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    return NativeEngine(policy, max_requests=8, max_tokens=64, exact=True, role=role, **options)  # type: ignore[arg-type]


@pytest.fixture
async def engines():
    frames: list[StepFrame] = []
    made = {role: native(role, on_step=frames.append if role == "decode" else None) for role in ROLES}
    yield made, frames
    for engine in made.values():
        await engine.close()


ROLES = ("all", "prefill", "decode")


def request(i: int, **options) -> GenerateRequest:
    sampling = SamplingParams(**{"max_tokens": 9, "seed": i, "stop_ids": frozenset(), **options})
    return GenerateRequest(f"s{i}", 0, tuple(range(1, 4 + i)), sampling)


async def test_requests_pass_through_the_roles_and_keep_their_tokens(engines) -> None:
    made, frames = engines
    roled: Engine = RoledEngine(made["decode"], [made["prefill"]])
    requests = [*(request(i) for i in range(5)), request(5, max_tokens=1)]
    done = await asyncio.gather(*(roled.generate(r) for r in requests))
    for one, completion in zip(requests, done, strict=True):
        alone = await made["all"].generate(one)
        assert (completion.token_ids, completion.logprobs) == (alone.token_ids, alone.logprobs)
        heard = [
            int(frame.token_ids[i])
            for frame in frames
            for i, session in enumerate(frame.sessions)
            if session == one.session
        ]
        assert tuple(heard) == completion.token_ids
    assert made["decode"].stats()["prefilled_tokens"] == 0
    assert made["prefill"].stats()["generated_tokens"] == 6
    assert roled.stats()["prefilling"] == 0


async def test_what_the_sampler_chose_is_heard_and_kept_through_the_roles() -> None:
    frames: dict[str, list[StepFrame]] = {"all": [], "decode": []}
    options = {"capture": True, "capture_selections": True, "replay": "bounded"}
    made = {role: native(role, on_step=frames.get(role, []).append, **options) for role in ROLES}
    roled = RoledEngine(made["decode"], [made["prefill"]])
    asked = [replace(request(i), token_ids=tuple(range(1, 31 + i))) for i in range(3)]
    asked.append(request(3, max_tokens=1, top_k=5))
    try:
        for one in asked:
            alone, through = await made["all"].generate(one), await roled.generate(one)
            assert through == alone and alone.expert_ids is not None and through.expert_ids is not None
            assert np.array_equal(through.expert_ids.ids, alone.expert_ids.ids)
            assert through.selections is not None and alone.selections is not None
            for layer, keys in alone.selections.keys.items():
                assert np.array_equal(through.selections.keys[layer], keys)
    finally:
        for engine in made.values():
            await engine.close()
    for name in ("expert_ids", "states", "token_ids", "logprobs"):
        heard = {role: [getattr(frame, name) for frame in frames[role]] for role in frames}
        assert np.array_equal(np.concatenate(heard["all"]), np.concatenate(heard["decode"])), name
    starts = {role: [f.replay_starts for f in frames[role] if f.replay_starts] for role in frames}
    assert starts["all"] and starts["all"] == starts["decode"]


async def test_a_turn_begun_before_goes_on_and_only_new_tokens_are_heard(engines) -> None:
    made, frames = engines
    whole = await made["all"].generate(request(1))
    part = Completion(whole.token_ids[:4], whole.logprobs[:4], whole.policy_versions[:4])
    roled = RoledEngine(made["decode"], [made["prefill"]])
    done = await roled.generate(replace(request(1), completed=part))
    assert done.token_ids == whole.token_ids
    assert np.concatenate([frame.token_ids for frame in frames]).tolist() == list(whole.token_ids[4:])


async def test_caches_of_other_weights_are_recomputed_by_choice(engines) -> None:
    made, _ = engines
    weights = dict(Policy(PolicyConfig.preset("nano")).state_dict())
    await made["decode"].load_weights(weights, 1)
    kept = await RoledEngine(made["decode"], [made["prefill"]]).generate(request(1))
    assert kept.policy_versions == (0, *[1] * 8) and set(kept.states[1:]) == {1}
    await made["decode"].release("s1")
    again = RoledEngine(made["decode"], [made["prefill"]], caches="recompute")
    assert (await again.generate(request(1))).states[-1] != 1


class Dead:
    """A prefill engine in a process that is gone."""

    async def prefill(self, request: GenerateRequest, rows: object) -> Completion:
        raise ProcessDiedError("prefill-0", "killed by the test")


async def test_what_a_helper_died_of_is_asked_of_its_successor(engines) -> None:
    made, _ = engines
    roled = RoledEngine(made["decode"], [Dead()])
    turn = asyncio.create_task(roled.generate(request(1)))
    await asyncio.sleep(0.05)
    assert not turn.done()
    roled.use([made["prefill"]], [])
    assert (await turn).token_ids == (await made["all"].generate(request(1))).token_ids
    alone = RoledEngine(made["decode"], [Dead()], wait_s=0.05)
    with pytest.raises(EngineClosedError, match=r"no engine that computes prompts .*killed by the test"):
        await alone.generate(request(2))
    assert alone.stats()["prefilling"] == 0


async def test_faults_are_typed_whichever_engine_finds_them(engines) -> None:
    made, _ = engines
    roled = RoledEngine(made["decode"], [made["prefill"]])
    with pytest.raises(EngineError):
        await roled.generate(replace(request(1), token_ids=()))
    with pytest.raises(EngineError, match="role 'decode' does not"):
        await made["decode"].generate(request(1))
    assert roled.stats()["prefilling"] == 0
