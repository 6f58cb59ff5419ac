"""What the endpoint understands, and that it refuses everything else in words."""

import json

import pytest

from rl.serve.errors import ApiError
from rl.serve.requests import parse_body, read_request

HELLO = [{"role": "user", "content": "1+1="}]
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": "{}"}}


def with_parameters(schema):
    return {"type": "function", "function": {"name": "calc", "parameters": schema}}


def read(**parameters):
    return read_request(parse_body(json.dumps({"model": "m", "messages": HELLO, **parameters}).encode()))


def test_what_is_left_out_has_the_defaults_of_openai():
    asked = read()
    assert (asked.n, asked.temperature, asked.top_p, asked.max_tokens, asked.seed) == (
        1,
        1.0,
        1.0,
        None,
        None,
    )
    assert not asked.stream and not asked.logprobs and asked.effort is None


@pytest.mark.parametrize(("name", "effort"), [("low", 50), ("medium", 75), ("high", 75), ("max", 100)])
def test_the_names_of_efforts_are_numbers(name, effort):
    assert read(reasoning_effort=name).effort == effort
    assert read(effort=effort).effort == effort


def test_nulls_and_neutral_values_say_nothing():
    neutral = {"frequency_penalty": 0, "logit_bias": {}, "store": False, "response_format": {"type": "text"}}
    assert read(temperature=None, stop=None, user="me", metadata={"a": "b"}, **neutral) == read()


def test_a_message_echoed_by_the_client_is_understood():
    echo = {
        "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": [CALL],
    }  # fmt: skip
    tool = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "2"}]}
    messages = read(messages=[{"role": "developer", "content": "x"}, *HELLO, echo, tool]).messages
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[3]["content"] == "2"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "calc"}}])
def test_a_call_that_would_have_to_be_forced_is_refused(choice):
    assert read(tools=[TOOL], tool_choice="none").tools == ()
    with pytest.raises(ApiError, match="not made to call") as caught:
        read(tools=[TOOL], tool_choice=choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("parameters", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "leave it out, or give 0"),
        ({"top_logprobs": 3}, "top_logprobs", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "give true"),
        ({"n": 0}, "n", "integer from 1"),
        ({"n": True}, "n", "integer from 1"),
        ({"temperature": -1}, "temperature", "number from 0"),
        ({"temperature": "hot"}, "temperature", "number from 0"),
        ({"top_p": 0}, "top_p", "number from"),
        ({"seed": 1.5}, "seed", "integer"),
        ({"max_tokens": 0}, "max_tokens", "integer from 1"),
        ({"max_tokens": 4, "max_completion_tokens": 4}, "max_tokens", "give one"),
        ({"effort": 0}, "effort", "from 1 to 100"),
        ({"effort": 50, "reasoning_effort": "low"}, "effort", "give one"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort", "low, medium, high"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "2"}]}, "messages", "not continued"),
        ({"messages": "hello"}, "messages", "a list"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role", "is one of"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a text or a list"),
        ({"messages": [{"role": "user", "content": "", "name": "bob"}]}, "messages[0].name", "not supported"),
        ({"messages": [{"role": "tool", "content": "2"}]}, "messages[0].tool_call_id", "a text"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "function"),
        ({"tools": [TOOL, TOOL]}, "tools[1]", "another tool"),
        ({"tools": [with_parameters({"properties": ["x"]})]}, "tools[0]", "JSON schema"),
        ({"tools": [with_parameters({"required": 3})]}, "tools[0]", "JSON schema"),
    ],
)
def test_what_would_change_the_meaning_is_refused_with_its_place(parameters, param, says):
    with pytest.raises(ApiError) as caught:
        read(**parameters)
    assert caught.value.param == param
    assert says in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize("url", ["https://example.com/cat.png", "file:///etc/passwd", 7])
def test_images_are_never_fetched(url):
    part = {"type": "image_url", "image_url": {"url": url}}
    with pytest.raises(ApiError, match="nothing is fetched"):
        read(messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"\xff", b'{"model": NaN', b"[" * 100_000, b'{"a": "\\ud800"}']
)
def test_a_body_that_is_no_object_is_refused(data):
    with pytest.raises(ApiError) as caught:
        parse_body(data)
    assert caught.value.code == "invalid_json"


def test_characters_spelt_as_two_escapes_are_read():
    assert parse_body(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}
