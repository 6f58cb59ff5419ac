import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from envs.types import FinishReason
from model.config import PolicyConfig
from model.engine.columns import ContextState
from model.engine.errors import ContextOverflowError, EmptyPromptError, NonFiniteLogitsError, StateError
from model.engine.sampler import SamplingParams
from model.engine.speculative import Speculation
from model.policy import Policy
from rl.engines.base import Completion, Engine, EngineError, GenerateRequest, StepFrame
from rl.engines.native import EngineClosedError, NativeEngine


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_policy(kind=Policy):
    policy = kind(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    return policy


class Breaking(Policy):
    """A policy whose tenth forward fails, as a device can."""

    calls = 0

    def extend(self, *arguments, **options):
        self.calls += 1
        if self.calls == 10:
            raise RuntimeError("device lost")
        return super().extend(*arguments, **options)


@pytest.fixture
async def engine():
    engine = NativeEngine(make_policy(), max_requests=8, max_tokens=64)
    yield engine
    await engine.close()


def request(session="s", prompt=(1, 2, 3), *, turn=0, completed=None, **options):
    sampling = SamplingParams(**({"max_tokens": 12, "seed": 5} | options))
    return GenerateRequest(session, turn, tuple(prompt), sampling, completed)


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  counters have no event to wait for
            await asyncio.sleep(0.001)


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


async def test_concurrent_requests_get_what_each_gets_alone(engine):
    assert isinstance(engine.version, int)
    requests = [request(f"s{i}", range(1, 2 + i), seed=i) for i in range(8)]
    together = await asyncio.gather(*(engine.generate(r) for r in requests))
    for one, completion in zip(requests, together, strict=True):
        await engine.release(one.session)
        alone = await engine.generate(one)
        assert alone.token_ids == completion.token_ids
        assert completion.finish is FinishReason.LENGTH
        assert completion.policy_versions == (0,) * 12
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-5)
    stats = engine.stats()
    assert stats["generated_tokens"] == 2 * 8 * 12
    assert stats["running"] == stats["waiting"] == 0
    assert stats["busy_seconds"] > 0 and 12 <= stats["steps"] <= 2 * 8 * 13


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
async def test_with_drafts_frames_hold_several_tokens_of_a_session_in_order(rule):
    policy, frames = Policy(PolicyConfig.preset("nano_draft")), []
    policy.reset_parameters(1)
    speculate = Speculation(rule=rule, length=5)
    engine = NativeEngine(policy, max_requests=4, max_tokens=64, on_step=frames.append, speculate=speculate)
    requests = [request(f"s{i}", range(1, 2 + i), seed=i, temperature=0.0) for i in range(4)]
    done = await asyncio.gather(*(engine.generate(r) for r in requests))
    for one, completion in zip(requests, done, strict=True):
        own = [(frame, k) for frame in frames for k, s in enumerate(frame.sessions) if s == one.session]
        assert tuple(int(frame.token_ids[k]) for frame, k in own) == completion.token_ids
        assert tuple(float(frame.logprobs[k]) for frame, k in own) == completion.logprobs
    stats = engine.stats()
    assert 0 < stats["drafts.accepted"] <= stats["drafts.checked"] and stats["drafts.steps"] < 4 * 12
    await engine.close()


async def test_frames_come_in_the_engines_thread_and_before_the_tokens():
    frames, delivered = [], []

    def listen(frame):
        assert threading.current_thread().name == "engine"
        assert not delivered
        frames.append(frame)

    engine: Engine = NativeEngine(make_policy(), max_requests=4, max_tokens=64, on_step=listen)
    completions = await asyncio.gather(*(engine.generate(request(f"s{i}", turn=i, seed=i)) for i in range(3)))
    delivered.append(True)
    for i, completion in enumerate(completions):
        rows = [(f, f.sessions.index(f"s{i}")) for f in frames if f"s{i}" in f.sessions]
        assert tuple(int(f.token_ids[row]) for f, row in rows) == completion.token_ids
        np.testing.assert_array_equal([f.logprobs[row] for f, row in rows], np.float32(completion.logprobs))
        assert {f.turns[row] for f, row in rows} == {i}
    assert {(f.token_ids.dtype, f.logprobs.dtype) for f in frames} == {
        (np.dtype("int32"), np.dtype("float32"))
    }
    await engine.close()


async def test_an_interrupted_turn_continues_exactly():
    whole_engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    whole = await whole_engine.generate(request(max_tokens=20))
    await whole_engine.close()
    for cut in (1, 7, 19):
        tokens, logprobs = whole.token_ids[:cut], whole.logprobs[:cut]
        completed = Completion(tokens, logprobs, (3,) * cut, FinishReason.ABORT)
        other = NativeEngine(make_policy(), max_requests=2, max_tokens=64, version=4)
        continued = await other.generate(request(max_tokens=20, completed=completed))
        await other.close()
        assert continued.token_ids == whole.token_ids
        np.testing.assert_allclose(continued.logprobs, whole.logprobs, atol=1e-5)
        assert continued.policy_versions == (3,) * cut + (4,) * (20 - cut)


