"""An agent program in a run: what it asks becomes trainable turns, whatever client it uses."""

import asyncio
import base64
import io
import json
import os
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

import envs.registry
import envs.scaffolds
from envs.agents import ProcessAgent, result_of
from envs.check import check_environment
from envs.types import Boundary, FinishReason, Missing, Score, Status, StopReason, Task
from model.config import PolicyConfig, VisionConfig
from model.images import ImageReader
from rl.rollout.assignment import request_seed
from rl.rollout.config import RolloutConfig, RolloutConfigError
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from rl.serve.agents import AgentDoor
from rl.serve.taps import Taps
from rl.trainers.data import trajectory_samples
from tests.rl.rollout.scripted import CHAT, Boxes, ScriptedEngine, ids
from tests.rl.serve.agent_samples import assignment, environment

CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
    },
}


@asynccontextmanager
async def worker(agent: Any, *turns: str, log: TokenLog | None = None, **settings: Any):
    """A worker whose policy says these turns, in order."""
    left = [ids(turn) for turn in turns]
    taps = Taps(log.on_step if log else None)
    engine = ScriptedEngine(lambda request: left.pop(0), taps.on_step)
    max_turns, boxes = settings.pop("max_turns", None), settings.pop("boxes", None)
    reader = settings.pop("reader", None)
    config = RolloutConfig(**{"deadline_s": 60.0, "max_total_tokens": 128, **settings})
    async with AsyncExitStack() as stack:
        door = AgentDoor(engine, taps, CHAT, config.max_total_tokens, stack, reader)
        scaffold = envs.scaffolds.load("external")
        env = agent if hasattr(agent, "tasks") else environment(agent)
        yield Worker(env, scaffold, engine, CHAT, boxes, None, log, config, max_turns=max_turns, door=door)


def client(access: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0)


async def calculator(task: Task, access: Any) -> str:
    """A tool loop as anybody would write it."""
    messages: list[Any] = [{"role": "user", "content": task.prompt[0].content}]
    async with client(access) as model:
        while True:
            answer = await model.chat.completions.create(
                model=access.model, messages=messages, tools=[CALC], temperature=0.3
            )
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content
            for call in message.tool_calls:
                value = eval(json.loads(call.function.arguments)["e"], {})
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(value)})


async def test_a_tool_loop_of_somebody_elses_is_one_branch_and_trains_what_was_sampled():
    async with worker(calculator, "b<call>47*86</call>", "<answer>4042<end>") as held:
        trajectory = await held.run(assignment())
    assert (trajectory.status, trajectory.stop) == (Status.FINISHED, StopReason.ANSWER)
    assert trajectory.score == Score(1.0, {"right": 1.0})
    (branch,) = trajectory.branches
    assert branch[0].prompt_ids == tuple(
        CHAT.render_prompt([{"role": "user", "content": "47*86="}], effort=60)
    )
    assert branch[0].completion_ids == tuple(ids("b<call>47*86</call>"))
    assert branch[1].prompt_ids == tuple(ids("<obs>4042</obs>"))
    assert result_of(trajectory) == "4042"
    # Sampling is the run's, whatever the program asked for.
    assert {request.sampling.temperature for request in held._engine.requests} == {1.0}
    seeds = [request.sampling.seed for request in held._engine.requests]
    assert seeds == [request_seed(11, 3, 0, turn) for turn in (0, 1)]


async def test_a_rewritten_history_forks_a_branch_and_an_old_one_goes_on_by_its_own_ids():
    async def agent(task: Task, access: Any) -> str:
        async with client(access) as model:

            async def ask(*messages: Any) -> Any:
                answer = await model.chat.completions.create(model=access.model, messages=list(messages))
                return answer.choices[0].message

            start = {"role": "user", "content": "1"}
            more = {"role": "user", "content": "2"}
            first = await ask(start)
            await ask({"role": "user", "content": "so far: 1"})  # a summary: another history
            await ask(start, first, more)  # back to the first one
            last = await ask(start, first, more, {"role": "assistant", "content": "x"}, more)
            return last.content

    turns = ("b<answer>5<end>", "<answer>6<end>", "<answer>7<end>", "<answer>4042<end>")
    async with worker(agent, *turns) as held:
        trajectory = await held.run(assignment())
    assert isinstance(trajectory.score, Score) and trajectory.score.value == 1.0
    assert [len(branch) for branch in trajectory.branches] == [1, 1, 1, 1]
    first, _, third, fourth = (branch[0] for branch in trajectory.branches)
    assert third.prompt_ids == (*first.prompt_ids, *first.completion_ids, *ids("2"))
    assert fourth.prompt_ids[-len(ids("<answer>x<end>2")) :] == tuple(ids("<answer>x<end>2"))
    sampled = [turn.completion_ids for turn in trajectory.turns]
    assert sampled == [tuple(ids(turn)) for turn in turns], "each sampled token stands once"


