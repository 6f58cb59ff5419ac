"""The control plane of E2B: sandboxes made, listed, looked at, timed, paused and ended, by project."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from sandbox.e2b import records
from sandbox.e2b.access import Keys
from sandbox.e2b.connect import Message, parse, read_body
from sandbox.e2b.link import FrontLink, Watched
from sandbox.e2b.status import BAD, MISSING, THERE, UNOFFERED, E2BError
from sandbox.e2b.templates import BASE, Template
from sandbox.tokens import Principal

_MAX_REQUEST = 1 << 18
_WAIT_S = 30.0
_REFUSED = {
    "autoPause": "a sandbox whose time is up is ended, not paused",
    "allow_internet_access": "the operator's template says what a sandbox may reach",
    "allowInternetAccess": "the operator's template says what a sandbox may reach",
    "network": "the operator's template says what a sandbox may reach",
    "autoResume": "a paused sandbox goes on when a client connects to it",
    "mcp": "there is no MCP gateway here",
    "iam": "sandboxes have no identity here",
    "volumeMounts": "there are no volumes here",
}
"""What a create may ask for elsewhere, and why not here."""

Handler = Callable[["Call"], Awaitable[web.Response]]


class Call:
    """One request: who asks, the way to the project's sandboxes, and the request itself."""

    def __init__(self, who: Principal, link: FrontLink, request: web.Request):
        self.who, self.link, self.request = who, link, request
        self.name = request.match_info.get("box", "")

    async def body(self) -> Message:
        """Returns the JSON object that the request carries; none is an empty one."""
        return parse(await read_body(self.request, _MAX_REQUEST))

    async def about(self) -> dict[str, Any]:
        """Returns what is known of the sandbox that the request names."""
        return (await self.link.describe(self.name))[0]


