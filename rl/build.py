"""Makes the parts of a run from its configuration; the one place where names become objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from model.chat import ChatFormat, TemplateChat, load_chat, nano_chat
from model.checkpoint import load_policy
from model.diagnostics.scales import ScaleMonitor
from model.engine.speculative import Speculation
from model.hf.folder import open_hf
from model.hf.policy import HFPolicy
from model.hf.tiny import tiny_model
from model.policies import AnyPolicy
from model.policy import Policy
from model.vision import ImageTokens
from rl.collective import CollectiveInbox
from rl.engines.base import GenerateRequest, HistoryImages
from rl.engines.images import image_reader
from rl.engines.native import NativeEngine, Prefilled
from rl.engines.prefixes import open_prefixes
from rl.engines.roled import RoledEngine
from rl.engines.saved import SavedTurns
from rl.environments import open_workers
from rl.hidden_effort import HiddenEffort
from rl.launch.config import RunConfig
from rl.rollout.generator import Generator
from rl.rollout.wal import TokenLog
from rl.serve.agents import AgentDoor
from rl.serve.taps import Taps
from rl.transports import Inbox


def policy(config: RunConfig) -> AnyPolicy:
    """Returns the policy that the run starts from: a checkpoint folder's, or a preset's fresh weights."""
    if config.policy.kind == "hf":
        return _hf_policy(config)
    if config.model.path:
        return load_policy(Path(config.model.path))
    fresh = Policy(config.model.fresh())
    fresh.reset_parameters(config.run.seed)
    return fresh


def _hf_policy(config: RunConfig) -> HFPolicy:
    if config.model.path:
        return open_hf(Path(config.model.path), dtype=config.policy.dtype, lora=config.policy.lora)
    dtype = getattr(torch, config.policy.dtype)
    return HFPolicy(tiny_model(config.model.preset, config.run.seed).to(dtype))


def chat_format(config: RunConfig) -> ChatFormat:
    """Returns the wording that belongs to the checkpoint; presets bring the one-token tags."""
    chat = load_chat(Path(config.model.path)) if config.model.path else nano_chat()
    if isinstance(chat, TemplateChat):
        chat = _template_chat(config, chat)
    return chat if config.effort.in_prompt else HiddenEffort(chat)


def _template_chat(config: RunConfig, chat: TemplateChat) -> TemplateChat:
    told = config.effort.in_prompt and (
        len(config.effort.levels) > 1 or config.effort.distribution.kind in ("uniform", "log_uniform")
    )
    if told and not chat.tells_effort:
        raise ValueError(
            "the chat template of model.path says nothing of an effort (reasoning_effort), so the policy "
            "cannot follow one: set effort=constant, or take a template that writes it down"
        )
    return chat.with_settings(config.policy.history, config.policy.thinking)


def speculation(config: RunConfig) -> Speculation | None:
    """Returns how the engine is to draft; None: not at all."""
    if config.engine.speculate == "off":
        return None
    return Speculation(rule=config.engine.speculate, length=config.engine.draft_length)


def use_threads(count: int) -> None:
    """Sets how many cores torch uses in this process."""
    torch.set_num_threads(max(count, 1))


@asynccontextmanager
async def open_generator(
    config: RunConfig, token_log: Path, fleet_state: Path, owner: str, shared: AnyPolicy | None = None
) -> AsyncIterator[Generator]:
    """Opens the rollout process: engine, token log, a connection to the fleet, and workers.

    The engine's policy is `shared`, whose tensors somebody else changes between two tokens, or its own.
    """
    use_threads(config.launcher.generator_threads)
    rollout = config.rollout
    wal = rollout.wal
    log = TokenLog(token_log, flush_ms=wal.flush_ms, fsync=wal.fsync, segment_bytes=wal.segment_bytes)
    if config.engine.name == "vllm":
        from rl.build_vllm import open_vllm_generator

        async with open_vllm_generator(config, log, token_log, fleet_state, owner) as generator:
            yield generator
        return
    net, chat = shared or policy(config).to(config.engine_device), chat_format(config)
    net.fake_quant, net.exact = config.trainer.fake_quant, config.exactness.on
    prefixes = open_prefixes(
        config.engine.prefix_store,
        config.engine.prefix,
        net,
        chat,
        replay=config.engine.replay,
        folder=token_log.parent,
    )
    async with AsyncExitStack() as stack:
        store = stack.enter_context(prefixes)
        taps = Taps(log.on_step)
        served = await stack.enter_async_context(AsyncExitStack())  # ends after the samples
        native = NativeEngine(
            net,
            max_requests=config.engine.max_requests,
            max_tokens=config.engine.max_tokens,
            on_step=taps.on_step,
            caches=rollout.kv_on_update,
            speculate=speculation(config),
            storage=config.engine.storage,
            pages=config.engine.pages,
            replay=config.engine.replay,
            prefix_store=store,
            role="decode" if config.launcher.prefill_replicas else "all",
            saved=SavedTurns(token_log / "turns", config.engine.persist_from),
            stage_weights=config.engine.stage_weights,
            capture=config.replay_choices != "off",
            capture_selections=config.replay_choices == "selections",
        )
        roled = RoledEngine(native, caches=rollout.kv_on_update) if config.launcher.prefill_replicas else None
        engine = roled or native
        door = AgentDoor(engine, taps, chat, rollout.max_total_tokens, served, image_reader(net))
        pool = token_log.name
        workers = await open_workers(
            config, engine, chat, log, stack, fleet_state=fleet_state, owner=owner, pool=pool, door=door
        )
        every = config.engine.scales_every
        scales = ScaleMonitor(net, every) if every and isinstance(net, Policy) else None
        generator = Generator(workers, engine, log, rollout, scales)
        generator.persist = native.persist
        if config.launcher.weights == "collective":
            generator.inbox = CollectiveInbox(native, net.device)
        stack.push_async_callback(generator.close)
        yield generator


@dataclass(frozen=True, slots=True)
class Helper:
    """An engine of one role in a process of its own, and its weights' way in."""

    engine: NativeEngine
    inbox: Inbox

    async def ping(self) -> None:
        """Answers, which the dead do not."""

    async def prefill(self, request: GenerateRequest, rows: ImageTokens | None) -> Prefilled:
        """Computes a prompt."""
        return await self.engine.prefill(request, rows)

    async def encode(self, history: HistoryImages) -> ImageTokens | None:
        """Encodes images."""
        return await self.engine.encode(history)


@asynccontextmanager
async def open_helper(config: RunConfig, role: Literal["prefill", "encode"]) -> AsyncIterator[Helper]:
    """Opens a process that computes prompts, or encodes images, for the generators."""
    use_threads(config.launcher.generator_threads)
    net = policy(config).to(config.engine_device)
    net.fake_quant, net.exact = config.trainer.fake_quant, config.exactness.on
    engine = NativeEngine(
        net,
        max_requests=config.engine.max_requests,
        max_tokens=config.engine.max_tokens,
        caches=config.rollout.kv_on_update,
        storage=config.engine.storage,
        pages=config.engine.pages,
        replay=config.engine.replay,
        role=role,
        capture=config.replay_choices != "off",
        capture_selections=config.replay_choices == "selections",
        stage_weights=config.engine.stage_weights,
    )
    collective = config.launcher.weights == "collective"
    inbox = CollectiveInbox(engine, net.device) if collective else Inbox(engine)
    try:
        yield Helper(engine, inbox)
    finally:
        await engine.close()