async def test_limits_end_the_sample_and_not_the_run():
    async with worker(calculator, *["<call>1</call>"] * 9, max_turns=3) as held:
        trajectory = await held.run(assignment())
    assert (trajectory.status, trajectory.stop) == (Status.TRUNCATED, StopReason.MAX_TURNS)
    assert len(trajectory.turns) == 3
    assert trajectory.score == Score(0.0, {"right": 0.0})
    turns = ["<call>" + "1" * 25 + "</call>"] * 9
    async with worker(calculator, *turns, max_total_tokens=64) as held:
        trajectory = await held.run(assignment())
    assert trajectory.stop is StopReason.MAX_TOKENS
    assert sum(len(turn.prompt_ids) + len(turn.completion_ids) for turn in trajectory.turns) <= 64


async def test_a_program_that_fails_or_never_asks_gives_no_verdict():
    async def broken(task: Task, access: Any) -> str:
        async with client(access) as model:
            await model.chat.completions.create(
                model=access.model, messages=[{"role": "user", "content": "1"}]
            )
        raise KeyError("lost")

    async def silent(task: Task, access: Any) -> str:
        return "4042"

    for agent, says in ((broken, "lost"), (silent, "without asking the model")):
        async with worker(agent, "<answer>1<end>") as held:
            trajectory = await held.run(assignment())
        assert trajectory.status is Status.FAILED
        assert trajectory.error is not None and says in trajectory.error.message
        assert trajectory.error.boundary is Boundary.SCAFFOLD
        assert isinstance(trajectory.score, Missing)


async def test_an_engine_at_fault_is_not_the_programs_fault():
    async with worker(calculator) as held:

        async def generate(request: Any) -> Any:
            raise RuntimeError("device lost")

        held._engine.generate = generate
        trajectory = await held.run(assignment())
    assert trajectory.error is not None and trajectory.error.boundary is Boundary.ENGINE


async def test_a_key_serves_its_sample_alone_and_ends_with_it():
    keys: list[Any] = []

    async def agent(task: Task, access: Any) -> str:
        keys.append(access)
        return await calculator(task, access)

    turns = ("<answer>4042<end>", "<answer>4042<end>")
    async with worker(agent, *turns) as held:
        done = await asyncio.gather(held.run(assignment(0)), held.run(assignment(1)))
        assert [len(trajectory.turns) for trajectory in done] == [1, 1]
        assert keys[0].api_key != keys[1].api_key and keys[0].base_url == keys[1].base_url
        async with client(keys[0]) as late:
            with pytest.raises(openai.AuthenticationError, match="sample has ended"):
                await late.models.list()


async def test_a_request_that_is_given_up_leaves_no_turn():
    async def hasty(task: Task, access: Any) -> str:
        message = {"role": "user", "content": "1"}
        async with client(access) as model:
            stream = await model.chat.completions.create(model=access.model, messages=[message], stream=True)
            async for piece in stream:
                if piece.choices[0].delta.content:
                    break
            await stream.close()
            answer = await model.chat.completions.create(model=access.model, messages=[message])
            return answer.choices[0].message.content

    async with worker(
        hasty, "<answer>" + "5" * 100 + "<end>", "<answer>4042<end>", max_total_tokens=256
    ) as held:
        held._engine._step_s = 0.005
        trajectory = await held.run(assignment())
    assert [turn.completion_ids for turn in trajectory.turns] == [tuple(ids("<answer>4042<end>"))]
    assert len(trajectory.branches) == 1


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": task["messages"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
answer = json.load(urllib.request.urlopen(request))
print(answer["choices"][0]["message"]["content"])
print(os.environ.get("SECRET", "none"), file=sys.stderr)
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize("code", [0, 3])
async def test_a_program_of_its_own_process(code, monkeypatch):
    monkeypatch.setenv("SECRET", "of the run")
    agent = ProcessAgent([sys.executable, "-c", PROGRAM], env={"CODE": str(code)})
    async with worker(agent, "<answer>4042<end>") as held:
        trajectory = await held.run(assignment())
    if code == 0:
        assert trajectory.score == Score(1.0, {"right": 1.0})
    else:
        assert trajectory.error is not None and "exit code 3: none" in trajectory.error.message


