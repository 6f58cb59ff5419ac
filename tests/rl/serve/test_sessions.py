"""Conversations are continued with the ids that were sampled; rewritten ones begin anew."""

import asyncio
import json

import pytest

from envs.types import Score, TrajectoryKey
from model.chat import Prompt
from rl.engines.base import Completion
from rl.serve.conversations import Conversations, Node
from rl.serve.errors import ApiError
from rl.serve.recorded import branches, trajectory
from rl.serve.requests import parse_body, read_request
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice
from rl.trainers.data import trajectory_samples
from tests.rl.rollout.scripted import CHAT, ScriptedEngine, ids

USER = {"role": "user", "content": "47*86="}
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
    },
}


class Caller:
    """A session over an engine that says what it is told to, in order."""

    def __init__(self, *turns: str, context: int = 256) -> None:
        left = [ids(turn) for turn in turns]
        taps = Taps()
        self.engine = ScriptedEngine(lambda request: left.pop(0), taps.on_step)
        self.session = Session(EngineVoice(self.engine, taps, "k", context, images=False), CHAT, effort=75)

    async def ask(self, *messages, show=None, tools=(CALC,), **parameters):
        body = {"model": "m", "messages": list(messages), "tools": list(tools), **parameters}
        return await self.session.answer(read_request(parse_body(json.dumps(body).encode())), show)

    def prompt(self, number: int) -> str:
        return CHAT.tokenizer.decode(self.engine.requests[number].token_ids)


def result(call, content):
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


