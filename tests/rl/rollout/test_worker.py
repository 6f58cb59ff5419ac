import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

import envs.registry
import envs.scaffolds
from envs.base import Episode, ToolError
from envs.types import (
    Boundary,
    FinishReason,
    Message,
    Missing,
    Role,
    Score,
    Status,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)
from rl.rollout.assignment import Purpose, request_seed
from rl.rollout.config import RolloutConfigError
from rl.rollout.episode import EpisodeRun
from rl.rollout.messages import to_chat
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from tests.rl.rollout.scripted import (
    CHAT,
    Boxes,
    ScriptedEngine,
    calc_assignment,
    expert,
    ids,
    turns_of,
)
from tests.rl.rollout.workers import SandboxDied, Shop, calc_worker, config, flat, recovery, shop_worker


async def test_calc_runs_from_prompt_to_score_on_token_ids(tmp_path: Path) -> None:
    log, boxes = TokenLog(tmp_path), Boxes()
    engine = ScriptedEngine(expert, log.on_step)
    trajectory = await calc_worker(engine, boxes, log).run(calc_assignment(group=5, index=2))
    log.close()
    first, second = trajectory.turns
    assert (trajectory.status, trajectory.stop) == (Status.FINISHED, StopReason.ANSWER)
    assert isinstance(trajectory.score, Score)
    assert trajectory.score.value == 1.0
    assert first.message.tool_calls[0].arguments == {"expression": "47*86"}
    assert first.observations == (Message(Role.TOOL, "4042", tool_call_id=first.message.tool_calls[0].id),)
    assert list(second.prompt_ids) == ids("<obs>4042</obs>")
    assert second.message.content == "4042"
    assert engine.requests[1].token_ids == (*first.prompt_ids, *first.completion_ids, *second.prompt_ids)
    assert [r.sampling.seed for r in engine.requests] == [request_seed(11, 5, 2, turn) for turn in range(2)]
    assert engine.released == [calc_assignment(group=5, index=2).session]
    assert (boxes.out, boxes.lent, boxes.own_sessions) == (0, 1, [])
    assert set(trajectory.timings) == {"engine_s", "tool_s", "score_s", "total_s"}
    assert recovery(tmp_path).finished[0] == trajectory


async def test_ids_of_a_conversation_equal_one_render_of_it() -> None:
    plan = turns_of("<call>1+1</call>", "let me see<call>2*3</call>", "<answer>6<end>")
    trajectory = await calc_worker(ScriptedEngine(plan), Boxes()).run(calc_assignment())
    messages: list[dict[str, Any]] = [{"role": "user", "content": "47*86="}]
    call = {
        "type": "function",
        "id": "c",
        "function": {"name": "python", "arguments": '{"expression": "1+1"}'},
    }
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    call = {
        "type": "function",
        "id": "c",
        "function": {"name": "python", "arguments": '{"expression": "2*3"}'},
    }
    second = {"role": "assistant", "content": "", "reasoning_content": "let me see", "tool_calls": [call]}
    messages += [second, {"role": "tool", "content": "6"}, {"role": "assistant", "content": "6"}]
    assert flat(trajectory.turns) == CHAT.render_prompt(messages, effort=50)


async def test_ids_that_no_text_gives_are_kept_as_sampled() -> None:
    strange = [60, 61, 4, *ids("<answer>1<end>")]
    worker = calc_worker(ScriptedEngine(lambda _: strange), Boxes(), max_total_tokens=200)
    trajectory = await worker.run(calc_assignment())
    assert trajectory.turns[0].completion_ids == tuple(strange)
    assert CHAT.tokenizer.encode(CHAT.tokenizer.decode(strange)) != strange
    assert trajectory.stop is StopReason.PARSE_ERROR
    assert flat(trajectory.turns[:2])[-len(strange) :] == strange


async def test_a_tool_call_cut_by_the_token_limit_is_never_executed() -> None:
    worker, env, *_ = shop_worker(turns_of("<call>rm -rf /tmp/x</call>"))
    trajectory = await worker.run(calc_assignment(max_tokens=12, environment="shop"))
    assert (trajectory.status, trajectory.stop) == (Status.TRUNCATED, StopReason.MAX_TOKENS)
    assert trajectory.turns[0].finish is FinishReason.LENGTH
    assert trajectory.turns[0].message.tool_calls == ()
    assert env.bought == []
    assert isinstance(trajectory.score, Score)


async def test_a_scaffold_cannot_execute_a_cut_turn() -> None:
    class Careless:
        name = "careless"

        async def run(self, episode: Episode) -> StopReason:
            await episode.sample()
            await episode.execute([ToolCall("buy", {"what": "x"})])
            return StopReason.ANSWER

    worker, env, _, _ = shop_worker(turns_of("<call>abcdefgh</call>"), scaffold=Careless())
    trajectory = await worker.run(calc_assignment(max_tokens=4))
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert env.bought == []


