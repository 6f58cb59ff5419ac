"""What `temper serve` does: a checkpoint or a run's policy behind the endpoint, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from aiohttp import web

from model.chat import ChatFormat, load_chat
from model.checkpoint import load_policy
from model.engine.speculative import Speculation
from model.images import ImageReader
from model.policy import Policy
from rl.checkpoint import CheckpointStore
from rl.engines.native import NativeEngine
from rl.engines.prefixes import PrefixSizes, Tier, open_prefixes
from rl.launch.config import RunConfig
from rl.launch.runs import find_run
from rl.serve.endpoint import Endpoint
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice
from sandbox.errors import PolicyError
from sandbox.listening import Listener, serve
from sandbox.serving import Bind
from sandbox.tokens import own_token

REMEMBERED_TOKENS = 8_000_000
"""Of conversations, so that they go on with the ids that were sampled."""
_STATUS_S = 10.0
_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve and how.

    Attributes:
        target: A checkpoint folder, or a run by name or folder.
        root: The folder of the runs.
        step: Of a run's checkpoints; None: the newest.
        name: The model's name; empty: that of the run or folder.
        max_requests: Requests served at the same time; others wait.
        context: The most tokens of a sequence; None: the run's, or what the checkpoint was made for.
        effort: When a request names none; None: the checkpoint's own default.
        threads: Cores; None: all.
        device: As torch calls it.
        packed: Whether caches hold rounded keys on pages.
        speculate: Whether the checkpoint's drafter drafts.
        prefix_store: The last tier of the prefix store.
        prefix: Its sizes.
        bind: Where to listen.
        token_file: The token of callers, made when it is not there; None: none is needed, on loopback.
        drain_s: Seconds that answers have to end when it is told to stop.
    """

    target: str
    root: Path = Path("runs")
    step: int | None = None
    name: str = ""
    max_requests: int = 16
    context: int | None = None
    effort: int | None = None
    threads: int | None = None
    device: str = "cpu"
    packed: bool = False
    speculate: bool = False
    prefix_store: Tier = "off"
    prefix: PrefixSizes = field(default_factory=PrefixSizes)
    bind: Bind = field(default_factory=Bind)
    token_file: Path | None = None
    drain_s: float = _DRAIN_S

    def check(self) -> None:
        """Refuses what makes no sense together.

        Raises:
            PolicyError: An address that others can reach without a token, or too little of something.
        """
        self.bind.check()
        if self.bind.public and self.token_file is None:
            raise PolicyError(
                f"{self.bind.host} can be reached by others: give --token-file FILE (it is made, and "
                "holds the API key of the callers)"
            )
        if self.prefix_store != "off" and not self.packed:
            raise PolicyError("--prefix-store keeps packed pages: give --packed too")
        if self.max_requests < 1 or (self.threads is not None and self.threads < 1):
            raise PolicyError("--max-requests and --threads are at least 1")
        if self.context is not None and self.context < 2:
            raise PolicyError("--context is at least 2: a prompt and one token")


@dataclass(frozen=True, slots=True)
class Source:
    """A policy's folder, what it is called, and the run that it is of."""

    folder: Path
    name: str
    run: RunConfig | None = None


def find_source(options: ServeOptions) -> Source:
    """Finds the folder of what is to be served.

    Raises:
        ValueError: There is no such checkpoint or run, or a run without a usable checkpoint.
    """
    path = Path(options.target).expanduser()
    if (path / "config.json").is_file():
        return Source(path, path.resolve().name)
    if (path / "policy" / "config.json").is_file():
        return Source(path / "policy", path.resolve().name)
    run = find_run(options.target, options.root)
    checkpoint = CheckpointStore(run / "checkpoints").latest(options.step)
    if checkpoint is None:
        raise PolicyError(f"run {run.name} has no checkpoint yet: it writes one every checkpoint.every steps")
    config = RunConfig.model_validate(yaml.safe_load((run / "resolved.yaml").read_text(encoding="utf-8")))
    return Source(checkpoint.path / "policy", run.name, config)


