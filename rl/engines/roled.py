"""Engines of one role each as one engine: images are encoded here, prompts computed there, tokens drawn here.

Every stage works on other requests while the others work on theirs. A request moves with its state: rows of
its images, then its caches and first token. The decode engine lives where the token log is, and tells it of
that token before it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Literal, Protocol

from model.engine.state import sampled
from model.vision import ImageTokens
from rl.engines.base import Completion, GenerateRequest, HistoryImages
from rl.engines.native import EngineClosedError, NativeEngine, Prefilled
from rl.engines.turns import of_columns
from rl.restarts import ProcessDiedError

_HELPER_S = 300.0


class Encoder(Protocol):
    """What encodes images: a native engine, or one in another process."""

    def encode(self, history: HistoryImages) -> Awaitable[ImageTokens | None]:
        """Returns types and rows of a history's images."""
        ...


class Prefiller(Protocol):
    """What computes prompts: a native engine of that role, or one in another process."""

    def prefill(self, request: GenerateRequest, rows: ImageTokens | None) -> Awaitable[Prefilled]:
        """Returns the computed prompt with its first token."""
        ...


class RoledEngine:
    """Implements `rl.engines.base.Engine` over engines of three roles.

    Args:
        decode: Draws all tokens but each turn's first; its listener hears of those too.
        prefill: A request goes to the one with the fewest; while there is none, requests wait for `use`.
        encode: Where images are encoded; none: the prefill engines do it.
        caches: What becomes of caches that a prefill engine computed with other weights than the decode
            engine's.
    """

    def __init__(
        self,
        decode: NativeEngine,
        prefill: Sequence[Prefiller] = (),
        encode: Sequence[Encoder] = (),
        *,
        caches: Literal["keep", "recompute"] = "keep",
        wait_s: float = _HELPER_S,
    ) -> None:
        self._decode, self._wait_s = decode, wait_s
        self._caches: Literal["keep", "recompute"] = caches
        self._prefill, self._encode = list(prefill), list(encode)
        self._loads = [0] * len(prefill)
        self._images = 0
        self._changed = asyncio.Event()

    def use(self, prefill: Sequence[Prefiller], encode: Sequence[Encoder]) -> None:
        """Works with these from now on; requests of one that has died go to them."""
        self._prefill, self._encode = list(prefill), list(encode)
        self._loads = [0] * len(prefill)
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """The version of the weights that draw tokens."""
        return self._decode.version

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one turn.

        Raises:
            EngineError: The request itself is at fault.
            EngineClosedError: An engine is closed or broken.
        """
        rows = await self._encoded(request)
        state = await self._prefilled(request, rows)
        if isinstance(state, Completion):
            await self._decode.announce(request, state)
            return state
        await self._decode.announce(request, of_columns(sampled(state)))
        caches = "keep" if state.header["version"] == self.version else self._caches
        return await self._decode.continue_state(state, request.turn, caches=caches)

    async def abort(self, session: str) -> None:
        """Ends the turn that a session is sampling, if any; its caches stay."""
        await self._decode.abort(session)

    async def release(self, session: str) -> None:
        """Forgets a trajectory; prompts leave their engine by themselves."""
        await self._decode.release(session)

    async def pause(self) -> None:
        """Stops at a token boundary; prompts that are computed meanwhile wait at this engine's door."""
        await self._decode.pause()

    async def resume(self) -> None:
        """Continues after `pause`."""
        await self._decode.resume()

    async def load_weights(self, tensors: Mapping[str, object], version: int) -> None:
        """Swaps the decode engine's weights; the others have their own inboxes."""
        await self._decode.load_weights(tensors, version)

    async def close(self) -> None:
        """Ends the decode engine; the others are their owner's."""
        await self._decode.close()

    def stats(self) -> dict[str, float]:
        """The decode engine's counters, and requests with the prefill engines."""
        return self._decode.stats() | {"prefilling": float(sum(self._loads))}

    async def _encoded(self, request: GenerateRequest) -> ImageTokens | None:
        if request.images is None or not self._encode:
            return None
        self._images += 1
        while True:
            changed = self._changed
            try:
                return await self._encode[self._images % len(self._encode)].encode(request.images)
            except ProcessDiedError as death:
                await self._others(changed, death)

    async def _prefilled(self, request: GenerateRequest, rows: ImageTokens | None) -> Prefilled:
        while True:
            changed, loads = self._changed, self._loads
            if not loads:
                await self._others(changed, None)
                continue
            place = min(range(len(loads)), key=lambda i: (loads[i], i))
            loads[place] += 1
            try:
                return await self._prefill[place].prefill(request, rows)
            except ProcessDiedError as death:
                await self._others(changed, death)
            finally:
                loads[place] -= 1

    async def _others(self, changed: asyncio.Event, death: ProcessDiedError | None) -> None:
        """Waits for helpers in the place of a dead one."""
        try:
            async with asyncio.timeout(self._wait_s):
                await changed.wait()
        except TimeoutError:
            raise EngineClosedError(
                f"no engine that computes prompts came within {self._wait_s:g} s ({death or 'none was'}): "
                "see the logs of the prefill and encode processes"
            ) from death
