"""The endpoint over HTTP: with OpenAI's own client, and with requests that no client would send."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import openai
import pytest
import torch

from model.chat import nano_chat
from model.config import PolicyConfig
from model.policy import Policy
from rl.engines.native import NativeEngine
from rl.serve import endpoint as endpoints
from rl.serve.endpoint import Endpoint, on_loopback
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice
from tests.rl.rollout.scripted import CHAT, ScriptedEngine, ids

USER = {"role": "user", "content": "47*86="}
CALC = {
    "type": "function",
    "function": {
        "name": "calc",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
    },
}


class Served:
    """An endpoint with one key, its URL, and OpenAI's client for it."""

    def __init__(self, url, key, engine, endpoint):
        self.url, self.key, self.engine, self.endpoint = url, key, engine, endpoint
        self.client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)

    def ask(self, **parameters):
        return self.client.chat.completions.create(**{"model": "nano", "messages": [USER], **parameters})

    async def post(self, data, path="/chat/completions", key=None, kind="application/json"):
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": kind}
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(self.url + path, data=data) as response,
        ):
            return response.status, (await response.json())["error"]


@asynccontextmanager
async def served(engine, taps, context=256):
    endpoint = Endpoint("nano", CHAT, engine.stats)
    session = Session(EngineVoice(engine, taps, "k", context, images=False), CHAT, effort=75)
    async with AsyncExitStack() as stack:
        key = stack.enter_context(endpoint.key(session))
        url = await stack.enter_async_context(on_loopback(endpoint))
        held = Served(url, key, engine, endpoint)
        stack.push_async_callback(held.client.close)
        yield held


@asynccontextmanager
async def scripted(*turns):
    left, taps = [ids(turn) for turn in turns], Taps()
    engine = ScriptedEngine(lambda request: left.pop(0), taps.on_step)
    async with served(engine, taps) as held:
        yield held


@pytest.fixture
async def native():
    torch.set_num_threads(1)
    policy = Policy(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    taps = Taps()
    engine = NativeEngine(policy, max_requests=4, max_tokens=256, on_step=taps.on_step)
    async with served(engine, taps) as held:
        yield held
    await engine.close()


async def test_the_models_are_listed():
    async with scripted() as held:
        assert [model.id async for model in held.client.models.list()] == ["nano"]
        assert (await held.client.models.retrieve("nano")).owned_by == "tempering"
        with pytest.raises(openai.NotFoundError, match="take 'nano'"):
            await held.client.models.retrieve("gpt-4")


async def test_openais_client_runs_a_tool_loop():
    async with scripted("b<call>47*86</call>", "<answer>4042<end>") as held:
        first = await held.ask(tools=[CALC])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None and message.tool_calls is not None
        call = message.tool_calls[0]
        assert json.loads(call.function.arguments) == {"e": "47*86"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "4042"}
        second = await held.ask(messages=[USER, message, result], tools=[CALC])
        assert second.choices[0].message.content == "4042"
        one, two = held.engine.requests
        assert list(two.token_ids) == [*one.token_ids, *ids("b<call>47*86</call><obs>4042</obs>")]
        assert second.usage.prompt_tokens == len(two.token_ids)
        assert second.usage.completion_tokens == len(ids("<answer>4042<end>"))


async def test_a_stream_gives_what_the_whole_answer_gives():
    turn = "b<answer>4042<end>"
    async with scripted(turn, turn) as held:
        whole = (await held.ask()).choices[0].message
        options = {"include_usage": True}
        pieces = [piece async for piece in await held.ask(stream=True, stream_options=options)]
        deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
        assert "".join(delta.content or "" for delta in deltas) == whole.content == "4042"
        thought = "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas)
        assert thought == whole.reasoning_content == "b"
        assert deltas[0].role == "assistant"
        assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "stop"
        assert pieces[-1].usage.completion_tokens == len(ids(turn))


async def test_a_streamed_call_can_be_continued():
    async with scripted("<call>1</call>", "<answer>1<end>") as held:
        pieces = [piece async for piece in await held.ask(stream=True, tools=[CALC])]
        calls = [call for piece in pieces for call in piece.choices[0].delta.tool_calls or ()]
        assert pieces[-1].choices[0].finish_reason == "tool_calls"
        spoken = {"role": "assistant", "content": "", "tool_calls": [call.model_dump() for call in calls]}
        for call in spoken["tool_calls"]:
            del call["index"]
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "1"}
        await held.ask(messages=[USER, spoken, result], tools=[CALC])
        assert held.engine.requests[1].session == held.engine.requests[0].session


