"""What every engine promises a rollout, asked of each engine that is installed here."""

import asyncio
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from envs.types import FinishReason
from model.config import PolicyConfig
from model.engine.sampler import SamplingParams
from model.policy import Policy
from rl.engines.base import Completion, Engine, EngineError, GenerateRequest, StepFrame
from rl.engines.capabilities import CAPABILITIES, Capabilities
from rl.engines.native import EngineClosedError, NativeEngine

ENGINES: list[Any] = ["native"]
if importlib.util.find_spec("transformers") is not None:
    ENGINES.append("hf")
ENGINES.append(pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]))

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning"),
]
CONTEXT = 1024


@dataclass
class UnderTest:
    """An engine with what it told its listener, and sets of weights by seed."""

    engine: Engine
    able: Capabilities
    weights: Any
    frames: list[StepFrame] = field(default_factory=list)
    version: int = 0

    async def load(self, seed: int) -> int:
        self.version += 1
        await self.engine.load_weights(self.weights(seed), self.version)
        return self.version

    def drawn(self, session: str) -> list[tuple[StepFrame, int]]:
        return [(f, k) for f in self.frames for k, name in enumerate(f.sessions) if name == session]


def nano(seed):
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(seed)
    return policy


def tiny(seed):
    from model.hf.tiny import tiny_model

    return tiny_model("hf_tiny", seed)


def hf_weights(seed):
    from model.hf.policy import HFPolicy
    from model.hf.weights import published

    return {name: tensor.clone() for name, tensor in published(HFPolicy(tiny(seed))).items()}


async def start_vllm(folder, frames):
    from model.chat import nano_chat
    from model.hf.folder import save_hf
    from model.hf.policy import HFPolicy
    from rl.engines.vllm import VllmEngine
    from rl.engines.vllm_settings import VllmSettings

    save_hf(HFPolicy(tiny(1)), folder, nano_chat())
    settings = VllmSettings(dtype="float32")
    return await VllmEngine.start(folder, settings, max_requests=8, max_tokens=CONTEXT, on_step=frames.append)


@pytest_asyncio.fixture(params=ENGINES, scope="module", loop_scope="module")
async def tested(request, tmp_path_factory):
    torch.set_num_threads(1)
    frames: list[StepFrame] = []
    if request.param == "vllm":
        folder: Path = tmp_path_factory.mktemp("model")
        engine: Engine = await start_vllm(folder, frames)
        found = UnderTest(engine, CAPABILITIES["vllm"], hf_weights, frames)
    elif request.param == "hf":
        from model.hf.policy import HFPolicy

        engine = NativeEngine(HFPolicy(tiny(1)), max_requests=8, max_tokens=CONTEXT, on_step=frames.append)
        found = UnderTest(
            engine, CAPABILITIES["native"], lambda seed: HFPolicy(tiny(seed)).state_dict(), frames
        )
    else:
        engine = NativeEngine(nano(1), max_requests=8, max_tokens=CONTEXT, on_step=frames.append)
        found = UnderTest(engine, CAPABILITIES["native"], lambda seed: nano(seed).state_dict(), frames)
    yield found
    await engine.close()


def ask(session, prompt=(1, 2, 3), *, turn=0, completed=None, **options):
    sampling = SamplingParams(**({"max_tokens": 12, "seed": 5} | options))
    return GenerateRequest(session, turn, tuple(prompt), sampling, completed)


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.001)


async def begun(tested, session):
    await until(lambda: len(tested.drawn(session)) > 2)


async def test_concurrent_requests_get_what_each_gets_alone(tested):
    requests = [ask(f"together{i}", range(1, 2 + i), seed=i) for i in range(8)]
    before = tested.engine.stats()["generated_tokens"]
    together = await asyncio.gather(*(tested.engine.generate(r) for r in requests))
    for one, completion in zip(requests, together, strict=True):
        await tested.engine.release(one.session)
        alone = await tested.engine.generate(one)
        assert alone.token_ids == completion.token_ids
        assert completion.finish is FinishReason.LENGTH
        assert completion.policy_versions == (tested.engine.version,) * 12
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-4)
        await tested.engine.release(one.session)
    stats = tested.engine.stats()
    assert stats["generated_tokens"] - before == 2 * 8 * 12
    assert stats["running"] == stats["waiting"] == 0
    assert stats["busy_seconds"] > 0 and stats["steps"] >= 12


