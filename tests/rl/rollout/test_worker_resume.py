import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.types import (
    FinishReason,
    Status,
    Task,
    ToolCall,
    Trajectory,
)
from rl.rollout.faults import Interrupted
from rl.rollout.wal import TokenLog
from tests.rl.rollout.scripted import (
    Boxes,
    ScriptedEngine,
    calc_assignment,
    expert,
    ids,
    turns_of,
)
from tests.rl.rollout.workers import Shop, calc_worker, recovery, shop_worker


async def test_a_turn_given_back_by_a_closing_engine_stays_in_the_log(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    engine = ScriptedEngine(expert, log.on_step, step_s=0.01)
    task = asyncio.create_task(calc_worker(engine, Boxes(), log).run(calc_assignment()))
    await asyncio.sleep(0.06)
    await engine.close()
    with pytest.raises(Interrupted):
        await task
    log.close()
    (sample,) = recovery(tmp_path).unfinished.values()
    assert sample.turns[0].token_ids == tuple(ids("<call>47*86</call>"))[: len(sample.turns[0].token_ids)]


def same(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, timings={})


async def test_a_sample_goes_on_from_any_token_and_ends_as_if_undisturbed(tmp_path: Path) -> None:
    whole = await calc_worker(ScriptedEngine(expert), Boxes()).run(calc_assignment())
    total = whole.sampled_tokens
    for cut in range(total + 1):
        folder = tmp_path / str(cut)
        log = TokenLog(folder, flush_ms=0)
        seen = 0
        reached = asyncio.Event()

        def on_step(
            frame: Any, log: TokenLog = log, cut: int = cut, reached: asyncio.Event = reached
        ) -> None:
            nonlocal seen
            if seen < cut:
                log.on_step(frame)
            seen += 1
            if seen > cut:
                reached.set()

        engine = ScriptedEngine(expert, on_step, step_s=0.0)
        boxes = Boxes()
        task = asyncio.create_task(calc_worker(engine, boxes, log).run(calc_assignment()))
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        task.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        log.close()
        log = TokenLog(folder)
        if cut == total:
            assert [same(t) for t in log.recovery.finished.values()] == [same(whole)]
            log.close()
            continue
        (sample,) = log.recovery.unfinished.values()
        assert sum(len(turn.token_ids) for turn in sample.turns) == cut
        engine = ScriptedEngine(expert, log.on_step)
        again = await calc_worker(engine, boxes, log).run(calc_assignment(), sample)
        assert same(again) == same(whole)
        sampled_again = sum(len(turn.token_ids) for turn in sample.turns)
        assert log.stats()["tokens"] == total - sampled_again
        log.close()
        assert [same(t) for t in recovery(folder).finished.values()] == [same(whole)]


async def test_a_turn_is_on_disk_before_its_tool_call_is_sent(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, flush_ms=1e6)
    copied: list[bytes] = []

    class Spying(Shop):
        async def call_tool(self, call: ToolCall, task: Task, sandbox: Any) -> str:
            copied.append((tmp_path / "00000000.wal").read_bytes())
            return "ok"

    worker, *_ = shop_worker(turns_of("<call>tea</call>", "<answer>1<end>"), env=Spying(), log=log)
    await worker.run(calc_assignment())
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "00000000.wal").write_bytes(copied[0])
    (sample,) = recovery(tmp_path / "copy").unfinished.values()
    assert sample.turns[0].finish is FinishReason.STOP
    assert sample.turns[0].token_ids == tuple(ids("<call>tea</call>"))
    log.close()


async def test_a_result_of_a_stateless_tool_that_is_not_logged_is_computed_again(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, flush_ms=0)
    boxes = Boxes(type("Slow", (), {"python": staticmethod(lambda *a, **k: asyncio.sleep(60))})())
    worker = calc_worker(ScriptedEngine(expert, log.on_step), boxes, log)
    task = asyncio.create_task(worker.run(calc_assignment()))
    await asyncio.sleep(0.2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    log.close()
    log = TokenLog(tmp_path)
    (sample,) = log.recovery.unfinished.values()
    assert sample.turns[0].finish is FinishReason.STOP
    worker = calc_worker(ScriptedEngine(expert, log.on_step), Boxes(), log)
    assert (await worker.run(calc_assignment(), sample)).status is Status.FINISHED
    log.close()


async def test_a_log_that_waits_for_the_disk_gives_the_same(tmp_path: Path) -> None:
    log = TokenLog(tmp_path, fsync=True)
    whole = await calc_worker(ScriptedEngine(expert, log.on_step), Boxes(), log).run(calc_assignment())
    log.close()
    assert list(recovery(tmp_path).finished.values()) == [whole]