async def test_the_native_engine_answers_alike_streamed_or_not_and_by_seed(native):
    one = await native.ask(seed=3, max_tokens=20, logprobs=True)
    again = await native.ask(seed=3, max_tokens=20, logprobs=True)
    other = await native.ask(seed=4, max_tokens=20, logprobs=True)
    tokens = [
        [token.token_id for token in answer.choices[0].logprobs.content] for answer in (one, again, other)
    ]
    assert tokens[0] == tokens[1] != tokens[2]
    assert all(token.logprob <= 0 for token in one.choices[0].logprobs.content)
    pieces = [piece async for piece in await native.ask(seed=3, max_tokens=20, logprobs=True, stream=True)]
    streamed = pieces[-1].choices[0].logprobs
    assert [token.token_id for token in streamed.content] == tokens[0]
    several = await native.ask(seed=3, n=3, max_tokens=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.usage.completion_tokens <= 15


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"not json", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b"{}", 400, "missing_required_parameter"),
        ({"model": "gpt-4"}, 404, "model_not_found"),
        ({"nn": 2}, 400, "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "1" * 300}]}, 400, "context_length_exceeded"),
    ],
)
async def test_what_is_wrong_is_said_in_openais_shape(data, status, code):
    if isinstance(data, dict):
        data = json.dumps({"model": "nano", "messages": [USER], **data}).encode()
    async with scripted() as held:
        got, error = await held.post(data)
        assert (got, error["code"]) == (status, code)
        assert error["type"] == "invalid_request_error" and error["message"]


async def test_a_body_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(endpoints, "MAX_BODY", 1000)
    async with scripted() as held:
        status, error = await held.post(b" " * 5000)
        assert (status, error["code"]) == (413, "request_too_large")


async def test_paths_and_methods_that_are_not_there_are_refused_in_openais_shape():
    async with scripted() as held:
        assert (await held.post(b"{}", "/completions"))[0] == 404
        assert (await held.post(b"{}", "/models"))[0] == 405


async def test_nobody_without_a_key_gets_in_and_a_key_ends_with_its_sample():
    async with scripted("<answer>1<end>") as held:
        status, error = await held.post(b"{}", key="sk-wrong")
        assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "authentication_error")
        with held.endpoint.key(Session(EngineVoice(held.engine, Taps(), "t", 99, images=False), CHAT)) as key:
            assert (await held.post(b"{}", key=key))[0] == 400
        status, error = await held.post(b"{}", key=key)
        assert status == 401 and "sample has ended" in error["message"]
        async with aiohttp.ClientSession() as http:
            async with http.get(held.url.replace("/v1", "/metrics")) as response:
                assert response.status == 401
            async with http.get(held.url.replace("/v1", "/health")) as response:
                assert response.status == 200


async def test_a_client_that_hangs_up_frees_its_place(native):
    stream = await native.ask(stream=True, max_tokens=200, seed=1)
    await stream.__anext__()
    await stream.close()
    async with asyncio.timeout(30):
        while native.engine.stats()["running"] or native.endpoint.running:  # noqa: ASYNC110  no event for it
            await asyncio.sleep(0.005)
    assert (await native.ask(max_tokens=3)).choices


async def test_metrics_count_requests_and_tokens():
    async with scripted("<answer>1<end>") as held:
        await held.ask()
        await held.post(b"{}")
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {held.key}"}) as http,
            http.get(held.url.replace("/v1", "/metrics")) as response,
        ):
            text = await response.text()
    assert 'temper_serve_requests_total{status="200"} 1' in text
    assert 'temper_serve_requests_total{status="400"} 1' in text
    assert f'temper_serve_tokens_total{{kind="completion"}} {len(ids("<answer>1<end>"))}' in text
    assert 'temper_serve_engine{name="requests"} 1' in text


async def test_an_engine_that_dies_is_a_server_error():
    class Broken(Policy):
        def extend(self, *arguments, **options):
            raise RuntimeError("device lost")

    policy = Broken(PolicyConfig.preset("nano"))
    policy.reset_parameters(1)
    taps = Taps()
    engine = NativeEngine(policy, max_requests=2, max_tokens=64, on_step=taps.on_step)
    async with served(engine, taps, 64) as held:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                await held.ask(stream=stream)
            assert caught.value.status_code == 503
    await engine.close()


def test_the_chat_format_of_the_scripts_is_that_of_the_presets():
    assert nano_chat().stop_ids == CHAT.stop_ids