async def test_a_process_ends_with_its_sample(tmp_path):
    pid = tmp_path / "pid"
    source = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    agent = ProcessAgent([sys.executable, "-c", source])
    async with worker(agent, deadline_s=600.0) as held:
        running = asyncio.create_task(held.run(assignment()))
        async with asyncio.timeout(60):
            while not (pid.exists() and pid.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


async def test_an_interrupted_sample_goes_on_with_the_turns_of_its_log(tmp_path):
    log = TokenLog(tmp_path, flush_ms=0)
    turns = ("b<call>47*86</call>", "<answer>4042<end>")
    async with worker(calculator, *turns, log=log) as held:
        held._engine._step_s = 0.002
        running = asyncio.create_task(held.run(assignment()))
        async with asyncio.timeout(60):
            while len(held._engine.requests) < 2 or log.stats()["tokens"] < len(ids(turns[0])) + 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await held._engine.pause()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    log.close()

    again = TokenLog(tmp_path, flush_ms=0)
    (logged,) = again.recovery.unfinished.values()
    assert [turn.finish for turn in logged.turns] == [FinishReason.STOP, None]
    begun = len(logged.turns[1].tokens)
    async with worker(calculator, turns[1], log=again) as held:
        trajectory = await held.run(assignment(), logged)
    again.close()
    assert trajectory.score == Score(1.0, {"right": 1.0})
    assert [turn.completion_ids for turn in trajectory.turns] == [tuple(ids(turn)) for turn in turns]
    (request,) = held._engine.requests
    assert len(request.completed.token_ids) == begun


async def test_a_program_that_takes_another_way_after_an_interruption_is_served_anew(tmp_path):
    log = TokenLog(tmp_path, flush_ms=0)
    async with worker(calculator, "<call>1</call>", "<answer>1<end>", log=log) as held:
        running = asyncio.create_task(held.run(assignment()))
        async with asyncio.timeout(60):
            while len(held._engine.requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await held._engine.pause()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    log.close()

    async def other(task: Task, access: Any) -> str:
        async with client(access) as model:
            message = {"role": "user", "content": "another question"}
            answer = await model.chat.completions.create(model=access.model, messages=[message])
            return answer.choices[0].message.content

    again = TokenLog(tmp_path, flush_ms=0)
    (logged,) = again.recovery.unfinished.values()
    async with worker(other, "<answer>4042<end>", log=again) as held:
        trajectory = await held.run(assignment(), logged)
    again.close()
    assert isinstance(trajectory.score, Score) and trajectory.score.value == 1.0
    assert len(trajectory.turns) == 1


async def test_the_example_is_sound_and_its_agent_is_trained_as_it_is():
    env = envs.registry.load(str(Path(__file__).parents[3] / "examples/agent.py"))
    report = await check_environment(env, 5)
    assert report.passed, str(report)
    task = next(env.tasks("train", 0))
    question, gold = task.prompt[0].content.removesuffix("="), task.gold
    for said, value in ((gold, 1.0), ("1", 0.0)):
        async with worker(env, f"<call>{question}</call>", f"<answer>{said}<end>") as held:
            trajectory = await held.run(replace(assignment(), task=task))
        assert trajectory.score == Score(value, {"right": value})
        assert trajectory.turns[1].prompt_ids == tuple(ids(f"<obs>{gold}</obs>"))


def test_an_environment_without_a_program_is_refused_at_the_start():
    engine = ScriptedEngine(lambda request: [])
    calc = envs.registry.load("sort")
    with pytest.raises(RolloutConfigError, match=r"@NAME\.agent"):
        Worker(calc, envs.scaffolds.load("external"), engine, CHAT, None, None, None, RolloutConfig())


def test_a_function_that_is_not_async_is_refused():
    with pytest.raises(TypeError, match="async function"):
        environment(lambda task, access: "4042")


async def test_a_program_may_have_the_sandbox_of_its_trajectory():
    async def agent(task: Task, access: Any, sandbox: Any) -> str:
        async with client(access) as model:
            message = {"role": "user", "content": task.prompt[0].content}
            answer = await model.chat.completions.create(model=access.model, messages=[message])
        done = await sandbox.python(f"print({answer.choices[0].message.content})")
        return done.stdout.decode().strip()

    env, boxes = environment(agent), Boxes()
    assert env.sandbox is not None
    async with worker(env, "<answer>47*86<end>", boxes=boxes) as held:
        trajectory = await held.run(assignment())
    assert trajectory.score == Score(1.0, {"right": 1.0})
    assert (boxes.lent, boxes.out) == (1, 0)


async def test_an_agent_shows_images_and_its_turns_keep_them_for_training():
    png = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(png, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"

    async def agent(task: Task, access: Any) -> str:
        shown: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "1"}]
        async with client(access) as model:
            messages: list[Any] = [{"role": "user", "content": shown}]
            for _ in range(2):
                answer = await model.chat.completions.create(model=access.model, messages=messages)
                messages += [answer.choices[0].message, {"role": "user", "content": "2"}]
        return answer.choices[0].message.content

    vision = VisionConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, patch_size=4,
        rope_theta=10000.0, downsample_ratio=1, max_image_tokens=64, min_pixels=16, max_wh_ratio=None,
    )  # fmt: skip
    nano = PolicyConfig.preset("nano")
    token_map = (*range(64), 0)
    config = replace(nano, vocab_size=65, engram_token_map=token_map, image_token_id=64, vision=vision)
    reader = ImageReader.of(config)
    async with worker(agent, "b<answer>5<end>", "<answer>4042<end>", reader=reader) as held:
        trajectory = await held.run(assignment())
        requests = held._engine.requests
    (branch,) = trajectory.branches
    assert branch[0].images is not None and branch[1].images is None
    assert len(branch[0].images.patches) == 1
    for request in requests:
        assert request.images is not None and len(request.images.images) == 1
        assert len(request.images.types) == len(request.token_ids)
    (sample,) = trajectory_samples(trajectory, 1.0)
    assert sample.images is not None and list(sample.images.types[: len(requests[1].images.types)]) == list(
        requests[1].images.types
    )
