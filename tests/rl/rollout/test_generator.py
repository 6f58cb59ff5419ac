import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import envs.registry
import envs.scaffolds
import rewards
from envs.types import Score, ToolCall, Trajectory
from model.config import PolicyConfig
from model.diagnostics.scales import ScaleMonitor
from model.policy import Policy
from rl.engines.native import NativeEngine
from rl.rollout.assignment import Purpose
from rl.rollout.buffer import Buffer
from rl.rollout.config import RolloutConfig
from rl.rollout.dispatch import Dispatcher, Ending, GroupPlan
from rl.rollout.generator import Generator, GeneratorError
from rl.rollout.resume import plan_resume, sample_id
from rl.rollout.sandboxes import FleetSandboxes, Sandboxes, lasting
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from rl.watch.metrics import split_families
from rl.weights import WeightSnapshot
from sandbox.client import Fleet
from tests.rl.rollout.killable_run import SIZE, assignment
from tests.rl.rollout.scripted import CHAT, Boxes, ScriptedEngine, calc_assignment, expert, turns_of
from tests.rl.rollout.workers import Shop

CONFIG = RolloutConfig(
    max_in_flight=12, groups_per_step=2, staleness=1, max_total_tokens=128, lag_alarm_s=0.2
)


def calc_generator(
    log: TokenLog, engine: Any, sandboxes: Sandboxes, config: RolloutConfig = CONFIG
) -> Generator:
    env, scaffold = envs.registry.load("calc"), envs.scaffolds.load("tools")
    worker = Worker(env, scaffold, engine, CHAT, sandboxes, rewards.load("exact"), log, config)
    return Generator({("calc", "tools"): worker}, engine, log, config)


def shop_generator(log: TokenLog, env: Shop, boxes: Boxes, **settings: float) -> Generator:
    config = RolloutConfig(lag_alarm_s=0.2, **settings)  # type: ignore[arg-type]
    engine = ScriptedEngine(turns_of("<call>tea</call>", "<answer>1<end>"), log.on_step)
    worker = Worker(env, envs.scaffolds.load("tools"), engine, CHAT, boxes, None, log, config)
    return Generator({("shop", "tools"): worker}, engine, log, config)


async def collect(generator: Generator, count: int) -> list[Trajectory]:
    found: list[Trajectory] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await generator.collect(1.0)
    return found


async def play(generator: Generator, dispatcher: Dispatcher, buffer: Buffer, steps: int) -> list[int]:
    """The controller's loop in small; returns the order in which groups were trained."""
    order: list[int] = []
    while dispatcher.version < steps:
        started = dispatcher.start(time.monotonic())
        for sample in started:
            known = assignment(sample)
            buffer.open(sample.group, known.task, known.key.effort, known.key.scaffold, SIZE)
        await generator.submit([assignment(sample) for sample in started])
        for trajectory in await generator.collect(0.5):
            if dispatcher.finish(sample_id(trajectory.key)) is Ending.FINAL:
                buffer.add(trajectory)
        while (batch := buffer.take(dispatcher.version)) is not None:
            order += [group.id for group in batch.groups]
            dispatcher.trained(group.id for group in batch.groups)
            dispatcher.advance(batch.version + 1)
            await generator.load_weights(WeightSnapshot.pack({"w": torch.zeros(1)}, batch.version + 1))
            await generator.consumed([t.key for group in batch.groups for t in group.trajectories])
    return order


async def test_dispatch_rollout_and_buffer_turn_in_one_plain_loop(tmp_path: Path) -> None:
    log, boxes = TokenLog(tmp_path), Boxes()
    generator = calc_generator(log, ScriptedEngine(expert, log.on_step), boxes)
    dispatcher, buffer = Dispatcher(CONFIG, lambda _: GroupPlan(SIZE, "calc")), Buffer(CONFIG)
    order = await play(generator, dispatcher, buffer, steps=4)
    await generator.close()
    assert len(order) == len(set(order)) == 8
    account = dispatcher.account()
    assert account.balanced
    assert (account.trained, account.filtered, account.failed) == (32, {}, {})
    assert boxes.out == 0
    assert buffer.counts["all_good"] >= 8