class Control:
    """The routes of the control plane."""

    def __init__(self, keys: Keys, watched: Watched, templates: Mapping[str, Template]):
        self._keys, self._watched, self._templates = keys, watched, templates

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Adds what is offered, of the present version of the interface and of the one before."""
        box = "/sandboxes/{box}"
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/sandboxes", self._create), ("POST", "/v2/sandboxes", self._create),
            ("GET", "/sandboxes", self._list), ("GET", "/v2/sandboxes", self._list),
            ("GET", box, self._look), ("DELETE", box, self._kill),
            ("POST", f"{box}/connect", self._connect), ("POST", f"/v2{box}/connect", self._connect),
            ("POST", f"{box}/timeout", self._timeout), ("POST", f"{box}/refreshes", self._refresh),
            ("POST", f"{box}/pause", self._pause), ("POST", f"{box}/resume", self._connect),
            ("POST", f"{box}/snapshots", self._snapshot), ("GET", "/snapshots", self._snapshots),
            ("DELETE", "/templates/{box}", self._forget),
        ]  # fmt: skip
        for method, path, handler in routes:
            router.add_route(method, path, self._served(handler))

    def _served(self, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def serve(request: web.Request) -> web.Response:
            who = self._keys.caller(request.headers.get("X-API-Key", ""))
            return await handler(Call(who, FrontLink(self._watched(who)), request))

        return serve

    async def _create(self, call: Call) -> web.Response:
        asked = await call.body()
        for field, why in _REFUSED.items():
            if asked.get(field) and asked[field] != {"enabled": False}:
                raise E2BError(BAD, f"{field} is not offered: {why}")
        name = asked.get("templateID") or BASE
        life_s, key = records.life_of(asked), call.request.headers.get("Idempotency-Key", "")
        template, snapshot = self._template(name)
        spec = records.spec_of(template, "" if snapshot else name, asked, life_s)
        fleet = await call.link.fleet(template.backend)
        call.name = (await fleet.create(spec, key=key, snapshot=snapshot, wait_s=_WAIT_S)).id
        about = await call.about()
        if key and not records.same_request(about, asked):
            raise E2BError(THERE, "another request has had this idempotency key: take a fresh one")
        return web.json_response(records.created(about, self._keys.make(call.who, call.name)), status=201)

    def _template(self, name: object) -> tuple[Template, str]:
        """Returns a template; what has the name of a snapshot is one, made of a plain sandbox."""
        if isinstance(name, str) and (template := self._templates.get(name)) is not None:
            return template, ""
        if isinstance(name, str) and "." in name:
            return self._templates[BASE], name
        raise E2BError(
            MISSING, f"there is no template {str(name)[:60]!r}, only {', '.join(sorted(self._templates))}"
        )

    async def _list(self, call: Call) -> web.Response:
        query = call.request.query
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise E2BError(BAD, "order is asc or desc")
        found = [records.listed(about) for about in await call.link.describe() if _wanted(about, query)]
        found.sort(key=lambda entry: (entry["startedAt"], entry["sandboxID"]), reverse=order == "desc")
        begin, limit = _number(query, "nextToken", 0), _number(query, "limit", 100)
        page = found[begin : begin + limit]
        more = {"X-Next-Token": str(begin + limit)} if begin + limit < len(found) else {}
        return web.json_response(page, headers=more)

    async def _look(self, call: Call) -> web.Response:
        return web.json_response(records.detailed(await call.about(), self._keys.make(call.who, call.name)))

    async def _kill(self, call: Call) -> web.Response:
        await call.about()
        await call.link.box(call.name).close()
        return web.Response(status=204)

    async def _connect(self, call: Call) -> web.Response:
        asked = await call.body()
        if asked.get("memory") is False:
            raise E2BError(
                BAD, "a paused sandbox keeps its memory and goes on with it: it cannot be rebooted"
            )
        about, life_s = await call.about(), records.life_of(asked)
        if about["paused"]:
            await call.link.box(call.name).resume()
        await self._extend(call, life_s, at_least=not about["paused"])
        return web.json_response(records.created(about, self._keys.make(call.who, call.name)))

    async def _timeout(self, call: Call) -> web.Response:
        await self._extend(call, records.life_of(await call.body()), at_least=False)
        return web.Response(status=204)

    async def _refresh(self, call: Call) -> web.Response:
        await self._extend(call, records.life_of(await call.body(), "duration", 15), at_least=True)
        return web.Response(status=204)

    async def _extend(self, call: Call, life_s: float, *, at_least: bool) -> None:
        ask = {"op": "extend", "box": call.name, "life_s": life_s, "at_least": at_least}
        await call.link.request(ask)

    async def _pause(self, call: Call) -> web.Response:
        if (await call.body()).get("memory") is False:
            raise E2BError(BAD, "a pause keeps processes and memory here: leave the mode out")
        if (await call.about())["paused"]:
            raise E2BError(THERE, f"the sandbox {call.name} is paused already")
        await call.link.box(call.name).pause()
        return web.Response(status=204)

    async def _snapshot(self, call: Call) -> web.Response:
        asked = await call.body()
        if asked.get("memory") is not False:
            raise E2BError(BAD, "a snapshot keeps files, not memory: ask for mode='filesystem'")
        if asked.get("name"):
            raise E2BError(BAD, "snapshots have no names of their own here")
        await call.about()
        snapshot = await call.link.box(call.name).snapshot()
        return web.json_response({"snapshotID": snapshot, "names": []}, status=201)

    async def _snapshots(self, call: Call) -> web.Response:
        reply, _ = await call.link.request({"op": "snapshots"})
        return web.json_response([{"snapshotID": name, "names": []} for name in reply["snapshots"]])

    async def _forget(self, call: Call) -> web.Response:
        if call.name not in (await call.link.request({"op": "snapshots"}))[0]["snapshots"]:
            raise E2BError(MISSING, f"there is no snapshot {call.name}; templates are the operator's")
        await call.link.request({"op": "forget", "snapshot": call.name})
        return web.Response(status=204)


async def unoffered(request: web.Request) -> web.Response:
    """Refuses what there is no route for."""
    raise E2BError(UNOFFERED, f"{request.method} {request.path[:100]} is not offered here")


def _wanted(about: dict[str, Any], query: Mapping[str, str]) -> bool:
    states = query.get("state", "")
    if states and records.state_of(about) not in states.split(","):
        return False
    if (template := query.get("template")) and records.template_of(about) != template:
        return False
    if (after := query.get("startedAfter")) and about["born_s"] < _moment(after):
        return False
    metadata = records.metadata_of(about)
    pairs = parse_qsl(query.get("metadata", ""), keep_blank_values=True)  # quoted twice by clients
    return all(metadata.get(unquote(name)) == unquote(value) for name, value in pairs)


def _moment(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise E2BError(BAD, "startedAfter is a time as in 2026-01-31T12:00:00Z") from error


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise E2BError(BAD, f"{name} is a number")
    return int(text)
