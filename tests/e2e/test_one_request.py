"""One request on its whole way: from an image and a history of tools to tokens that are trained on.

A policy of nano size learns one lesson by heart. Its conversation was begun on one machine; another one,
which has the same disk and nothing of the first one's memory, goes on with it, and an agent written against
OpenAI's client runs the tool in a sandbox. Each test below is one step of that way.
"""

import asyncio
import base64
import io
import json
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

import envs.registry
import rewards
from envs.types import Score, Task, ToolCall, Trajectory, TrajectoryKey
from model.batch import PackedTokens, Trace, floors_from_starts
from model.cache.records import MAIN
from model.chat import Prompt, nano_chat
from model.config import PolicyConfig, VisionConfig
from model.engine.columns import ContextState
from model.engine.speculative import Speculation
from model.images import ImageReader
from model.policy import Policy
from model.quant import e2m1
from model.vision import ImageTokens, TokenType
from rl.engines.native import NativeEngine
from rl.engines.prefixes import PrefixSizes, open_prefixes
from rl.rollout.messages import tool_to_chat
from rl.serve.endpoint import Endpoint, on_loopback
from rl.serve.recorded import Branch, branches, trajectory
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice
from rl.trainers.data import Sample, trajectory_samples
from rl.trainers.draft import DraftConfig, DraftTrainer
from rl.trainers.forward import encoded_images
from rl.trainers.optim import Optimizer, OptimizerConfig
from rl.trainers.packing import micro_batches
from sandbox.client import Fleet

CHAT = nano_chat()
CALC = envs.registry.load("calc")
TOOLS = [tool_to_chat(tool) for tool in CALC.tools]
VISION = VisionConfig(
    num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32, patch_size=4,
    rope_theta=10000.0, downsample_ratio=3, max_image_tokens=64, min_pixels=16, max_wh_ratio=None,
)  # fmt: skip
CONFIG = replace(
    PolicyConfig.preset("nano_draft"),
    vocab_size=65,
    engram_token_map=(*range(64), 0),
    image_token_id=64,
    vision=VISION,
)
READER = ImageReader.of(CONFIG)
TASK = Task.ask("calc/12*34", "12*34=", gold="408")
STEPS = 30
TEMPERATURE, HOT = 0.5, 6.0
TURNS = ("<call>12*34</call>", "<answer>408<end>")


def picture() -> str:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 36, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def call(number: int, expression: str) -> dict[str, Any]:
    function = {"name": "python", "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": None, "tool_calls": [
        {"id": f"old_{number}", "type": "function", "function": function}
    ]}  # fmt: skip


def history() -> list[dict[str, Any]]:
    """A system message, an image with a question about it, and two questions answered by the tool."""
    image = {"type": "image_url", "image_url": {"url": picture()}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "you see a picture. " * 4},
        {"role": "user", "content": [image, {"type": "text", "text": "47*86="}]},
    ]
    for number, (expression, value) in enumerate([("47*86", "4042"), ("47*87", "4089")]):
        result = {"role": "tool", "tool_call_id": f"old_{number}", "content": value}
        messages += [call(number, expression), result, {"role": "assistant", "content": value}]
        messages.append({"role": "user", "content": "and 47*87=" if number == 0 else "thanks. now "})
    messages[-1] = {"role": "user", "content": f"thanks. now {TASK.prompt[0].content}"}
    return messages