async def test_stats_hold_what_the_engine_rounded_since_the_last_call(tmp_path: Path) -> None:
    policy = Policy(PolicyConfig.preset("pico"))
    policy.fake_quant = True
    log = TokenLog(tmp_path)
    engine = NativeEngine(policy, max_requests=4, max_tokens=64, on_step=log.on_step)
    worker = Worker(
        envs.registry.load("calc"),
        envs.scaffolds.load("tools"),
        engine,
        CHAT,
        Boxes(),
        rewards.load("exact"),
        log,
        CONFIG,
    )
    with ScaleMonitor(policy, every=2) as scales:
        generator = Generator({("calc", "tools"): worker}, engine, log, CONFIG, scales)
        assert not any(name.startswith("quant/") for name in await generator.stats())
        await generator.submit([assignment(sample) for sample in Dispatcher(CONFIG, plan).start()])
        await collect(generator, 2)
        stats = await generator.stats()
        await generator.close()
    assert stats["quant/rollout/window.nonfinite"] == 0
    assert "quant/rollout/layer.1.main.clipped" in stats
    split_families(stats)


def plan(_: int) -> GroupPlan:
    return GroupPlan(SIZE, "calc")


async def test_stop_is_at_a_token_boundary_and_the_next_process_goes_on(tmp_path: Path) -> None:
    log, boxes = TokenLog(tmp_path, flush_ms=1e6), Boxes()
    generator = calc_generator(log, ScriptedEngine(expert, log.on_step, step_s=0.01), boxes)
    dispatcher = Dispatcher(CONFIG, lambda _: GroupPlan(SIZE, "calc"))
    samples = dispatcher.start()
    await generator.submit([assignment(sample) for sample in samples])
    while log.stats()["tokens"] < 3 * len(samples):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert await generator.stop(5.0) == 12
    assert (boxes.out, await generator.collect(0.0)) == (0, [])
    stats = await generator.stats()
    assert (stats["sys/rollout.running"], stats["sys/rollout.interrupted"]) == (0, 12)
    await generator.close()

    log = TokenLog(tmp_path)
    engine = ScriptedEngine(expert, log.on_step)
    generator = calc_generator(log, engine, boxes)
    plan = plan_resume(dispatcher, [await generator.recover(0)])
    assert sorted(map(sample_id, plan.resubmit)) == samples
    assert (plan.receive, plan.forget, plan.groups) == ((), (), (0, 1, 2))
    await generator.resubmit(plan.resubmit)
    done = await collect(generator, 12)
    assert all(isinstance(t.score, Score) and t.score.value == 1.0 for t in done)
    assert all(request.completed for request in engine.requests if request.turn == 0)
    with pytest.raises(GeneratorError, match="no unfinished sample"):
        await generator.resubmit(plan.resubmit[:1])
    await generator.close()