async def test_a_history_goes_on_with_the_ids_that_were_sampled():
    # Most clients send no reasoning back: rendered from its text, the history would lack it.
    caller = Caller("b<call>47*86</call>", "<answer>4042<end>")
    first = (await caller.ask(USER)).choices[0]
    assert first.finish == "tool_calls"
    call = first.message["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"e": "47*86"}
    without_reasoning = {**first.message, "content": None}
    del without_reasoning["reasoning_content"]
    await caller.ask(USER, without_reasoning, result(call, "4042"))
    one, two = caller.engine.requests
    sampled = list(first.completion.token_ids)
    assert list(two.token_ids) == [*one.token_ids, *sampled, *ids("<obs>4042</obs>")]
    assert two.session == one.session and two.turn > 0


async def test_reasoning_that_is_sent_back_changed_makes_another_history():
    caller = Caller("b<answer>1<end>", "<answer>2<end>", "<answer>3<end>")
    spoken = (await caller.ask(USER)).choices[0].message
    await caller.ask(USER, spoken, {"role": "user", "content": "more"})
    assert caller.engine.requests[1].session == caller.engine.requests[0].session
    changed = {**spoken, "reasoning_content": "c"}
    await caller.ask(USER, changed, {"role": "user", "content": "more"})
    assert caller.engine.requests[2].session != caller.engine.requests[0].session
    assert "c<answer>1" in caller.prompt(2)


@pytest.mark.parametrize(
    "change",
    [
        {"tools": ()},
        {"effort": 50},
        {"first": {"role": "user", "content": "48*86="}},
        {"answer": "4043"},
    ],
)
async def test_a_rewritten_history_is_rendered_anew(change):
    caller = Caller("<answer>4042<end>", "<answer>1<end>")
    spoken = (await caller.ask(USER)).choices[0].message
    if "answer" in change:
        spoken = {**spoken, "content": change.pop("answer")}
    first = change.pop("first", USER)
    await caller.ask(first, spoken, {"role": "user", "content": "sure"}, **change)
    one, two = caller.engine.requests
    assert one.session != two.session
    if not change:
        assert f"{first['content']}<answer>{spoken['content']}<end>sure" in caller.prompt(1)


async def test_two_answers_of_one_prompt_go_on_each_from_its_own_tokens():
    caller = Caller("<answer>1<end>", "<answer>2<end>", "<answer>3<end>", "<answer>4<end>")
    answer = await caller.ask(USER, n=2, seed=4)
    assert [choice.message["content"] for choice in answer.choices] == ["1", "2"]
    seeds = [request.sampling.seed for request in caller.engine.requests]
    assert seeds[0] != seeds[1]
    for choice in answer.choices:
        await caller.ask(USER, choice.message, {"role": "user", "content": "x"})
    sessions = [request.session for request in caller.engine.requests]
    assert sessions[0] != sessions[1] and sessions[2:] == sessions[:2]


async def test_the_same_seed_gives_the_same_draws():
    caller = Caller("<answer>1<end>", "<answer>1<end>", "<answer>1<end>")
    for seed in (7, 7, 8):
        await caller.ask(USER, seed=seed)
    seeds = [request.sampling.seed for request in caller.engine.requests]
    assert seeds[0] == seeds[1] != seeds[2]


async def test_results_of_tools_are_put_in_the_order_of_the_calls():
    caller = Caller("<call>1</call>", "<answer>1<end>")
    call = (await caller.ask(USER)).choices[0].message
    twice = {"id": "second", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    # The recorded turn has one call; a result of an unknown call keeps its place.
    await caller.ask(USER, call, result(call["tool_calls"][0], "4"), result(twice, "5"))
    assert caller.prompt(1).endswith("<obs>4</obs><obs>5</obs>")


async def test_a_turn_that_cannot_be_read_says_so_and_its_ids_stay():
    caller = Caller("<call>1</call>", "<answer>1<end>")
    choice = (await caller.ask(USER, tools=())).choices[0]
    assert choice.finish == "stop"
    assert choice.message["parse_error"] == "there is no tool here"
    assert "tool_calls" not in choice.message
    await caller.ask(USER, choice.message, {"role": "user", "content": "again"}, tools=())
    assert caller.prompt(1).endswith("<call>1</call>again")


async def test_a_turn_that_was_cut_is_not_continued_by_its_ids():
    caller = Caller("<answer>12345<end>", "<answer>1<end>")
    choice = (await caller.ask(USER, max_tokens=3)).choices[0]
    assert (choice.finish, choice.message["content"]) == ("length", "12")
    await caller.ask(USER, choice.message, {"role": "user", "content": "go"})
    assert caller.prompt(1).endswith("<answer>12<end>go")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stop_text_ends_the_turn_and_is_not_shown(streamed):
    caller = Caller("b<answer>12=34" + "5" * 200 + "<end>")
    pieces = []
    show = (lambda index, delta: pieces.append(delta)) if streamed else None
    choice = (await caller.ask(USER, stop=["=3", "zz"], show=show)).choices[0]
    assert (choice.finish, choice.message["content"]) == ("stop", "12")
    assert len(choice.completion.token_ids) < 150, "the engine was told to stop"
    if streamed:
        assert "".join(piece.get("content", "") for piece in pieces) == "12"


async def test_a_stop_text_that_does_not_come_hides_nothing():
    caller = Caller("<answer>12=<end>")
    assert (await caller.ask(USER, stop=["=3"])).choices[0].message["content"] == "12="


async def test_calls_are_shown_when_the_whole_turn_is_known():
    caller = Caller("b<call>1</call>")
    pieces = []
    await caller.ask(USER, show=lambda index, delta: pieces.append(delta))
    assert pieces[0] == {"reasoning_content": "b"}
    assert [call["index"] for call in pieces[-1]["tool_calls"]] == [0]


async def test_a_conversation_beyond_the_context_is_refused_as_openai_does():
    caller = Caller("<answer>1<end>", context=16)
    with pytest.raises(ApiError, match="context is 16") as caught:
        await caller.ask({"role": "user", "content": "1" * 40})
    assert caught.value.code == "context_length_exceeded"
    choice = (await caller.ask({"role": "user", "content": "1" * 8}, max_tokens=500)).choices[0]
    assert choice.message["content"] == "1"
    assert caller.engine.requests[0].sampling.max_tokens == 16 - len(caller.engine.requests[0].token_ids)


async def test_a_caller_who_leaves_ends_the_turn():
    caller = Caller("<answer>1<end>", "<answer>2<end>")
    await caller.engine.pause()
    asking = asyncio.create_task(caller.ask(USER))
    async with asyncio.timeout(10):
        while not caller.engine.requests:  # noqa: ASYNC110  the engine has no event for it
            await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await caller.engine.resume()
    assert (await caller.ask(USER)).choices[0].message["content"] == "2"


def test_memory_is_bounded_and_forgets_what_was_not_used_lately():
    known = Conversations(most_tokens=30)
    spoken = {"role": "assistant", "content": "a"}

    def said(number: int, parent: Node | None = None) -> tuple[Node, tuple[dict, ...]]:
        messages = ({"role": "user", "content": str(number)},)
        node = Node(parent, Prompt([1] * 8, [-1] * 8), Completion((1, 2)), spoken, "b", True, (), ("",))
        known.add(node, messages, [spoken], (), None)
        return node, (*messages, spoken, {"role": "user", "content": "more"})

    histories = [said(number)[1] for number in range(3)]
    assert known.find(histories[0], (), None) is not None
    said(3)
    assert known.find(histories[1], (), None) is None
    assert known.find(histories[0], (), None) is not None
    assert len(known) == 3


async def test_a_session_gives_what_it_recorded_as_branches_with_each_sampled_token_once():
    turns = ("b<call>1</call>", "<answer>1<end>", "<answer>2<end>", "<answer>3<end>")
    caller = Caller(*turns)
    first = (await caller.ask(USER)).choices[0].message
    told = (USER, first, result(first["tool_calls"][0], "1"))
    last = (await caller.ask(*told)).choices[0].message
    await caller.ask(*told, last, {"role": "user", "content": "x"})
    await caller.ask(*told)  # the same place a second time
    recorded = branches(caller.session.conversations)
    assert [len(branch.turns) for branch in recorded] == [3, 1]
    main, fork = recorded
    assert [turn.completion_ids for turn in main.turns] == [tuple(ids(turn)) for turn in turns[:3]]
    assert main.turns[1].prompt_ids == tuple(ids("<obs>1</obs>"))
    assert fork.turns[0].prompt_ids == (
        *main.turns[0].prompt_ids, *main.turns[0].completion_ids, *main.turns[1].prompt_ids
    )  # fmt: skip
    key = TrajectoryKey("t", 75, "external", 0, 0)
    samples = trajectory_samples(trajectory(key, recorded, Score(1.0)), 0.5)
    trained = [sample.token_ids[sample.loss_mask].tolist() for sample in samples]
    assert trained == [[token for turn in turns[:3] for token in ids(turn)], ids(turns[3])]
    assert main.turns[0].message.tool_calls[0].name == "calc"
