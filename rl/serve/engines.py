"""The engine behind `temper serve`: our own, or vLLM, with what the endpoint has to know of it.

Its weights are read once and never changed; their version is the step of the checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from model.chat import ChatFormat, load_chat
from model.engine.speculative import Speculation
from model.images import ImageReader
from model.layers.packed import PackedExperts
from model.policies import AnyPolicy, open_policy
from rl.engines.base import Engine
from rl.engines.images import image_reader
from rl.engines.native import EngineClosedError, NativeEngine
from rl.engines.prefixes import open_prefixes
from rl.engines.vllm import VllmEngine
from rl.engines.vllm_installed import check_installed
from rl.engines.vllm_model import ModelFolder
from rl.engines.vllm_settings import VllmSettings
from rl.serve.options import ServeOptions, Source, engine_settings
from rl.serve.taps import Taps
from sandbox.errors import PolicyError

_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that runs, and what goes with it: the wording, the most tokens, and how images are read."""

    engine: Engine
    chat: ChatFormat
    context: int
    reader: ImageReader | None = None


def open_engine(options: ServeOptions, source: Source, taps: Taps) -> AbstractAsyncContextManager[Served]:
    """Opens the engine; it ends with the block. `taps` hear of its tokens."""
    settings = engine_settings(options, source)
    if settings.engine == "vllm":
        return _open_vllm(options, source, taps, settings.vllm)
    return _open_native(options, source, taps)


async def watch(engine: Engine) -> None:
    """Runs until the engine dies.

    Raises:
        EngineClosedError: It did.
    """
    while engine.stats()["healthy"]:  # noqa: ASYNC110  counters have no event to wait for
        await asyncio.sleep(_LOOK_S)
    raise EngineClosedError("the engine died, and nothing can be served: see its messages, and serve again")


@asynccontextmanager
async def _open_native(options: ServeOptions, source: Source, taps: Taps) -> AsyncIterator[Served]:
    net, chat = await asyncio.to_thread(_load, options, source)
    context = _context(options, source, net.config.max_position_embeddings)
    replay = "off" if net.config.decoder_start is None else "bounded"
    if source.run is not None:
        replay = source.run.engine.replay
    prefixes = open_prefixes(
        options.prefix_store,
        options.prefix,
        net,
        chat,
        replay=replay,
        folder=source.folder.parent,
        model=_identity(source.folder),
    )
    with prefixes as store:
        engine = NativeEngine(
            net,
            max_requests=options.max_requests,
            max_tokens=context,
            on_step=taps.on_step,
            version=source.step,
            storage="packed" if options.packed else "dense",
            replay=replay,
            speculate=Speculation() if options.speculate else None,
            prefix_store=store,
        )
        try:
            yield Served(engine, chat, context, image_reader(net))
        finally:
            await engine.close()


@asynccontextmanager
async def _open_vllm(
    options: ServeOptions, source: Source, taps: Taps, settings: VllmSettings
) -> AsyncIterator[Served]:
    model, chat = ModelFolder.read(source.folder), load_chat(source.folder)
    context = _context(options, source, model.context)
    say(f"starting vLLM {check_installed()} with {source.folder} (half a minute or more)")
    engine = await VllmEngine.start(
        source.folder,
        settings,
        threads=options.threads or os.cpu_count() or 1,
        version=source.step,
        max_requests=options.max_requests,
        max_tokens=context,
        on_step=taps.on_step,
    )
    try:
        yield Served(engine, chat, context)
    finally:
        await engine.close()


def _load(options: ServeOptions, source: Source) -> tuple[AnyPolicy, ChatFormat]:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    say(f"reading {source.folder} ({size / 1e6:.1f} MB)")
    started = time.monotonic()
    chat = load_chat(source.folder)
    experts = "packed" if options.packed_experts else "plain"
    net = open_policy(source.folder, experts=experts).to(options.device)
    net.fake_quant = options.packed or (source.run is not None and source.run.trainer.fake_quant)
    net.exact = source.run is not None and source.run.exactness.on
    count = sum(parameter.numel() for parameter in net.parameters())
    count += sum(module.weights for module in net.modules() if isinstance(module, PackedExperts))
    say(f"read {count / 1e6:.1f} million parameters in {time.monotonic() - started:.1f} s")
    return net, chat


def _context(options: ServeOptions, source: Source, made_for: int) -> int:
    known = made_for if source.run is None else source.run.engine.max_tokens
    context = known if options.context is None else options.context
    if context > made_for:
        raise PolicyError(f"--context {context} is more than the {made_for} tokens this policy was made for")
    return context


def _identity(folder: Path) -> str:
    """Names the weights of a checkpoint, for prefixes that outlive this process."""
    stamps = [
        f"{file.name}:{file.stat().st_size}:{file.stat().st_mtime_ns}"
        for file in sorted(folder.glob("*.safetensors"))
    ]
    return f"{folder.resolve()} {' '.join(stamps)}"


def say(line: str) -> None:
    """Tells who started the server."""
    print(line, file=sys.stderr, flush=True)