async def test_seeds_decide_what_is_drawn(tested):
    one, same, other = [
        (await tested.engine.generate(ask(f"seed{i}", seed=seed, max_tokens=30))).token_ids
        for i, seed in enumerate((7, 7, 8))
    ]
    assert one == same and one != other


async def test_the_listener_hears_every_token_before_its_turn_ends(tested):
    heard = {}

    async def sample(i):
        completion = await tested.engine.generate(ask(f"heard{i}", turn=i, seed=i))
        heard[i] = len(tested.drawn(f"heard{i}"))
        return completion

    completions = await asyncio.gather(*(sample(i) for i in range(3)))
    for i, completion in enumerate(completions):
        rows = tested.drawn(f"heard{i}")
        assert heard[i] == len(rows) == 12
        assert tuple(int(f.token_ids[k]) for f, k in rows) == completion.token_ids
        np.testing.assert_array_equal([f.logprobs[k] for f, k in rows], np.float32(completion.logprobs))
        assert {f.turns[k] for f, k in rows} == {i}
    kinds = {(f.token_ids.dtype, f.logprobs.dtype) for f in tested.frames}
    assert kinds == {(np.dtype("int32"), np.dtype("float32"))}


async def test_a_stop_id_is_the_last_token(tested):
    free = await tested.engine.generate(ask("free", max_tokens=40, temperature=0.0))
    stop = free.token_ids[10]
    ended = await tested.engine.generate(
        ask("ended", max_tokens=40, temperature=0.0, stop_ids=frozenset({stop}))
    )
    assert ended.finish is FinishReason.STOP
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_an_interrupted_turn_goes_on_after_its_tokens(tested):
    for name, options in {"greedy": {"temperature": 0.0}, "drawn": {}}.items():
        whole = await tested.engine.generate(ask(f"whole-{name}", max_tokens=20, **options))
        for cut in (1, 7, 19):
            done = Completion(whole.token_ids[:cut], whole.logprobs[:cut], (3,) * cut, FinishReason.ABORT)
            session = f"cut-{name}-{cut}"
            continued = await tested.engine.generate(ask(session, max_tokens=20, completed=done, **options))
            assert continued.token_ids[:cut] == whole.token_ids[:cut] and len(continued.token_ids) == 20
            assert continued.policy_versions == (3,) * cut + (tested.engine.version,) * (20 - cut)
            assert len(tested.drawn(session)) == 20 - cut
            if name == "greedy" or tested.able.position_draws:
                assert continued.token_ids == whole.token_ids
                np.testing.assert_allclose(continued.logprobs, whole.logprobs, atol=1e-4)


async def test_a_turn_that_had_ended_costs_nothing(tested):
    done = Completion((4, 9), (-1.0, -2.0), (0, 0), FinishReason.ABORT)
    ended = await tested.engine.generate(ask("over", completed=done, stop_ids=frozenset({9})))
    assert (ended.token_ids, ended.finish) == ((4, 9), FinishReason.STOP)
    full = await tested.engine.generate(ask("full", completed=done, max_tokens=2))
    assert (full.token_ids, full.finish) == ((4, 9), FinishReason.LENGTH)