class Watched(Policy):
    """Keeps what each pass of the engine computed inside."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.passes: list[tuple[int, dict[str, torch.Tensor]]] | None = None

    def extend(self, cache: Any, slots: Any, token_ids: Any, lengths: Any, **options: Any) -> Any:
        if self.passes is None:
            return super().extend(cache, slots, token_ids, lengths, **options)
        trace = Trace()
        result = super().extend(cache, slots, token_ids, lengths, **{**options, "trace": trace})
        self.passes.append((int(lengths.sum()), trace.values))
        return result


def lesson(policy: Policy) -> tuple[PackedTokens, torch.Tensor, Prompt]:
    """The whole conversation as tokens, which of them are learned, and what comes before these."""
    prompt = CHAT.prompt(history(), tools=TOOLS, effort=75, images=READER)
    ids, types, mask = list(prompt.token_ids), list(prompt.types), [False] * len(prompt.token_ids)
    for text, learned in ((TURNS[0], True), ("<obs>408</obs>", False), (TURNS[1], True)):
        new = CHAT.tokenizer.encode_tagged(text)
        ids, types, mask = ids + new, types + [int(TokenType.TEXT)] * len(new), mask + [learned] * len(new)
    return packed(policy, Prompt(ids, types, prompt.images)), torch.tensor(mask), prompt


def packed(policy: Policy, prompt: Prompt, floors: torch.Tensor | None = None) -> PackedTokens:
    ids = torch.tensor(prompt.token_ids)
    rows = [policy.encode_image(image.patches, image.grid) for image in prompt.images]
    images = ImageTokens(torch.tensor(prompt.types), torch.cat(rows)) if rows else None
    return PackedTokens(ids, torch.tensor([0, len(ids)]), images, window_floors=floors)


def logprobs(policy: Policy, tokens: PackedTokens, temperature: float = 1.0) -> torch.Tensor:
    """[T] of each token after those before it; 0 for the first."""
    logits = policy.logits(policy(tokens).hidden[:-1]) / temperature
    found = logits.log_softmax(-1).gather(-1, tokens.token_ids[1:, None])
    return torch.cat([torch.zeros(1), found[:, 0]])


def learn(policy: Policy) -> None:
    """Teaches the lesson, and the drafter what the policy then says."""
    rates = OptimizerConfig(learning_rate=3e-3, muon_learning_rate=0.02, warmup_steps=5)
    optimizer = Optimizer(policy, rates)
    for step in range(STEPS):
        tokens, mask, _ = lesson(policy)
        (-logprobs(policy, tokens)[mask].mean()).backward()
        optimizer.clip()
        optimizer.step(rates.fraction(step, STEPS))
    with torch.no_grad():
        tokens, mask, _ = lesson(policy)
        known = policy(tokens, features=True)
    assert known.features is not None
    nothing = np.zeros(len(mask), np.float32)
    sample = Sample(
        token_ids=tokens.token_ids.numpy().astype(np.int32), loss_mask=mask.numpy(), logprobs=nothing,
        advantages=nothing, policy_version=nothing.astype(np.int32), id="lesson", response="lesson",
        group=0, effort=75,
    )  # fmt: skip
    (batch,) = micro_batches([sample], 8192, policy.device)
    drafter = DraftTrainer(policy, DraftConfig(anchors=32), total_steps=STEPS)
    for _ in range(STEPS):
        drafter.accumulate(batch, known.hidden, known.features, 1.0)
        drafter.update()


@dataclass
class Walk:
    """What was seen on the way."""

    policy: Watched
    stats: dict[str, float] = field(default_factory=dict)
    first_turn: dict[str, float] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    key_bytes: dict[int, float] = field(default_factory=dict)
    branch: Branch | None = None
    hot: Branch | None = None
    states: tuple[int, ...] = ()
    result: str = ""
    box: str = ""
    trajectory: Trajectory | None = None
    score: Any = None

    @property
    def prompt(self) -> tuple[int, ...]:
        assert self.branch is not None
        return self.branch.turns[0].prompt_ids


class Machine:
    """A server of the policy; `disk` is all that machines share."""

    def __init__(self, policy: Watched, disk: Path, stack: AsyncExitStack, **options: Any) -> None:
        sizes = PrefixSizes(memory_mb=8, disk_mb=64, disk_folder=str(disk))
        store = stack.enter_context(
            open_prefixes("disk", sizes, policy, CHAT, replay="bounded", folder=disk, model="lesson")
        )
        taps = Taps()
        self.engine = NativeEngine(
            policy, max_requests=2, max_tokens=512, on_step=taps.on_step, storage="packed", replay="bounded",
            prefix_store=store, **options,
        )  # fmt: skip
        self.session = Session(EngineVoice(self.engine, taps, "walk", 512, images=True), CHAT, READER)
        self.endpoint = Endpoint("lesson", CHAT, self.engine.stats)
        stack.push_async_callback(self.engine.close)
        self._stack = stack

    async def client(self) -> Any:
        key = self._stack.enter_context(self.endpoint.key(self.session))
        url = await self._stack.enter_async_context(on_loopback(self.endpoint))
        model = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=300.0)
        self._stack.push_async_callback(model.close)
        return model.chat.completions


async def begin(policy: Watched, disk: Path) -> None:
    """The conversation as far as it came on the first machine, which then goes with its memory."""
    other = [*history()[:-1], {"role": "user", "content": "thanks. now 56*78="}]
    async with AsyncExitStack() as stack:
        chat = await Machine(policy, disk, stack).client()
        await chat.create(model="lesson", messages=other, tools=TOOLS, reasoning_effort="high", max_tokens=2)


async def go_on(walk: Walk, disk: Path, state: Path) -> None:
    """An agent on another machine: asks, runs the tool in a sandbox, asks again."""
    async with AsyncExitStack() as stack:
        machine = Machine(
            walk.policy, disk, stack, capture=True, speculate=Speculation(rule="coupled", length=3)
        )
        chat = await machine.client()
        fleet = await Fleet.connect("local", state_dir=state, owner="walk", backend="bubblewrap")
        stack.push_async_callback(fleet.close)
        ask = partial(chat.create, model="lesson", tools=TOOLS, reasoning_effort="high")
        messages = history()
        walk.policy.passes = []
        for _ in range(2):
            answer = await ask(messages=messages, temperature=TEMPERATURE, seed=1)
            message = answer.choices[0].message
            walk.first_turn = walk.first_turn or machine.engine.stats()
            messages.append(message)
            for asked in message.tool_calls or ():
                assert CALC.sandbox is not None
                box = await fleet.create(CALC.sandbox)
                made = ToolCall(asked.function.name, json.loads(asked.function.arguments), number=0)
                walk.box, walk.result = box.id, await CALC.call_tool(made, TASK, box)
                await box.close()
                messages.append({"role": "tool", "tool_call_id": asked.id, "content": walk.result})
        walk.stats = machine.engine.stats()
        await ask(messages=history(), temperature=HOT, seed=2, max_tokens=24)  # what it has not by heart
        look_at_keys(walk, machine)
        walk.branch, walk.hot = branches(machine.session.conversations)
        walk.states = tuple(s for node in machine.session.conversations for s in node.completion.states)


def look_at_keys(walk: Walk, machine: Machine) -> None:
    """Reads the main keys as attention reads them."""
    cache = machine.engine._engine._cache
    slot = next(slot for slot in range(cache.max_sequences) if cache._progress[slot] is not None)
    for layer, ratio in cache.ratios.items():
        count = cache.length(slot) // ratio
        walk.keys[layer] = cache.main[layer].gather(torch.tensor([slot]), count).dense()[0]
        pages = cache.main[layer].read_slot(slot, count)
        assert pages.dtype is torch.uint8
        walk.key_bytes[layer] = pages.shape[1] / (cache.pages.page_tokens // ratio)


async def judge(walk: Walk) -> None:
    """The verdict on what was answered, and with it a finished trajectory."""
    assert walk.branch is not None
    key = TrajectoryKey(TASK.id, 75, "external", 0, 0)
    unjudged = trajectory(key, [walk.branch], Score(0.0))
    walk.score = await rewards.load("exact")(TASK, unjudged)
    walk.trajectory = trajectory(key, [walk.branch], walk.score)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    if shutil.which("bwrap") is None:
        pytest.fail("the walk needs bubblewrap: install it")
    torch.set_num_threads(1)
    policy = Watched(CONFIG)
    policy.reset_parameters(3)
    policy.fake_quant = True
    learn(policy)
    folder = tmp_path_factory.mktemp("walk")
    result = Walk(policy)

    async def way() -> None:
        await begin(policy, folder / "disk")
        await go_on(result, folder / "disk", folder / "fleet")
        await judge(result)

    asyncio.run(way())
    return result


pytestmark = pytest.mark.slow


def passes_of(walk: Walk, name: str) -> list[set[int]]:
    """For each pass the layers that computed something of this name."""
    assert walk.policy.passes
    return [
        {int(key.split(".")[1]) for key in values if key.startswith("layers.") and key.endswith(f".{name}")}
        for _, values in walk.policy.passes
    ]


def test_1_a_request_comes_with_an_image_and_a_history_of_tools(walk: Walk):
    text = CHAT.tokenizer.decode([token for token in walk.prompt if token != READER.token_id])
    assert text.count("<call>") == 2 and "<obs>4042</obs>" in text and text.endswith("12*34=")
    assert walk.branch is not None
    (image,) = walk.branch.history.images
    span = [token for token in walk.prompt if token == READER.token_id]
    assert len(span) == len(image.types(VISION)) == 10


def test_2_the_effort_is_75(walk: Walk):
    assert CHAT.tokenizer.decode(walk.prompt).startswith("<effort>75")


def test_3_the_beginning_is_found_on_disk_and_its_windows_are_lost(walk: Walk):
    assert walk.first_turn["prefix_global_hits"] == 1 and walk.first_turn["prefix_window_hits"] == 0
    assert walk.first_turn["prefix_disk_pages"] > 0
    assert walk.first_turn["prefix_hit_tokens"] >= 64


def test_4_the_lost_windows_are_filled_by_a_bounded_replay(walk: Walk):
    known = int(walk.first_turn["prefix_hit_tokens"])
    computed = len(walk.prompt) - known + CONFIG.sliding_window
    assert walk.first_turn["prefilled_tokens"] == computed < len(walk.prompt)
    assert set(walk.states) == {ContextState.REPLAYED}


def test_5_full_layers_compress_reindex_layers_select_anew_and_reuse_layers_take_over(walk: Walk):
    full, reindex, reuse = {1, 3}, {4}, {2, 5}
    assert full == set(CONFIG.kv_source_layer_ids)
    for compressed, selected, attended in zip(
        *(passes_of(walk, name) for name in ("main_kv", "index_topk", "attn_out")), strict=True
    ):
        assert compressed == full and selected == full | reindex
        assert reuse | {0} == attended - selected
    assert walk.policy.passes is not None
    for _, values in walk.policy.passes:
        chosen, allowed = values["layers.4.index_topk"], values["layers.4.candidate_mask"]
        rows = chosen.flatten(0, -2), allowed.flatten(0, -2)
        for index, mask in zip(*rows, strict=True):
            assert bool(mask[index[index >= 0]].all()), "a Reindex layer selects among the candidates"


def test_6_keys_are_read_from_four_bits(walk: Walk):
    for layer, keys in walk.keys.items():
        assert walk.key_bytes[layer] == CONFIG.head_dim / 2 + CONFIG.head_dim / MAIN.block
        blocks = keys.unflatten(-1, (-1, MAIN.block)).flatten(0, 1)
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert float(scale.max()) > 1e-6
        grid = e2m1.decode(torch.arange(8, dtype=torch.uint8))
        for block, largest in zip(blocks, scale, strict=True):
            steps = [(block.abs() / largest * top)[:, None] - grid for top in grid[1:]]
            assert min(float(step.abs().amin(1).max()) for step in steps) < 1e-5


def test_7_tokens_are_drafted_and_accepted(walk: Walk):
    assert walk.branch is not None
    sampled = sum(len(turn.completion_ids) for turn in walk.branch.turns)
    assert walk.stats["drafts.accepted"] > sampled / 4


def test_8_the_tool_is_called_in_a_sandbox(walk: Walk):
    assert walk.branch is not None
    (made,) = walk.branch.turns[0].message.tool_calls
    assert (made.name, made.arguments) == ("python", {"expression": "12*34"})
    assert walk.result == "408" and walk.box
    assert walk.branch.turns[1].prompt_ids == tuple(CHAT.tokenizer.encode_tagged("<obs>408</obs>"))


def test_9_the_result_is_verified(walk: Walk):
    assert walk.trajectory is not None and walk.trajectory.answer == TASK.gold
    assert walk.score.value == 1.0


def test_10_what_was_sampled_becomes_training_data_with_the_samplers_probabilities(walk: Walk):
    assert walk.trajectory is not None and walk.branch is not None
    (sample,) = trajectory_samples(walk.trajectory, 0.5)
    trained = CHAT.tokenizer.decode(sample.token_ids[sample.loss_mask].tolist())
    assert trained == "".join(TURNS)
    assert sample.effort == 75 and set(sample.policy_version[sample.loss_mask].tolist()) == {0}
    assert sample.token_ids.tolist() == walk.branch.history.token_ids
    assert sample.images is not None and sample.images.types.tolist() == walk.branch.history.types
    (shown,), (trained_on,) = walk.branch.history.images, sample.images.images
    assert trained_on.grid == shown.grid and torch.equal(trained_on.patches, shown.patches)
    (batch,) = micro_batches([sample], 512, torch.device("cpu"))
    with torch.no_grad():
        images = encoded_images(walk.policy, batch)
    assert images is not None and torch.equal(images.types, torch.tensor(walk.branch.history.types))
    assert error_of(walk, walk.branch, TEMPERATURE) < 0.01
    assert walk.hot is not None
    assert np.mean([value for turn in walk.hot.turns for value in turn.logprobs]) < -0.5
    seen, unseen = (error_of(walk, walk.hot, HOT, images=images) for images in (True, False))
    assert seen < 0.1 and seen < unseen, "the trainer needs the image too"


def error_of(walk: Walk, branch: Branch, temperature: float, *, images: bool = True) -> float:
    """The largest difference between the sampler's and the trainer's log-probability of a sampled token."""
    key = TrajectoryKey(TASK.id, 75, "external", 0, 0)
    (sample,) = trajectory_samples(trajectory(key, [branch], Score(0.0)), 0.5)
    history = branch.history
    if not images:
        history = Prompt(history.token_ids, [int(TokenType.TEXT)] * len(history.types))
    floors = floors_from_starts(len(history.token_ids), sample.replay_starts)
    with torch.no_grad():
        own = logprobs(walk.policy, packed(walk.policy, history, floors), temperature).numpy()
    return float(np.abs(own - sample.logprobs)[sample.loss_mask].max())
