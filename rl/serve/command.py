"""What `temper serve` does: a checkpoint or a run's policy behind the endpoint, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from rl.engines.base import Engine
from rl.serve.endpoint import Endpoint
from rl.serve.engines import Served, open_engine, say, watch
from rl.serve.options import ServeOptions, Source, find_source
from rl.serve.session import Session
from rl.serve.taps import Taps
from rl.serve.voices import EngineVoice
from sandbox.listening import Listener, serve
from sandbox.tokens import own_token

REMEMBERED_TOKENS = 8_000_000
"""Of conversations, so that they go on with the ids that were sampled."""
_STATUS_S = 10.0


def run_server(options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT."""
    options.check()
    source = find_source(options)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    asyncio.run(_serve(options, source))
    return 0


async def _serve(options: ServeOptions, source: Source) -> None:
    taps = Taps()
    async with open_engine(options, source, taps) as served:
        voice = EngineVoice(served.engine, taps, "serve", served.context, images=served.reader is not None)
        session = Session(
            voice, served.chat, served.reader, effort=options.effort, most_tokens=REMEMBERED_TOKENS
        )
        with _endpoint(options, options.name or source.name, served, session) as endpoint:
            await _listen(options, endpoint, served.engine)


@contextmanager
def _endpoint(options: ServeOptions, name: str, served: Served, session: Session) -> Iterator[Endpoint]:
    engine, chat = served.engine, served.chat

    def stats() -> dict[str, float]:
        return engine.stats() | {"version": float(engine.version)}

    if options.token_file is None:
        yield Endpoint(name, chat, stats, anyone=session)
        return
    endpoint = Endpoint(name, chat, stats)
    with endpoint.key(session, own_token(options.token_file.expanduser())):
        yield endpoint


async def _listen(options: ServeOptions, endpoint: Endpoint, engine: Engine) -> None:
    app = endpoint.application()

    async def drain(_: web.Application) -> None:
        if endpoint.running:
            say(f"stopping; {endpoint.running} answers have {options.drain_s:g} s to end")
        await endpoint.drain(options.drain_s)

    app.on_shutdown.append(drain)

    def ready(_: str, address: str) -> None:
        key = f"the key is in {options.token_file}" if options.token_file else "no key is needed"
        say(f"serving {endpoint.model} at {address}/v1 ({key}); Ctrl-C stops it")

    await serve([Listener("serve", app, options.bind)], _report(endpoint, engine), watch(engine), ready=ready)
    say("stopped")


async def _report(endpoint: Endpoint, engine: Engine) -> None:
    """Says from time to time what was done, when something was."""
    before, at = engine.stats()["generated_tokens"], time.monotonic()
    while True:
        await asyncio.sleep(_STATUS_S)
        stats, now = engine.stats(), time.monotonic()
        if (made := stats["generated_tokens"] - before) > 0:
            rate = made / (now - at)
            say(f"{endpoint.running} requests, {stats['waiting']:g} of them waiting; {rate:.1f} tokens/s")
        before, at = stats["generated_tokens"], now