async def test_a_policy_that_never_stops_is_judged_at_max_turns() -> None:
    worker, env, _, _ = shop_worker(turns_of("<call>tea</call>"))
    trajectory = await worker.run(calc_assignment())
    assert (trajectory.status, trajectory.stop) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert len(trajectory.turns) == 3
    assert env.bought == [("tea", 0), ("tea", 1), ("tea", 2)]
    assert trajectory.score == Score(1.0)


async def test_a_scaffold_that_asks_for_more_turns_is_stopped_even_when_it_swallows_errors() -> None:
    class Greedy:
        name = "greedy"

        async def run(self, episode: Episode) -> StopReason:
            for _ in range(10):
                try:
                    await episode.sample()
                except Exception:
                    continue
            return StopReason.ANSWER

    worker, _, _, engine = shop_worker(turns_of("<answer>1<end>"), scaffold=Greedy())
    trajectory = await worker.run(calc_assignment())
    assert trajectory.stop is StopReason.MAX_TURNS
    assert len(engine.requests) == 3


async def test_the_total_of_tokens_ends_a_trajectory_as_truncated() -> None:
    worker, _, _, engine = shop_worker(turns_of("<call>tea</call>"), max_total_tokens=16)
    trajectory = await worker.run(calc_assignment())
    assert (trajectory.status, trajectory.stop) == (Status.TRUNCATED, StopReason.MAX_TOKENS)
    assert all(len(r.token_ids) + r.sampling.max_tokens <= 16 for r in engine.requests)
    assert len(flat(trajectory.turns)) <= 16


async def test_an_unreadable_turn_is_answered_and_the_policy_may_mend_it() -> None:
    plan = turns_of("hm<end>", "<answer>4042<end>")
    trajectory = await calc_worker(ScriptedEngine(plan), Boxes()).run(calc_assignment())
    assert trajectory.turns[0].parse_error
    assert trajectory.turns[0].observations == (Message(Role.TOOL, trajectory.turns[0].parse_error),)
    assert trajectory.stop is StopReason.ANSWER
    assert isinstance(trajectory.score, Score)


async def test_a_calls_own_fault_is_an_observation() -> None:
    plan = turns_of("<call>1/0</call>", "<answer>0<end>")
    trajectory = await calc_worker(ScriptedEngine(plan), Boxes()).run(calc_assignment())
    assert [m.content for m in trajectory.turns[0].observations] == ["err"]
    assert (trajectory.status, trajectory.error) == (Status.FINISHED, None)
    worker, env, _, _ = shop_worker(turns_of("<call>tea</call>", "<answer>1<end>"))
    env.error = ToolError("sold out")
    trajectory = await worker.run(calc_assignment())
    assert trajectory.turns[0].observations[0].content == "sold out"


@pytest.mark.parametrize(
    ("error", "where"), [(SandboxDied("gone"), Boundary.SANDBOX), (KeyError("bug"), Boundary.ENVIRONMENT)]
)
async def test_a_fault_that_is_not_the_policys_gives_no_score(error: Exception, where: Boundary) -> None:
    worker, env, boxes, engine = shop_worker(turns_of("<call>tea</call>"))
    env.error = error
    trajectory = await worker.run(calc_assignment())
    assert (trajectory.status, trajectory.stop) == (Status.FAILED, StopReason.ERROR)
    assert trajectory.error is not None
    assert (trajectory.error.boundary, trajectory.error.type) == (where, type(error).__name__)
    assert isinstance(trajectory.score, Missing)
    assert trajectory.score.boundary is where
    assert len(trajectory.turns) == 1
    assert (boxes.out, env.cleaned, len(engine.released)) == (0, 1, 1)


async def test_a_setup_that_raises_fails_the_sample_before_any_token() -> None:
    worker, env, boxes, engine = shop_worker(turns_of("<call>tea</call>"))
    env.setup_error = FileNotFoundError("no such data set")
    trajectory = await worker.run(calc_assignment())
    assert trajectory.error is not None
    assert (trajectory.error.boundary, trajectory.error.type) == (Boundary.ENVIRONMENT, "FileNotFoundError")
    assert (engine.requests, boxes.out, env.cleaned) == ([], 0, 1)


async def test_a_sandbox_that_cannot_be_had_is_a_fault_of_the_sandbox() -> None:
    worker, _, boxes, _ = shop_worker(turns_of("<call>tea</call>"))
    boxes.fail = SandboxDied("no room on any node")
    trajectory = await worker.run(calc_assignment())
    assert trajectory.error is not None
    assert (trajectory.error.boundary, trajectory.error.message) == (Boundary.SANDBOX, "no room on any node")
    with pytest.raises(RolloutConfigError, match="sandbox=docker or sandbox=bubblewrap"):
        Worker(Shop(), envs.scaffolds.load("tools"), ScriptedEngine(expert), CHAT, None, None, None, config())


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        (ZeroDivisionError("division"), "ZeroDivisionError: division"),
    ],
)
async def test_a_reward_that_fails_is_missing_and_never_zero(value: Any, reason: str) -> None:
    worker, env, _, _ = shop_worker(turns_of("<answer>1<end>"))
    env.value = value
    trajectory = await worker.run(calc_assignment())
    assert isinstance(trajectory.score, Missing)
    assert reason in trajectory.score.reason
    assert trajectory.status is Status.FINISHED