async def test_pause_stops_at_a_token_boundary_and_resume_changes_nothing(engine):
    expected = await engine.generate(request("a", max_tokens=40))
    task = asyncio.create_task(engine.generate(request("b", max_tokens=40)))
    await until(lambda: engine.stats()["generated_tokens"] > 45)
    await engine.pause()
    tokens = engine.stats()["generated_tokens"]
    await asyncio.sleep(0.05)
    assert engine.stats()["generated_tokens"] == tokens
    assert engine.stats()["running"] == 1 and not task.done()
    late = asyncio.create_task(engine.generate(request("c", max_tokens=2)))
    await asyncio.sleep(0.02)
    assert not late.done()
    await engine.resume()
    assert (await task).token_ids == expected.token_ids
    assert len((await late).token_ids) == 2


async def test_weights_are_swapped_while_requests_run(engine):
    other = make_policy()
    other.reset_parameters(2)
    task = asyncio.create_task(engine.generate(request(max_tokens=50)))
    await until(lambda: engine.stats()["generated_tokens"] > 3)
    await engine.load_weights({name: t.numpy() for name, t in other.state_dict().items()}, 7)
    assert engine.version == 7
    versions = (await task).policy_versions
    assert set(versions) == {0, 7} and list(versions) == sorted(versions)
    with pytest.raises(StateError, match="do not fit"):
        await engine.load_weights({}, 8)
    assert engine.version == 7


async def test_a_swap_to_equal_weights_changes_no_token(engine):
    expected = await engine.generate(request("a", max_tokens=50))
    state = {name: tensor.clone() for name, tensor in make_policy().state_dict().items()}
    task = asyncio.create_task(engine.generate(request("b", max_tokens=50)))
    for version in range(1, 6):
        await engine.load_weights(state, version)
    completion = await task
    assert completion.token_ids == expected.token_ids
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)


async def test_release_ends_a_running_request_with_what_it_has(engine):
    task = asyncio.create_task(engine.generate(request(max_tokens=50)))
    await until(lambda: engine.stats()["generated_tokens"] > 3)
    await engine.release("s")
    completion = await task
    assert completion.finish is FinishReason.ABORT
    assert 3 < len(completion.token_ids) < 50
    await engine.release("never seen")


async def test_cancelling_a_call_frees_its_place(engine):
    task = asyncio.create_task(engine.generate(request(max_tokens=60)))
    await until(lambda: engine.stats()["running"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.stats()["running"] == 0)
    assert len((await engine.generate(request())).token_ids) == 12


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (request(prompt=()), EmptyPromptError),
        (request(prompt=[1] * 64), ContextOverflowError),
        (request(completed=Completion((1,), (), ())), None),
        (request(completed=Completion((2**40,), (0.0,), (0,))), None),
    ],
)
async def test_a_request_at_fault_is_refused_and_the_others_go_on(engine, bad, cause):
    good = asyncio.create_task(engine.generate(request("good")))
    with pytest.raises(EngineError) as caught:
        await engine.generate(bad)
    assert isinstance(caught.value.__cause__, cause or ValueError)
    assert len((await good).token_ids) == 12


async def test_nan_weights_fail_requests_and_good_weights_serve_again(engine):
    good = {name: tensor.clone() for name, tensor in make_policy().state_dict().items()}
    await engine.load_weights({name: torch.full_like(t, torch.nan) for name, t in good.items()}, 1)
    with pytest.raises(EngineError, match="NaN") as caught:
        await engine.generate(request())
    assert isinstance(caught.value.__cause__, NonFiniteLogitsError)
    await engine.load_weights(good, 2)
    assert (await engine.generate(request())).policy_versions == (2,) * 12


async def test_close_ends_running_and_waiting_requests_and_the_thread():
    engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    tasks = [asyncio.create_task(engine.generate(request(f"s{i}", max_tokens=60))) for i in range(4)]
    await until(lambda: engine.stats()["generated_tokens"] > 4)
    await engine.close()
    completions = await asyncio.gather(*tasks)
    assert {completion.finish for completion in completions} == {FinishReason.ABORT}
    assert [bool(completion.token_ids) for completion in completions] == [True, True, False, False]
    assert engine_threads() == []
    await engine.close()
    with pytest.raises(EngineClosedError, match="make a new one"):
        await engine.generate(request())
    with pytest.raises(EngineClosedError):
        await engine.pause()
    await engine.release("s0")