async def test_the_context_ends_a_turn(tested):
    completion = await tested.engine.generate(ask("long", [1, 2] * (CONTEXT // 2 - 2), max_tokens=50))
    assert completion.finish is FinishReason.LENGTH and len(completion.token_ids) == 4


async def test_pause_stops_at_a_token_boundary_and_resume_changes_nothing(tested):
    expected = await tested.engine.generate(ask("unpaused", max_tokens=400))
    task = asyncio.create_task(tested.engine.generate(ask("paused", max_tokens=400)))
    await begun(tested, "paused")
    await tested.engine.pause()
    count = len(tested.drawn("paused"))
    late = asyncio.create_task(tested.engine.generate(ask("late", max_tokens=2)))
    await asyncio.sleep(0.1)
    assert len(tested.drawn("paused")) == count and not task.done() and not late.done()
    await tested.engine.resume()
    assert (await task).token_ids == expected.token_ids
    assert len((await late).token_ids) == 2


async def test_weights_are_swapped_while_requests_run(tested):
    old = tested.engine.version
    task = asyncio.create_task(tested.engine.generate(ask("swapped", max_tokens=600)))
    await begun(tested, "swapped")
    new = await tested.load(2)
    assert tested.engine.version == new
    versions = (await task).policy_versions
    assert set(versions) == {old, new} and list(versions) == sorted(versions)
    assert [f.policy_version for f, _ in tested.drawn("swapped")] == list(versions)
    with pytest.raises(ValueError, match="do not fit"):
        await tested.engine.load_weights({}, 99)
    assert tested.engine.version == new
    by_new = await tested.engine.generate(ask("by-new", temperature=0.0))
    await tested.load(1)
    by_old = await tested.engine.generate(ask("by-old", temperature=0.0))
    assert by_new.logprobs != by_old.logprobs


async def test_swaps_to_equal_weights_change_no_token(tested):
    await tested.load(1)
    expected = await tested.engine.generate(ask("still", max_tokens=100, temperature=0.0))
    task = asyncio.create_task(tested.engine.generate(ask("swaps", max_tokens=100, temperature=0.0)))
    for _ in range(5):
        await tested.load(1)
    completion = await task
    assert completion.token_ids == expected.token_ids
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.parametrize("how", ["abort", "release"])
async def test_a_running_request_ends_with_what_it_has(tested, how):
    session = f"ends-by-{how}"
    task = asyncio.create_task(tested.engine.generate(ask(session, max_tokens=900)))
    await begun(tested, session)
    await getattr(tested.engine, how)(session)
    completion = await task
    assert completion.finish is FinishReason.ABORT and 2 < len(completion.token_ids) < 900
    assert completion.token_ids == tuple(int(f.token_ids[k]) for f, k in tested.drawn(session))
    again = await tested.engine.generate(ask(session, turn=1))
    assert len(again.token_ids) == 12
    await getattr(tested.engine, how)("never seen")


async def test_cancelling_a_call_frees_its_place(tested):
    task = asyncio.create_task(tested.engine.generate(ask("cancelled", max_tokens=900)))
    await begun(tested, "cancelled")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: tested.engine.stats()["running"] == tested.engine.stats()["waiting"] == 0)
    assert len((await tested.engine.generate(ask("cancelled"))).token_ids) == 12


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ((), {}, "empty"),
        ([1] * CONTEXT, {}, "no room"),
        ([2**40], {}, "outside"),
        ([1], {"completed": Completion((1,), (), ())}, "lengths"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
    ],
)
async def test_a_request_at_fault_is_refused_and_the_others_go_on(tested, prompt, options, words):
    good = asyncio.create_task(tested.engine.generate(ask("good")))
    with pytest.raises(EngineError, match=words):
        await tested.engine.generate(ask("bad", prompt, **options))
    assert len((await good).token_ids) == 12


async def test_a_session_samples_one_turn_at_a_time(tested):
    task = asyncio.create_task(tested.engine.generate(ask("busy", max_tokens=900)))
    await begun(tested, "busy")
    with pytest.raises(EngineError, match="busy"):
        await tested.engine.generate(ask("busy"))
    await tested.engine.release("busy")
    await task


async def test_nan_weights_fail_requests_and_good_weights_serve_again(tested):
    good = tested.weights(1)
    broken = {name: torch.full_like(torch.as_tensor(t), torch.nan) for name, t in good.items()}
    await tested.engine.load_weights(broken, 1000)
    with pytest.raises(EngineError, match="NaN"):
        await tested.engine.generate(ask("nan"))
    await tested.engine.load_weights(good, 1001)
    assert (await tested.engine.generate(ask("healed"))).policy_versions == (1001,) * 12
    tested.version = 1001


async def test_closing_ends_all_requests_and_a_closed_engine_says_so(tested):
    """Comes last: the engine of the module is closed by it."""
    tasks = [asyncio.create_task(tested.engine.generate(ask(f"c{i}", max_tokens=900))) for i in range(12)]
    await begun(tested, "c0")
    await tested.engine.close()
    completions = await asyncio.gather(*tasks)
    assert {completion.finish for completion in completions} == {FinishReason.ABORT}
    await tested.engine.close()
    for call in (tested.engine.generate(ask("after")), tested.engine.pause()):
        with pytest.raises(EngineClosedError, match="make a new one"):
            await call
    await tested.engine.release("c0")
