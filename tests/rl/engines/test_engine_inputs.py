"""What reaches the native engine besides token ids: images, and a prefix store by the run's settings."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.chat import nano_chat
from model.config import PolicyConfig, VisionConfig
from model.engine.sampler import SamplingParams
from model.images import PreparedImage
from model.policy import Policy
from model.vision import TokenType
from rl.engines.base import EngineError, GenerateRequest, HistoryImages
from rl.engines.native import NativeEngine
from rl.engines.prefixes import MEMORY, PrefixSizes, open_prefixes
from rl.launch.compose import ConfigError, load_config

VISION = VisionConfig(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=32,
    patch_size=4,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=16,
    max_wh_ratio=None,
)
IMAGE_ID = 63


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_policy(*, vision: VisionConfig | None = VISION, fake_quant: bool = False) -> Policy:
    config = replace(PolicyConfig.preset("nano"), vision=vision, image_token_id=IMAGE_ID if vision else None)
    policy = Policy(config)
    policy.reset_parameters(3)
    policy.fake_quant = fake_quant
    with torch.no_grad():
        policy.head.weight *= 8  # pyright: ignore
    return policy


def picture(seed: int) -> PreparedImage:
    patches = torch.rand(6 * 3, 3, 4, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return PreparedImage(patches, (6, 3))


def request(*images: PreparedImage, session: str = "s", turn: int = 0) -> GenerateRequest:
    ids, types = [5, 6, 7], [int(TokenType.TEXT)] * 3
    for image in images:
        span = image.types(VISION)
        ids += [IMAGE_ID] * len(span) + [9]
        types += [*span, int(TokenType.TEXT)]
    sampling = SamplingParams(max_tokens=10, temperature=0.0)
    return GenerateRequest(session, turn, ids, sampling, images=HistoryImages(types, images))


async def test_an_image_is_seen_and_goes_through_the_tower_once():
    engine = NativeEngine(make_policy(), max_requests=4, max_tokens=128)
    try:
        one = await engine.generate(request(picture(1)))
        other = await engine.generate(request(picture(2), session="t"))
        again = await engine.generate(request(picture(1), session="u"))
        both = await engine.generate(request(picture(1), picture(2), session="v"))
        assert one.token_ids == again.token_ids
        assert one.logprobs != other.logprobs
        assert one.logprobs != both.logprobs
        assert engine._images.encoded == 2
    finally:
        await engine.close()


async def test_images_for_a_policy_without_a_tower_are_that_requests_error():
    engine = NativeEngine(make_policy(vision=None), max_requests=2, max_tokens=64)
    try:
        with pytest.raises(EngineError, match="no image tower"):
            await engine.generate(request(picture(1)))
        assert (await engine.generate(request())).token_ids
    finally:
        await engine.close()


async def test_an_aborted_turn_keeps_its_tokens_and_its_caches():
    engine = NativeEngine(make_policy(vision=None), max_requests=2, max_tokens=4096)
    history = GenerateRequest("s", 0, [5, 6, 7], SamplingParams(max_tokens=4000))
    try:
        turn = asyncio.create_task(engine.generate(history))
        async with asyncio.timeout(60):
            while engine.stats()["generated_tokens"] < 5:  # noqa: ASYNC110  counters have no event
                await asyncio.sleep(0.001)
        await engine.abort("s")
        completion = await turn
        assert completion.finish == "abort"
        assert len(completion.token_ids) >= 5
        prefilled = engine.stats()["prefilled_tokens"]
        longer = [5, 6, 7, *completion.token_ids, 8]
        await engine.generate(GenerateRequest("s", 1, longer, SamplingParams(max_tokens=1)))
        assert engine.stats()["prefilled_tokens"] - prefilled <= 2
        await engine.abort("nobody")
    finally:
        await engine.close()


async def test_a_prefix_store_serves_another_session_and_counts_it(tmp_path: Path):
    policy = make_policy(vision=None, fake_quant=True)
    opened = open_prefixes(
        "memory", PrefixSizes(memory_mb=4), policy, nano_chat(), replay="bounded", folder=tmp_path
    )
    history = [3 + i % 40 for i in range(200)]
    with opened as store:
        engine = NativeEngine(
            policy, max_requests=2, max_tokens=512, idle_sessions=0, replay="bounded", prefix_store=store
        )
        try:
            await engine.generate(GenerateRequest("a", 0, history, SamplingParams(max_tokens=4)))
            await engine.release("a")
            computed = engine.stats()["prefilled_tokens"]
            await engine.generate(GenerateRequest("b", 0, [*history, 9], SamplingParams(max_tokens=4)))
            stats = engine.stats()
            assert stats["prefilled_tokens"] - computed < len(history) / 2
            assert stats["prefix_hit_tokens"] > len(history) / 2
            assert stats["prefix_lookups"] >= 2
        finally:
            await engine.close()
    assert not list(MEMORY.glob(f"temper-prefix-{os.getpid()}-*"))


def test_folders_of_dead_processes_are_removed(tmp_path: Path):
    left = MEMORY / "temper-prefix-4194305-1-dead"  # more than the largest process id
    left.mkdir(exist_ok=True)
    policy = make_policy(vision=None, fake_quant=True)
    with open_prefixes(
        "memory", PrefixSizes(memory_mb=1), policy, nano_chat(), replay="off", folder=tmp_path
    ):
        assert not left.exists()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.storage=packed"):
        load_config(["engine.prefix_store=memory"])
    with pytest.raises(ConfigError, match="memory_mb=0"):
        load_config(["engine.prefix.memory_mb=0"])
    packed = ["engine.storage=packed", "trainer.fake_quant=true"]
    config = load_config(["engine.prefix_store=disk", "engine.prefix.disk_mb=7", *packed])
    assert (config.engine.prefix_store, config.engine.prefix.disk_mb) == ("disk", 7)
