"""What is vLLM's own: its weights, caches, agreement with the model in transformers, and its death."""

import asyncio
import os
import signal
from dataclasses import replace
from itertools import count

import psutil
import pytest
import pytest_asyncio
import torch

from envs.types import FinishReason
from model.chat import nano_chat
from model.engine.sampler import SamplingParams
from model.hf.folder import save_hf
from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from model.hf.weights import published
from rl.collective import CollectiveOutbox
from rl.engines.base import GenerateRequest
from rl.engines.native import EngineClosedError, NativeEngine
from rl.engines.vllm import EngineStartError, VllmEngine
from rl.engines.vllm_model import ModelFolderError
from rl.engines.vllm_settings import VllmSettings
from rl.engines.vllm_weights import VllmInbox
from rl.transports import Rendezvous, SharedMemoryOutbox
from rl.weights import TransferError, WeightsError

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]
CONTEXT = 1024
DEADLINE_S = 120.0
VERSIONS = count(1)
SESSIONS = count()


def plain(seed):
    """A tiny Qwen3 whose choices are clear: of fresh weights as they are, all tokens are about as likely."""
    model = tiny_model("hf_tiny", seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model.eval()


def policy(seed):
    return HFPolicy(plain(seed))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    save_hf(policy(0), folder, nano_chat())
    deaths = []
    engine = await VllmEngine.start(
        folder, VllmSettings(dtype="float32"), max_requests=16, max_tokens=CONTEXT, deadline_s=DEADLINE_S,
        on_death=deaths.append,
    )  # fmt: skip
    engine.deaths = deaths
    yield engine
    await engine.close()


def ask(prompt=(1, 2, 3), **options):
    sampling = SamplingParams(**({"max_tokens": 12, "temperature": 0.0} | options))
    return GenerateRequest(f"s{next(SESSIONS)}", 0, tuple(prompt), sampling)


def logprobs(model, ids, last, temperature=1.0):
    """Of the last tokens of a sequence, as transformers computes them."""
    with torch.no_grad():
        logits = (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)
    return [float(logits[i - 1, ids[i]]) for i in range(len(ids) - last, len(ids))]


async def publish(engine, seed):
    version = next(VERSIONS)
    outbox = SharedMemoryOutbox(lambda: (published(policy(seed)), version))
    outbox.offer()
    report = await VllmInbox(engine).receive(outbox.parcel())
    assert report["bytes"] == outbox.parcel().size and engine.version == version
    return outbox


async def check_agreement(engine, seed):
    completion = await engine.generate(ask(range(1, 20), temperature=0.7, seed=3))
    expected = logprobs(plain(seed), [*range(1, 20), *completion.token_ids], 12, 0.7)
    assert completion.logprobs == pytest.approx(expected, abs=1e-3)


async def test_greedy_turns_are_those_of_the_model_in_transformers(engine):
    net = policy(0)
    native = NativeEngine(net, max_requests=16, max_tokens=CONTEXT)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(1, net.config.vocab_size, (2 + i % 40,), generator=generator).tolist()
        for i in range(100)
    ]
    requests = [ask(prompt, seed=i) for i, prompt in enumerate(prompts)]
    ours = await asyncio.gather(*(native.generate(request) for request in requests))
    theirs = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert [c.token_ids for c in theirs] == [c.token_ids for c in ours]
    for one, other in zip(theirs, ours, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    await native.close()


async def test_twenty_updates_in_flight_each_verified(engine):
    stop = asyncio.Event()

    async def keep_busy(i):
        done = []
        while not stop.is_set():
            done.append(await engine.generate(ask(range(1, 4 + i), temperature=1.0, seed=i, max_tokens=400)))
        return done

    before = engine.stats()["updates"]
    busy = [asyncio.create_task(keep_busy(i)) for i in range(6)]
    try:
        async with asyncio.timeout(240):
            for seed in range(20):
                await publish(engine, seed)
                await check_agreement(engine, seed)
    finally:
        stop.set()
    done = [completion for part in await asyncio.gather(*busy) for completion in part]
    assert engine.stats()["updates"] - before == 20
    assert all(list(c.policy_versions) == sorted(c.policy_versions) for c in done)
    assert {c.finish for c in done} == {FinishReason.LENGTH}
    assert len({version for c in done for version in c.policy_versions}) > 15


async def test_a_damaged_parcel_is_refused_and_the_old_weights_stay(engine):
    outbox, version = await publish(engine, 3), engine.version
    damaged = replace(outbox.parcel(), crc32=outbox.parcel().crc32 ^ 1, version=version + 1)
    with pytest.raises(WeightsError, match="damaged"):
        await engine.receive(damaged)
    with pytest.raises(WeightsError, match="shared memory"):
        await engine.receive(replace(outbox.parcel(), path="/proc/1/fd/999999"))
    assert engine.version == version
    await check_agreement(engine, 3)


@pytest.mark.parametrize("caches", ["keep", "recompute"])
async def test_what_a_swap_does_with_the_caches_of_a_running_turn(engine, caches):
    await publish(engine, 4)
    first, engine.caches = engine.version, caches
    task = asyncio.create_task(engine.generate(ask(range(1, 60), temperature=1.0, max_tokens=900)))
    async with asyncio.timeout(60):
        while engine.stats()["running"] < 1:  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.001)
    await publish(engine, 5)
    completion = await task
    engine.caches = "keep"
    kept = completion.policy_versions.count(first)
    assert 0 < kept < 900
    ids = [*range(1, 60), *completion.token_ids]
    assert completion.logprobs[:kept] == pytest.approx(logprobs(plain(4), ids, 900)[:kept], abs=1e-3)
    fresh = completion.logprobs[kept:] == pytest.approx(logprobs(plain(5), ids, 900)[kept:], abs=1e-3)
    assert fresh == (caches == "recompute")