async def test_close_also_ends_an_engine_that_is_paused_or_was_never_used():
    await NativeEngine(make_policy(), max_requests=2, max_tokens=64).close()
    engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    await engine.pause()
    done = Completion((1, 2), (0.0, 0.0), (0, 0))
    tasks = [
        asyncio.create_task(engine.generate(request("a"))),
        asyncio.create_task(engine.generate(request("b", max_tokens=2, completed=done))),
    ]
    await until(lambda: engine.stats()["waiting"] == 1)
    await engine.close()
    assert [(await task).finish for task in tasks] == [FinishReason.ABORT, FinishReason.LENGTH]


async def test_an_error_in_the_loop_reaches_everyone_who_waits_and_later_calls():
    engine = NativeEngine(make_policy(Breaking), max_requests=2, max_tokens=64)
    tasks = [asyncio.create_task(engine.generate(request(f"s{i}", max_tokens=60))) for i in range(4)]
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineClosedError)
        assert "device lost" in str(result) and isinstance(result.__cause__, RuntimeError)
    with pytest.raises(EngineClosedError, match="device lost"):
        await engine.generate(request())
    with pytest.raises(EngineClosedError, match="device lost"):
        await engine.release("s0")
    await engine.close()
    assert engine_threads() == []


async def test_an_error_of_the_listener_is_an_error_of_the_loop():
    def listen(frame):
        raise OSError("disk full")

    engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64, on_step=listen)
    with pytest.raises(EngineClosedError, match="disk full"):
        await engine.generate(request())
    await engine.close()


async def test_an_idle_engine_uses_no_processor_time(engine):
    await engine.generate(request())
    thread = engine_threads()[0]
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before = time.clock_gettime(clock)
    await asyncio.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.01


async def test_the_event_loop_is_woken_once_a_step_and_not_once_a_token(engine, monkeypatch):
    loop, wakes = asyncio.get_running_loop(), []
    original = loop.call_soon_threadsafe

    def counted(*arguments, **options):
        if threading.current_thread().name == "engine":
            wakes.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await asyncio.gather(*(engine.generate(request(f"s{i}", max_tokens=10 + i % 2)) for i in range(8)))
    assert len(wakes) <= 4


def test_an_engine_whose_event_loop_is_gone_ends():
    engine = NativeEngine(make_policy(), max_requests=2, max_tokens=64)

    async def start():
        task = asyncio.create_task(engine.generate(request(max_tokens=5)))
        await until(lambda: engine.stats()["running"] == 1)
        task.cancel()

    asyncio.run(start())
    deadline = time.monotonic() + 10
    while engine_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine_threads() == []
    with pytest.raises(EngineError, match="one event loop"):
        asyncio.run(engine.generate(request()))


async def test_a_completion_says_how_its_tokens_were_sampled():
    frames: list[StepFrame] = []
    engine = NativeEngine(
        make_policy(), max_requests=2, max_tokens=64, capture=True, replay="bounded", on_step=frames.append
    )
    completion = await engine.generate(request(prompt=range(30), max_tokens=4, top_k=3))
    assert completion.replay_starts == ((0, 14),)
    assert completion.states == (ContextState.OWN,) * 4
    assert completion.expert_ids is not None and completion.sampling_mask is not None
    assert completion.expert_ids.start == 0 and len(completion.expert_ids.ids) == 33
    assert len(completion.sampling_mask) == 4 and completion.sampling_mask.ids.numel() == 12
    assert all(own > full for own, full in zip(completion.logprobs, completion.full_logprobs, strict=True))
    inputs = [frame.expert_ids[0] for frame in frames if frame.expert_ids is not None]
    assert np.array_equal(inputs, completion.expert_ids.ids[29:])
    unknown = await engine.generate(request("stranger", range(30), turn=3, max_tokens=2))
    assert unknown.states == (ContextState.REPLAYED,) * 2 and unknown.replay_starts == ()
    await engine.close()


@pytest.mark.parametrize("remove", [True, False])
async def test_a_turn_moves_to_another_engine_and_goes_on(remove):
    first = NativeEngine(make_policy(), max_requests=2, max_tokens=64)
    whole = await first.generate(request("whole", max_tokens=40))
    turn = asyncio.create_task(first.generate(request("moved", turn=2, max_tokens=40)))
    await until(lambda: first.stats()["generated_tokens"] > 45)
    await first.pause()
    state = await first.export_state("moved", remove=remove)
    await first.resume()
    left = await turn
    assert left.finish is (FinishReason.ABORT if remove else FinishReason.LENGTH)
    with pytest.raises(EngineError, match="is not sampling a turn"):
        await first.export_state("moved")
    await first.close()
    frames: list[StepFrame] = []
    second = NativeEngine(make_policy(), max_requests=2, max_tokens=64, on_step=frames.append)
    continued = await second.continue_state(state, 2)
    await second.close()
    assert continued.token_ids == whole.token_ids
    np.testing.assert_allclose(continued.logprobs, whole.logprobs, atol=1e-5)
    assert {turn for frame in frames for turn in frame.turns} == {2}
    assert sum(frame.token_ids.size for frame in frames) < 40
