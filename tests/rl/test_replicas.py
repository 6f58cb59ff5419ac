"""Several generators as one, over real token logs; a replica dies with what its files hold at that moment."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import envs.registry
import envs.scaffolds
import rewards
from envs.types import Trajectory
from rl.actors import Host, Process
from rl.checkpoint import Checkpoint
from rl.launch.compose import load_config
from rl.recipe import Recipe
from rl.replicas import Replica, Replicas
from rl.restarts import ProcessDiedError, Restarts, RestartsExhaustedError
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.config import RolloutConfig
from rl.rollout.generator import Generator
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from tests.rl.rollout.scripted import CHAT, Boxes, ScriptedEngine, calc_assignment, expert

CONFIG = RolloutConfig(max_in_flight=32, groups_per_step=2, max_total_tokens=128)


@asynccontextmanager
async def generator_in(folder: Path, step_s: float):
    log = TokenLog(folder, flush_ms=0)
    engine = ScriptedEngine(expert, log.on_step, step_s)
    env, scaffold = envs.registry.load("calc"), envs.scaffolds.load("tools")
    worker = Worker(env, scaffold, engine, CHAT, Boxes(), rewards.load("exact"), log, CONFIG)
    generator = Generator({("calc", "tools"): worker}, engine, log, CONFIG)
    try:
        yield generator
    finally:
        await generator.close()


class Mortal(Process):
    """A process that can die: nobody hears of it again, and its files stay as they were."""

    def __init__(self, role: str, host: Host, folder: Path) -> None:
        super().__init__(role, host)
        self.folder, self.dead = folder, asyncio.Event()
        self.hosted = host

    def die(self) -> Path:
        self.dead.set()
        return Path(shutil.copytree(self.folder, self.folder.with_name(self.folder.name + "+")))

    async def call(self, name: str, *args: Any) -> Any:
        dying = asyncio.ensure_future(self.dead.wait())
        calling = asyncio.ensure_future(super().call(name, *args))
        await asyncio.wait([dying, calling], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.dead.is_set():
            calling.add_done_callback(lambda task: task.exception())
            raise ProcessDiedError(self.role, "killed by the test")
        return await calling


class Farm:
    """Replicas whose processes the test may kill."""

    def __init__(self, root: Path, count: int = 2, restarts: int = 3, step_s: float = 0.002) -> None:
        self.root, self.count, self.step_s = root, count, step_s
        self.places = {i: root / f"log-{i}" for i in range(count)}
        self.made: list[Mortal] = []
        self.notes: list[str] = []
        self.restarts = Restarts(restarts)

    async def open(self, index: int) -> Mortal:
        host = Host()
        await host.start(generator_in, self.places[index], self.step_s)
        process = Mortal(f"generator-{index}", host, self.places[index])
        self.made.append(process)
        return process

    async def __aenter__(self) -> "Farm":
        processes = [await self.open(i) for i in range(self.count)]
        self.pool = Replicas(processes, self.open, self.restarts, self.notes.append)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.pool.stop()
        for process in self.made:
            await process.hosted.stop()

    def kill(self, index: int) -> None:
        process = self.pool.replicas[index].process
        assert isinstance(process, Mortal)
        self.places[index] = process.die()


def group(number: int, size: int = 4, **options: Any) -> list[Assignment]:
    return [
        calc_assignment(number, i, 0, a=11 + number, b=90 - number, max_tokens=20, **options)
        for i in range(size)
    ]


async def finish(pool: Replicas, count: int) -> list[Trajectory]:
    found: list[Trajectory] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await pool.collect(0.5)
    return found


async def test_groups_go_whole_to_the_replica_with_the_fewest_samples(tmp_path: Path) -> None:
    async with Farm(tmp_path, step_s=60.0) as farm:
        await farm.pool.submit([*group(0, 5), *group(1, 2), *group(2, 2)])
        await farm.pool.submit(group(3, 2))
        held = [{key.group for _, key in replica.running} for replica in farm.pool.replicas]
        assert held == [{0}, {1, 2, 3}]
        stats = await farm.pool.stats()
        assert stats["sys/rollout.running"] == 11
        assert (stats["sys/replicas.load_max"], stats["sys/replicas.load_min"]) == (6, 5)


async def test_every_sample_comes_out_once_from_whichever_replica(tmp_path: Path) -> None:
    async with Farm(tmp_path, count=3) as farm:
        await farm.pool.submit([a for n in range(6) for a in group(n)])
        done = await finish(farm.pool, 24)
        assert len({t.key for t in done}) == len(done) == 24
        assert not any(replica.running for replica in farm.pool.replicas)
        assert (await farm.pool.stats())["sys/wal.live"] == 0
        await farm.pool.consumed([t.key for t in done])


async def test_samples_of_a_dead_replica_go_on_at_their_next_token_in_its_successor(tmp_path: Path) -> None:
    async with Farm(tmp_path, step_s=0.02) as farm:
        submitted = [a for n in range(4) for a in group(n)]
        submitted.append(calc_assignment(99, 0, purpose=Purpose.EVAL))
        await farm.pool.submit(submitted)
        engine = farm.made[0].hosted._object.engine
        async with asyncio.timeout(30):
            while len(engine.requests) < 8:  # noqa: ASYNC110  the scripted engine has no event to wait for
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
        farm.kill(0)
        done = await finish(farm.pool, len(submitted))
        assert sorted(t.key for t in done) == sorted(a.key for a in submitted)
        assert any("generator-0 died (killed by the test)" in note for note in farm.notes)
        successor = farm.made[-1].hosted._object.engine
        assert any(request.completed for request in successor.requests)
        assert (await farm.pool.stats())["sys/replicas.restarts"] == 1


async def test_what_had_finished_but_was_not_collected_is_found_in_the_log(tmp_path: Path) -> None:
    async with Farm(tmp_path, step_s=0.0) as farm:
        await farm.pool.submit(group(0))
        async with asyncio.timeout(30):
            while (await farm.pool.stats())["sys/rollout.running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        farm.kill(0)
        done = await finish(farm.pool, 4)
        assert len({t.key for t in done}) == 4
        assert not farm.made[-1].hosted._object.engine.requests


async def test_what_was_collected_before_the_death_does_not_come_out_again(tmp_path: Path) -> None:
    async with Farm(tmp_path) as farm:
        await farm.pool.submit([*group(0), *group(1)])
        first = await finish(farm.pool, 8)
        farm.kill(0)
        farm.kill(1)
        await farm.pool.submit(group(2))
        assert {t.key.group for t in await finish(farm.pool, 4)} == {2}
        assert len(first) == 8 and await farm.pool.collect(0.2) == []


async def test_a_replica_that_dies_again_and_again_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    async with Farm(tmp_path, count=1, restarts=2, step_s=60.0) as farm:
        await farm.pool.submit(group(0))
        with pytest.raises(RestartsExhaustedError, match=r"generator-0 died 3 times .*resume the run"):
            for _ in range(3):
                farm.kill(0)
                await farm.pool.alarms()


async def test_a_resumed_pool_gives_each_sample_back_to_the_log_that_holds_it(tmp_path: Path) -> None:
    async with Farm(tmp_path, step_s=0.01) as farm:
        await farm.pool.submit([*group(0), *group(1)])
        await asyncio.sleep(0.05)
        found = await farm.pool.interrupt()
    async with Farm(tmp_path) as farm:
        recovered = await farm.pool.recover(0)
        keys = recovered.unfinished
        assert len(keys) + len(found) == 8
        await farm.pool.consumed(keys[:1])
        await farm.pool.resubmit(keys[1:])
        done = await finish(farm.pool, len(keys) - 1)
        assert sorted(t.key for t in done) == sorted(keys[1:])


async def all_ended(pool: Replicas) -> None:
    async with asyncio.timeout(30):
        while (await pool.stats())["sys/rollout.running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_a_replica_gave_before_its_death_does_not_begin_again_in_its_successor(
    tmp_path: Path,
) -> None:
    async with Farm(tmp_path, count=1) as farm:
        (replica,) = farm.pool.replicas
        await farm.pool.submit(group(0, 1, purpose=Purpose.EVAL))
        await all_ended(farm.pool)
        replica.poll = asyncio.create_task(farm.pool._poll(replica, 1.0))
        await asyncio.wait([replica.poll])
        farm.kill(0)
        await farm.pool.submit(group(1, 1, purpose=Purpose.EVAL))
        assert {t.key.group for t in await finish(farm.pool, 2)} == {0, 1}
        await all_ended(farm.pool)
        assert await farm.pool.collect(0.1) == []


async def test_an_interruption_waits_for_the_successor_and_leaves_nothing_running(tmp_path: Path) -> None:
    async with Farm(tmp_path, count=1, step_s=60.0) as farm:
        making, made = asyncio.Event(), asyncio.Event()

        async def prepare(replica: Replica) -> None:
            making.set()
            await made.wait()

        farm.pool.prepare_successors(prepare)
        await farm.pool.submit(group(0))
        farm.kill(0)
        collecting = asyncio.create_task(farm.pool.collect(60.0))
        await making.wait()
        interrupting = asyncio.create_task(farm.pool.interrupt())
        await asyncio.sleep(0.05)
        made.set()
        assert await interrupting == []
        assert await collecting == []
        assert (await farm.pool.stats())["sys/rollout.running"] == 0
        assert not any(replica.running for replica in farm.pool.replicas)


async def test_an_interruption_returns_what_a_dead_replica_had_finished(tmp_path: Path) -> None:
    async with Farm(tmp_path, count=1) as farm:
        await farm.pool.submit(group(0))
        await all_ended(farm.pool)
        farm.kill(0)
        assert len(await farm.pool.interrupt()) == 4
        assert await farm.pool.collect(0.1) == []


async def interrupted_early(folder: Path) -> None:
    """Leaves the unfinished samples of two groups in the logs."""
    async with Farm(folder, step_s=60.0) as farm:
        await farm.pool.submit([*group(0), *group(1)])
        await asyncio.sleep(0)
        await farm.pool.interrupt()


async def test_a_replica_may_die_between_recovery_and_going_on(tmp_path: Path) -> None:
    await interrupted_early(tmp_path)
    async with Farm(tmp_path) as farm:
        keys = (await farm.pool.recover(0)).unfinished
        farm.kill(0)
        await farm.pool.consumed(keys[:1])
        await farm.pool.resubmit(keys[1:])
        assert sorted(t.key for t in await finish(farm.pool, 7)) == sorted(keys[1:])


async def test_a_run_that_begins_anew_forgets_what_its_logs_hold(tmp_path: Path) -> None:
    """Else a sample stands there twice, and a run that is resumed later waits for neither."""
    await interrupted_early(tmp_path)
    async with Farm(tmp_path) as farm:
        assert (await farm.pool.stats())["sys/wal.live"] == 8
        sides: Any = farm.pool
        recipe = Recipe(load_config(["experiment=calc"]), sides, sides, sides, sides, tmp_path)
        await recipe._forget_samples()
        assert (await farm.pool.stats())["sys/wal.live"] == 0


async def test_samples_of_tasks_that_their_groups_do_not_have_any_more_begin_anew(tmp_path: Path) -> None:
    config = load_config(["experiment=calc", "algorithm.group_size=4"])
    await interrupted_early(tmp_path)
    async with Farm(tmp_path) as farm:
        sides: Any = farm.pool
        notes = list[str]()
        watch: Any = SimpleNamespace(note=notes.append, dispatched=lambda *about: None)

        async def publish() -> dict[str, float]:
            return {}

        async def restore(checkpoint: Checkpoint) -> dict[str, Any]:
            controller.extra_state = {"sft_done": 0, "results": {"before": {}}}
            return json.loads(json.dumps(controller.state_dict()))

        async def recovered(groups: int) -> None:
            pass

        learner: Any = SimpleNamespace(restore=restore, recovered=recovered)
        recipe = Recipe(config, learner, sides, publish, watch, tmp_path)
        controller = recipe._controller()
        await recipe._restore(controller, Checkpoint(0, tmp_path))
        assert controller.dispatcher.cursor == 0 and not controller.dispatcher.in_flight
        assert (await farm.pool.stats())["sys/wal.live"] == 0
        assert notes[-1] == "8 samples of tasks that their groups do not have now begin anew"


async def test_the_death_of_whom_a_successor_waits_for_is_not_its_own(tmp_path: Path) -> None:
    async with Farm(tmp_path, count=1) as farm:

        async def prepare(replica: Replica) -> None:
            raise ProcessDiedError("process that another one waits for", "killed by the test")

        farm.pool.prepare_successors(prepare)
        farm.kill(0)
        with pytest.raises(ProcessDiedError, match="process that another one waits for died"):
            await farm.pool.alarms()
        assert farm.restarts.total == 1


async def test_nothing_goes_on_behind_a_call_that_failed(tmp_path: Path) -> None:
    async with Farm(tmp_path) as farm:
        making = asyncio.Event()

        async def prepare(replica: Replica) -> None:
            making.set()
            await asyncio.sleep(0.2)

        async def ask(replica: Replica) -> None:
            if replica.index:
                await replica.process.call("alarms")
            await making.wait()
            raise RuntimeError("the first one fails while the other's successor is made")

        farm.pool.prepare_successors(prepare)
        farm.kill(1)
        with pytest.raises(RuntimeError, match="the first one fails"):
            await farm.pool.each(ask)
        assert not any(replica.lock.locked() for replica in farm.pool.replicas)
        assert farm.pool.replicas[1].generation == 1