async def test_caches_of_other_weights_are_not_used(engine):
    prompt = [1 + i % 60 for i in range(150)]

    async def cached():
        before = engine.stats()["cached_tokens"]
        await engine.generate(ask(prompt))
        return engine.stats()["cached_tokens"] - before

    await publish(engine, 6)
    assert [await cached(), await cached() > 100] == [0, True]
    await publish(engine, 6)
    assert await cached() == 0


async def test_weights_come_by_a_broadcast_and_a_sender_that_is_gone_is_named(engine):
    version = next(VERSIONS)
    outbox = CollectiveOutbox(lambda: (published(policy(7)), version))
    address, inbox = outbox.meet(60.0), VllmInbox(engine)
    places = [Rendezvous(address, rank, 2, 60.0) for rank in range(2)]
    await asyncio.gather(outbox.join(places[0]), inbox.join(places[1]))
    outbox.offer()
    await asyncio.gather(outbox.deliver(60.0), inbox.receive(outbox.parcel()))
    assert engine.version == version
    await check_agreement(engine, 7)
    engine.deadline_s = 2.0
    with pytest.raises(TransferError):
        await inbox.receive(replace(outbox.parcel(), version=version + 1))
    engine.deadline_s = DEADLINE_S
    await check_agreement(engine, 7)


async def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        await VllmEngine.start(tmp_path, VllmSettings(), max_requests=1, max_tokens=8)


async def test_an_argument_that_vllm_does_not_know_is_refused(tmp_path):
    save_hf(policy(0), tmp_path, nano_chat())
    settings = VllmSettings(arguments={"no_such_argument": 1})
    with pytest.raises(EngineStartError, match="no_such_argument"):
        await VllmEngine.start(tmp_path, settings, max_requests=1, max_tokens=8)


async def test_the_death_of_the_core_reaches_everyone_who_waits(engine):
    """Comes last: nothing of the module's engine is left."""
    task = asyncio.create_task(engine.generate(ask(max_tokens=500, temperature=1.0)))
    for child in psutil.Process().children():
        if child.status() == psutil.STATUS_ZOMBIE:
            continue  # of an engine before
        if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
            os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineClosedError, match="died"):
        await task
    assert len(engine.deaths) == 1 and not await engine.healthy() and engine.stats()["healthy"] == 0
    with pytest.raises(EngineClosedError, match="died"):
        await engine.generate(ask())
