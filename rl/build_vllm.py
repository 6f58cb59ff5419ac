"""Makes the parts of a run that vLLM changes: the folder it serves, and a generator around it."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import ray

from model.hf.folder import save_hf
from model.hf.policy import HFPolicy
from rl import build
from rl.engines.vllm import VllmEngine
from rl.engines.vllm_weights import VllmInbox
from rl.environments import open_workers
from rl.launch.config import RunConfig
from rl.rollout.generator import Generator
from rl.rollout.wal import TokenLog, TokenLogError
from rl.serve.agents import AgentDoor
from rl.serve.taps import Taps


@asynccontextmanager
async def open_vllm_generator(
    config: RunConfig, log: TokenLog, folder: Path, fleet_state: Path, owner: str
) -> AsyncIterator[Generator]:
    """Opens a rollout process whose engine is vLLM; `folder` is that of its token log."""
    chat, rollout, launcher = build.chat_format(config), config.rollout, config.launcher
    async with AsyncExitStack() as stack:
        stack.callback(log.close)
        model = await asyncio.to_thread(_write_model, config, folder / "vllm")
        stack.callback(shutil.rmtree, model, ignore_errors=True)
        taps = Taps(log.on_step)
        served = await stack.enter_async_context(AsyncExitStack())  # ends after the samples
        engine = await VllmEngine.start(
            model,
            config.engine.vllm,
            threads=launcher.generator_threads,
            max_requests=config.engine.max_requests,
            max_tokens=config.engine.max_tokens,
            on_step=taps.on_step,
            caches=rollout.kv_on_update,
            deadline_s=launcher.weights_deadline_s,
            on_death=_end_of_process(log),
        )
        stack.push_async_callback(engine.close)
        door = AgentDoor(engine, taps, chat, rollout.max_total_tokens, served)
        workers = await open_workers(
            config,
            engine,
            chat,
            log,
            stack,
            fleet_state=fleet_state,
            owner=owner,
            pool=folder.name,
            door=door,
        )
        generator = Generator(workers, engine, log, rollout)
        generator.inbox = VllmInbox(engine)
        stack.push_async_callback(generator.close)
        yield generator


def _write_model(config: RunConfig, folder: Path) -> Path:
    """Writes the policy as the run starts with it; the learner's weights come before the first sample."""
    shutil.rmtree(folder, ignore_errors=True)
    net = build.policy(config)
    assert isinstance(net, HFPolicy), "the configuration was checked"
    save_hf(net, folder)
    return folder


def _end_of_process(log: TokenLog) -> Callable[[BaseException], None] | None:
    """What the death of vLLM's core does to the process around it: in an actor it ends at once.

    Its samples then go on in a successor, from a log that has every token; they would fail here.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None

    def end(error: BaseException) -> None:
        try:
            log.flush()
        except TokenLogError:
            logging.exception("the token log could not be flushed")
        finally:
            os._exit(1)

    return end
