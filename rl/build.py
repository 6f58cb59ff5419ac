"""Makes the parts of a run from its configuration; the one place where names become objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from model.chat import ChatFormat, load_chat, nano_chat
from model.checkpoint import load_policy
from model.diagnostics.scales import ScaleMonitor
from model.engine.speculative import Speculation
from model.policy import Policy
from rl.collective import CollectiveInbox
from rl.engines.native import NativeEngine
from rl.engines.prefixes import open_prefixes
from rl.environments import open_workers
from rl.hidden_effort import HiddenEffort
from rl.launch.config import RunConfig
from rl.rollout.generator import Generator
from rl.rollout.wal import TokenLog
from rl.serve.agents import AgentDoor
from rl.serve.taps import Taps


def policy(config: RunConfig) -> Policy:
    """Returns the policy that the run starts from: a checkpoint folder's, or a preset's fresh weights."""
    if config.model.path:
        return load_policy(Path(config.model.path))
    fresh = Policy(config.model.fresh())
    fresh.reset_parameters(config.run.seed)
    return fresh


def chat_format(config: RunConfig) -> ChatFormat:
    """Returns the wording that belongs to the checkpoint; presets bring the one-token tags."""
    chat = load_chat(Path(config.model.path)) if config.model.path else nano_chat()
    return chat if config.effort.in_prompt else HiddenEffort(chat)


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
    config: RunConfig, token_log: Path, fleet_state: Path, owner: str, shared: Policy | None = None
) -> AsyncIterator[Generator]:
    """Opens the rollout process: engine, token log, a connection to the fleet, and workers.

    The engine's policy is `shared`, whose tensors somebody else changes between two tokens, or its own.
    """
    use_threads(config.launcher.generator_threads)
    net, chat = shared or policy(config), chat_format(config)
    net.fake_quant, net.exact = config.trainer.fake_quant, config.model.exact
    rollout = config.rollout
    log = TokenLog(
        token_log, flush_ms=rollout.flush_ms, fsync=rollout.fsync, segment_bytes=rollout.segment_bytes
    )
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
        engine = NativeEngine(
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
            capture=config.trainer.replay_choices != "off",
        )
        door = AgentDoor(engine, taps, chat, rollout.max_total_tokens, served)
        pool = token_log.name
        workers = await open_workers(
            config, engine, chat, log, stack, fleet_state=fleet_state, owner=owner, pool=pool, door=door
        )
        every = config.engine.scales_every
        scales = ScaleMonitor(net, every) if every else None
        generator = Generator(workers, engine, log, rollout, scales)
        if config.launcher.weights == "collective":
            generator.inbox = CollectiveInbox(engine, net.device)
        stack.push_async_callback(generator.close)
        yield generator