async def test_a_reward_that_never_returns_is_missing_after_its_limit() -> None:
    async def forever(task: Task, trajectory: Trajectory) -> Score:
        await asyncio.sleep(60)
        return Score(0.0)

    engine = ScriptedEngine(turns_of("<answer>1<end>"))
    settings = config(score_deadline_s=0.05)
    worker = Worker(Shop(), envs.scaffolds.load("tools"), engine, CHAT, Boxes(), forever, None, settings)
    trajectory = await worker.run(calc_assignment())
    assert isinstance(trajectory.score, Missing)
    assert "score_deadline_s=0.05" in trajectory.score.reason


async def test_the_deadline_ends_a_stuck_sample_and_says_what_it_waited_for() -> None:
    worker, env, boxes, _ = shop_worker(turns_of("<call>tea</call>"), deadline_s=0.1)
    env.wait_s = 60
    trajectory = await worker.run(calc_assignment())
    assert trajectory.error is not None
    assert trajectory.error.type == "DeadlineExceeded"
    assert trajectory.error.boundary is Boundary.ENVIRONMENT
    assert (boxes.out, env.cleaned) == (0, 1)


async def test_members_of_a_group_draw_from_streams_of_their_own_and_repeat() -> None:
    seeds = []
    for _ in range(2):
        engine = ScriptedEngine(expert)
        worker = calc_worker(engine, Boxes())
        runs = [worker.run(calc_assignment(group=1, index=index)) for index in range(8)]
        found = await asyncio.gather(*runs)
        seeds.append({r.session: r.sampling.seed for r in engine.requests})
        assert len({t.turns[0].logprobs for t in found}) == 8
    assert seeds[0] == seeds[1]


async def test_a_stateful_tool_gets_one_box_a_trajectory() -> None:
    worker, env, boxes, _ = shop_worker(turns_of("<call>tea</call>", "<call>cup</call>", "<answer>2<end>"))
    await worker.run(calc_assignment(index=3))
    assert boxes.own_sessions == [calc_assignment(index=3).session]
    assert boxes.lent == 1
    assert env.bought == [("tea", 0), ("cup", 1)]


async def test_a_cancelled_sample_gives_back_box_and_session() -> None:
    worker, env, boxes, engine = shop_worker(turns_of("<call>tea</call>"))
    env.wait_s = 60
    task = asyncio.create_task(worker.run(calc_assignment()))
    while not boxes.out:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (boxes.out, env.cleaned, len(engine.released)) == (0, 1, 1)


async def test_a_rewritten_history_forks_a_branch() -> None:
    class Summing:
        name = "summing"

        async def run(self, episode: Episode) -> StopReason:
            assert isinstance(episode, EpisodeRun)
            await episode.sample()
            episode.observe(Message(Role.USER, "more"))
            await episode.sample()
            episode.rewrite(Message(Role.USER, "47*86 is 4042"))
            await episode.sample()
            return StopReason.ANSWER

    worker, _, _, engine = shop_worker(turns_of("<answer>1<end>"), scaffold=Summing())
    trajectory = await worker.run(calc_assignment())
    assert [len(branch) for branch in trajectory.branches] == [2, 1]
    fresh = CHAT.render_prompt([{"role": "user", "content": "47*86 is 4042"}], effort=50)
    assert list(trajectory.branches[1][0].prompt_ids) == fresh == list(engine.requests[2].token_ids)
    assert trajectory.turns[0].observations == (Message(Role.USER, "more"),)


async def test_evaluation_is_not_logged(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    engine = ScriptedEngine(expert, log.on_step)
    trajectory = await calc_worker(engine, Boxes(), log).run(calc_assignment(purpose=Purpose.EVAL))
    assert isinstance(trajectory.score, Score)
    assert log.stats()["bytes"] == log.stats()["tokens"] == 0
    log.close()


async def test_text_that_would_be_written_otherwise_is_never_tokenised_again() -> None:
    said = "<call>1<end>"
    trajectory = await calc_worker(engine := ScriptedEngine(turns_of(said, "<answer>2<end>")), Boxes()).run(
        calc_assignment()
    )
    first, second = trajectory.turns
    again = CHAT.render_assistant(to_chat(first.message))
    assert again != ids(said), "this text is written as it was sampled: it shows nothing"
    assert first.completion_ids == tuple(ids(said))
    assert engine.requests[1].token_ids == (*first.prompt_ids, *ids(said), *second.prompt_ids)