def run_server(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT."""
    options.check()
    source = find_source(options)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(_serve(options, source))
    return 0


async def _serve(options: ServeOptions, source: Source) -> None:
    net, chat = await asyncio.to_thread(_load, options, source)
    context = _context(options, source, net)
    replay = "off" if net.config.decoder_start is None else "bounded"
    if source.run is not None:
        replay = source.run.engine.replay
    async with AsyncExitStack() as stack:
        store = stack.enter_context(
            open_prefixes(
                options.prefix_store,
                options.prefix,
                net,
                chat,
                replay=replay,
                folder=source.folder.parent,
                model=_identity(source.folder),
            )
        )
        taps = Taps()
        engine = NativeEngine(
            net,
            max_requests=options.max_requests,
            max_tokens=context,
            on_step=taps.on_step,
            storage="packed" if options.packed else "dense",
            replay=replay,
            speculate=Speculation() if options.speculate else None,
            prefix_store=store,
        )
        stack.push_async_callback(engine.close)
        images = net.config.vision is not None and net.config.image_token_id is not None
        session = Session(
            EngineVoice(engine, taps, "serve", context, images=images),
            chat,
            ImageReader.of(net.config) if images else None,
            effort=options.effort,
            most_tokens=REMEMBERED_TOKENS,
        )
        name = options.name or source.name
        with _endpoint(options, name, chat, engine, session) as endpoint:
            await _listen(options, endpoint, engine)


@contextmanager
def _endpoint(
    options: ServeOptions, name: str, chat: ChatFormat, engine: NativeEngine, session: Session
) -> Iterator[Endpoint]:
    if options.token_file is None:
        yield Endpoint(name, chat, engine.stats, anyone=session)
        return
    endpoint = Endpoint(name, chat, engine.stats)
    with endpoint.key(session, own_token(options.token_file.expanduser())):
        yield endpoint


async def _listen(options: ServeOptions, endpoint: Endpoint, engine: NativeEngine) -> None:
    app = endpoint.application()

    async def drain(_: web.Application) -> None:
        if endpoint.running:
            _say(f"stopping; {endpoint.running} answers have {options.drain_s:g} s to end")
        await endpoint.drain(options.drain_s)

    app.on_shutdown.append(drain)

    def ready(_: str, address: str) -> None:
        key = f"the key is in {options.token_file}" if options.token_file else "no key is needed"
        _say(f"serving {endpoint.model} at {address}/v1 ({key}); Ctrl-C stops it")

    await serve([Listener("serve", app, options.bind)], _report(endpoint, engine), ready=ready)
    _say("stopped")


async def _report(endpoint: Endpoint, engine: NativeEngine) -> None:
    """Says from time to time what was done, when something was."""
    before, at = engine.stats()["generated_tokens"], time.monotonic()
    while True:
        await asyncio.sleep(_STATUS_S)
        stats, now = engine.stats(), time.monotonic()
        if (made := stats["generated_tokens"] - before) > 0:
            rate = made / (now - at)
            _say(f"{endpoint.running} requests, {stats['waiting']:g} of them waiting; {rate:.1f} tokens/s")
        before, at = stats["generated_tokens"], now


def _load(options: ServeOptions, source: Source) -> tuple[Policy, ChatFormat]:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    size = sum(file.stat().st_size for file in source.folder.glob("*.safetensors"))
    _say(f"reading {source.folder} ({size / 1e6:.1f} MB)")
    started = time.monotonic()
    chat = load_chat(source.folder)
    net = load_policy(source.folder).to(options.device)
    net.fake_quant = options.packed or (source.run is not None and source.run.trainer.fake_quant)
    net.exact = source.run is not None and source.run.model.exact
    count = sum(parameter.numel() for parameter in net.parameters())
    _say(f"read {count / 1e6:.1f} million parameters in {time.monotonic() - started:.1f} s")
    return net, chat


def _context(options: ServeOptions, source: Source, net: Policy) -> int:
    made_for = net.config.max_position_embeddings
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
