"""The built-in environments in the wording of the small presets: short enough, and readable again."""

import itertools
import json

import pytest

import envs
from envs.types import Message, Role
from model.chat import nano_chat

CHAT = nano_chat()


def plain(message: Message) -> dict:
    calls = [
        {"function": {"name": c.name, "arguments": json.dumps(dict(c.arguments))}} for c in message.tool_calls
    ]
    result = {"role": str(message.role), "content": message.content}
    return {**result, "tool_calls": calls} if calls else result


def tools_of(env):
    return [
        {"function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in env.tools
    ]


@pytest.mark.parametrize(("name", "longest"), [("calc", 32), ("recall", 40), ("sort", 32), ("probe", 80)])
def test_an_episode_is_short_and_every_character_is_known(name, longest):
    env = envs.load(name)
    tools, unknown = tools_of(env), CHAT.tokenizer.tag_id("<unk>")
    for task, messages in itertools.islice(env.demonstrations("train", 0), 500):
        ids = CHAT.render_prompt([plain(m) for m in task.prompt], tools=tools, effort=env.efforts[-1])
        for message in messages:
            if message.role == Role.TOOL:
                ids += CHAT.render_observation([plain(message)])
                continue
            turn = CHAT.render_assistant(plain(message), tools=tools)
            parsed = CHAT.parse(turn, tools=tools)
            assert not parsed.parse_error and parsed.message["content"] == message.content
            calls = [json.loads(c["function"]["arguments"]) for c in parsed.message.get("tool_calls", ())]
            assert calls == [dict(c.arguments) for c in message.tool_calls]
            ids += turn
        assert len(ids) <= longest and unknown not in ids


async def test_every_error_the_tools_give_is_readable_by_the_small_presets(box):
    from envs.types import ToolCall

    env = envs.load("calc")
    task = next(env.tasks("train", 0))
    with pytest.raises(envs.ToolError) as caught:
        await env.call_tool(ToolCall("python", {"expression": "(("}), task, box)
    assert CHAT.tokenizer.decode(CHAT.tokenizer.encode(str(caught.value))) == "err"
