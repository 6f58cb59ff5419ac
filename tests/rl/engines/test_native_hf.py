"""The native engine over a model of transformers: draws, interruptions, swaps of weights."""

import asyncio

import numpy as np
import pytest
import torch

from model.batch import PackedTokens
from model.engine.sampler import SamplingParams
from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from rl.engines.base import Completion, EngineError, GenerateRequest
from rl.engines.native import NativeEngine


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_policy(seed=0, preset="hf_tiny"):
    return HFPolicy(tiny_model(preset, seed))


def request(session="s", prompt=(4, 10, 11), *, turn=0, completed=None, **options):
    sampling = SamplingParams(**({"max_tokens": 16, "seed": 5} | options))
    return GenerateRequest(session, turn, tuple(prompt), sampling, completed)


def logprobs_of(policy, prompt, completion):
    ids = torch.tensor([*prompt, *completion])
    with torch.no_grad():
        logits = policy.logits(policy(PackedTokens(ids, torch.tensor([0, len(ids)]))).hidden)
    at = torch.arange(len(prompt), len(ids))
    return logits.log_softmax(-1)[at - 1, ids[at]].numpy()


@pytest.mark.parametrize("preset", ["hf_tiny", "hf_tiny_moe"])
async def test_samples_depend_on_their_seed_alone_and_have_the_models_probabilities(preset):
    policy = make_policy(preset=preset)
    engine = NativeEngine(policy, max_requests=8, max_tokens=64)
    together = await asyncio.gather(
        *(engine.generate(request(f"s{i}", range(3, 5 + 3 * i), seed=i)) for i in range(6))
    )
    await engine.close()
    alone = NativeEngine(policy, max_requests=1, max_tokens=64)
    for i, turn in enumerate(together):
        again = await alone.generate(request(f"t{i}", range(3, 5 + 3 * i), seed=i))
        assert again.token_ids == turn.token_ids
        np.testing.assert_allclose(
            turn.logprobs, logprobs_of(policy, range(3, 5 + 3 * i), turn.token_ids), atol=1e-4
        )
    await alone.close()
    assert len({turn.token_ids for turn in together}) == 6


async def test_a_turn_goes_on_after_any_token():
    policy, prompt = make_policy(), (4, 10, 11)
    engine = NativeEngine(policy, max_requests=2, max_tokens=64)
    whole = await engine.generate(request("whole", prompt))
    for cut in (1, 7, 15):
        done = Completion(whole.token_ids[:cut], whole.logprobs[:cut], whole.policy_versions[:cut])
        rest = await engine.generate(request(f"cut{cut}", prompt, completed=done))
        assert rest.token_ids == whole.token_ids
    await engine.close()


async def test_a_second_turn_computes_only_what_is_new():
    engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    first = await engine.generate(request("a", (4, 10, 11)))
    before = engine.stats()["prefilled_tokens"]
    history = (4, 10, 11, *first.token_ids, 9, 8)
    second = await engine.generate(request("a", history, turn=1))
    assert engine.stats()["prefilled_tokens"] - before == 3  # the last sampled token and two new ones
    other = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    assert (await other.generate(request("b", history, turn=1))).token_ids == second.token_ids
    await engine.close()
    await other.close()


@pytest.mark.parametrize("caches", ["keep", "recompute"])
async def test_weights_change_between_two_tokens(caches):
    old, new = make_policy(0), make_policy(1)
    seen = []
    engine = NativeEngine(make_policy(0), max_requests=2, max_tokens=64, caches=caches, on_step=seen.append)
    turn = asyncio.ensure_future(engine.generate(request("a", max_tokens=40)))
    while len(seen) < 5:  # noqa: ASYNC110  steps have no event to wait for
        await asyncio.sleep(0.001)
    await engine.pause()
    held = len(seen)
    await engine.load_weights(new.state_dict(), 1)
    assert len(seen) == held
    await engine.resume()
    completion = await turn
    await engine.close()
    versions = completion.policy_versions
    assert set(versions) == {0, 1}
    change = versions.index(1)
    assert versions == (0,) * change + (1,) * (40 - change)
    prompt, ids = (4, 10, 11), completion.token_ids
    np.testing.assert_allclose(
        completion.logprobs[:change], logprobs_of(old, prompt, ids)[:change], atol=1e-4
    )
    gap = np.abs(np.array(completion.logprobs[change:]) - logprobs_of(new, prompt, ids)[change:])
    assert gap.max() < 1e-4 if caches == "recompute" else gap.max() > 1e-3


async def test_an_exported_turn_goes_on_elsewhere():
    seen = []
    engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64, on_step=seen.append)
    other = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    whole = await other.generate(request("w", max_tokens=40))
    turn = asyncio.ensure_future(engine.generate(request("a", max_tokens=40)))
    while len(seen) < 5:  # noqa: ASYNC110  steps have no event to wait for
        await asyncio.sleep(0.001)
    await engine.pause()
    state = await engine.export_state("a", remove=True)
    await turn
    assert (await other.continue_state(state, 0)).token_ids == whole.token_ids
    await engine.close()
    await other.close()


async def test_what_is_no_weight_of_it_is_refused_and_changes_nothing():
    policy = make_policy()
    engine = NativeEngine(policy, max_requests=2, max_tokens=64)
    before = await engine.generate(request("a"))
    weights = dict(policy.state_dict())
    weights.pop(next(iter(weights)))
    with pytest.raises(ValueError, match="do not fit"):
        await engine.load_weights(weights, 1)
    assert (await engine.generate(request("b"))).token_ids == before.token_ids
    with pytest.raises(EngineError):
        await engine.generate(request("c", (4, 999)))
    await engine.close()