async def test_new_weights_reach_running_samples_and_mark_their_tokens(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    generator = calc_generator(log, ScriptedEngine(expert, log.on_step, step_s=0.01), Boxes())
    await generator.submit([calc_assignment()])
    await asyncio.sleep(0.05)
    await generator.load_weights(WeightSnapshot.pack({"w": torch.zeros(1)}, 7))
    (trajectory,) = await collect(generator, 1)
    versions = [v for turn in trajectory.turns for v in turn.policy_versions]
    assert versions == sorted(versions)
    assert trajectory.policy_versions == (0, 7)
    await generator.close()


async def test_tokens_of_lost_weights_count_as_of_the_checkpoints_version(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    engine = ScriptedEngine(expert, log.on_step, step_s=0.005)
    generator = calc_generator(log, engine, Boxes())
    engine.version = 5
    await generator.submit([calc_assignment(group=0)])
    (whole,) = await collect(generator, 1)
    await generator.submit([calc_assignment(group=1)])
    await asyncio.sleep(0.03)
    await generator.close()
    assert whole.policy_versions == (5,)
    log = TokenLog(tmp_path)
    engine = ScriptedEngine(expert, log.on_step)
    engine.version = 3
    generator = calc_generator(log, engine, Boxes())
    recovered = await generator.recover(3)
    assert [t.policy_versions for t in recovered.finished] == [(3,)]
    assert recovered.finished[0].turns[0].logprobs == whole.turns[0].logprobs
    await generator.resubmit(recovered.unfinished)
    (continued,) = await collect(generator, 1)
    assert continued.policy_versions == (3,)
    await generator.close()


async def test_evaluation_runs_beside_training_and_leaves_no_trace_in_the_log(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    generator = calc_generator(log, ScriptedEngine(expert, log.on_step), Boxes())
    both = [calc_assignment(), calc_assignment(purpose=Purpose.EVAL)]
    await generator.submit(both)
    done = await collect(generator, 2)
    assert len(done) == 2
    assert len(log.recovery.finished) == 0
    await generator.close()
    log = TokenLog(tmp_path)
    assert len(log.recovery.finished) == 1
    log.close()


async def test_an_environment_that_blocks_the_loop_is_named(tmp_path: Path) -> None:
    env = Shop()
    env.block_s = 0.6
    generator = shop_generator(TokenLog(tmp_path), env, Boxes())
    await generator.submit([calc_assignment(environment="shop")])
    await collect(generator, 1)
    (alarm,) = await generator.alarms()
    assert alarm.startswith("environment shop blocked the event loop for 0.")
    assert "workers.py" in alarm
    assert (await generator.stats())["sys/loop_lag.max"] > 0.4
    await generator.close()


async def test_stop_has_a_deadline_and_says_who_missed_it(tmp_path: Path) -> None:
    class Clinging(Shop):
        async def call_tool(self, call: ToolCall, task: Any, sandbox: Any) -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                await asyncio.sleep(0.5)
            return "late"

    generator = shop_generator(TokenLog(tmp_path), Clinging(), Boxes())
    await generator.submit([calc_assignment(environment="shop")])
    await asyncio.sleep(0.1)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match="1 of 1 samples did not give back"):
        await generator.stop(0.1)
    assert time.monotonic() - started < 0.4
    await asyncio.sleep(0.6)
    await generator.close()


async def test_a_broken_log_ends_the_run_instead_of_samples(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    generator = calc_generator(log, ScriptedEngine(expert, log.on_step), Boxes())
    log._failure = OSError("No space left on device")
    await generator.submit([calc_assignment()])
    with pytest.raises(RuntimeError, match="free space"):
        await generator.collect(5.0)
    log._failure = None
    await generator.close()


async def test_an_assignment_without_a_worker_is_refused(tmp_path: Path) -> None:
    generator = calc_generator(TokenLog(tmp_path), ScriptedEngine(expert), Boxes())
    with pytest.raises(
        GeneratorError, match=r"environment sort with scaffold tools; there are: calc with tools"
    ):
        await generator.submit([calc_assignment(environment="sort")])
    await generator.close()


async def test_the_real_engine_and_a_real_sandbox_run_calc(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    log = TokenLog(tmp_path / "log")
    engine = NativeEngine(policy, max_requests=12, max_tokens=128, on_step=log.on_step)
    async with await Fleet.connect(
        "local", backend="bubblewrap", state_dir=tmp_path / "node", owner="test"
    ) as fleet:
        env = envs.registry.load("calc")
        assert env.sandbox is not None
        sandboxes = FleetSandboxes(lasting(fleet), env.sandbox, pool_size=1, lease_s=600.0)
        scripted = calc_generator(log, ScriptedEngine(expert, log.on_step), sandboxes)
        await scripted.submit([calc_assignment(group=group, a=11 + group, b=97) for group in range(8)])
        done = await collect(scripted, 8)
        assert [t.score.value for t in done if isinstance(t.score, Score)] == [1.0] * 8
        generator = calc_generator(log, engine, sandboxes)
        await generator.submit([calc_assignment(group=100, index=index) for index in range(12)])
        done = await collect(generator, 12)
        assert all(t.error is None and isinstance(t.score, Score) for t in done)
        assert len({t.turns[0].completion_ids for t in done}) > 6
        await generator.close()
        await scripted._lag.stop()
    log = TokenLog(tmp_path / "log")
    assert {t.key: t.turns for t in log.recovery.finished.values() if t.key.group == 100} == {
        t.key: t.turns for t in done
    }
    log.close()
