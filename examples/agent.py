"""An agent program of one's own, trained as it is: a tool loop written against OpenAI's client.

    temper train experiment=calc env.name=examples/agent.py scaffold=external

The program knows nothing of training. What it asks the model becomes the turns of a sample, as the tokens
that were sampled; what it returns is judged by the reward.
"""

import ast
import json
import operator
import random

import openai

from envs import Task, env
from envs.agents import result_of
from envs.calc import demonstrations as calculations
from envs.calc import factors

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@env("examples/agent", splits=("train", "eval"))
def products(split, seed):
    pairs = list(factors(split))
    random.Random(f"agent/{split}/{seed}").shuffle(pairs)
    for a, b in pairs:
        yield Task.ask(f"agent/{a}*{b}", f"{a}*{b}=", gold=str(a * b))


@products.agent
async def work(task, access):
    messages = [{"role": "user", "content": task.prompt[0].content}]
    async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(
                model=access.model, messages=messages, tools=[CALCULATOR]
            )
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                value = calculate(json.loads(call.function.arguments)["expression"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    return ""


@products.reward
def right(task, trajectory):
    return float(result_of(trajectory) == task.gold)


@products.demonstrations
def demonstrations(split, seed):
    yield from calculations(split, seed)


def calculate(expression):
    def value(node):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))

    try:
        return str(value(ast.parse(expression, mode="eval").body))[:6]
    except (SyntaxError, KeyError, AttributeError, ValueError, RecursionError):
        return "err"
