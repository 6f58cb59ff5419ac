"""What leaves an agent's box: it is frozen, its processes are ended, and an allow-listed diff is read."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from sandbox.errors import InfrastructureError, printable
from sandbox.remote import MAX_OUTPUT, RemoteBox
from sandbox.types import Capabilities
from sandbox.verify.flags import HOOKS, SUSPECTS, WORDS
from sandbox.verify.plan import WRITABLE, Plan, is_path, pattern
from sandbox.verify.report import LeftOut

INSIDE = Path(__file__).parent / "inside"
_ENTRIES = 200_000
_EXPORT_S = 120.0
_NO_MEMORY = b"\nMemoryError"
"""What an interpreter says where the kernel ends no process for memory."""


class DiffError(Exception):
    """The diff is more than the plan allows, or the box too full to be read: the agent's doing."""


@dataclass(frozen=True, slots=True)
class Diff:
    """Files by path below the root, those of the base that are gone, and what was found beside them."""

    files: Mapping[str, bytes]
    gone: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    more_left_out: int = 0
    tampered: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()
    mentions: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    modes: Mapping[str, int] = field(default_factory=dict[str, int])


async def freeze(box: RemoteBox, capabilities: Capabilities) -> None:
    """Stops the agent's box where the backend can; nothing in it goes on after that.

    One in which processes come and go so fast that the kernel does not stop them goes on until it is killed.
    """
    if capabilities.pause:
        with contextlib.suppress(InfrastructureError):
            await box.pause()


async def thaw_and_kill(box: RemoteBox, capabilities: Capabilities) -> None:
    """Ends all processes of the agent; the box is then still, for good."""
    if capabilities.pause:
        await box.resume()
    await box.halt()


async def export(box: RemoteBox, plan: Plan, search: tuple[str, ...] = WRITABLE) -> Diff:
    """Returns the diff of a box without processes.

    Raises:
        DiffError: It is more than the plan allows.
        InfrastructureError: It could not be read.
        LostError: The box is gone.
    """
    source = (INSIDE / "exporter.py").read_text() + "\nmain()\n"
    result = await box.exec(
        [plan.python, "-I", "-S", "-B", "-c", source],
        stdin=json.dumps(_job(plan, search)).encode(),
        timeout_s=_EXPORT_S,
        cwd="/",
        output_limit=MAX_OUTPUT,
    )
    if result.oom or result.signal is not None or _NO_MEMORY in result.stderr:
        raise DiffError("the agent's box has no memory left in which it could be read")
    if result.exit_code != 0 or result.truncated:
        why = result.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InfrastructureError(
            f"the agent's box could not be read ({why[0] if why else result.exit_code})"
        )
    try:
        return _read(json.loads(result.stdout), plan)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InfrastructureError("what was read of the agent's box is out of shape") from error


def merge(plan: Plan, diff: Diff) -> tuple[dict[str, bytes], list[LeftOut]]:
    """Returns the files of the verifier's box (trusted over diff over base), and what gave way."""
    gave_way: list[LeftOut] = []
    merged: dict[str, bytes] = {}
    for layer in (plan.trusted, diff.files, plan.base):
        folders = {parent for path in merged for parent in _parents(path)}
        for path, data in layer.items():
            blocked = path in folders or any(parent in merged for parent in _parents(path))
            if path in merged or (path in diff.gone and layer is plan.base) or blocked:
                if layer is diff.files:
                    gave_way.append(LeftOut(path, "a trusted file is put in its place"))
                continue
            merged[path] = data
    return merged, gave_way


def _parents(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[:count]) for count in range(1, len(parts)))


def _libraries(plan: Plan) -> list[str]:
    """Returns the folders of libraries below the root, in which nothing of the agent's counts."""
    start = f"{plan.root}/"
    return [path.removeprefix(start) for path in plan.python_path if path.startswith(start)]


def _job(plan: Plan, search: tuple[str, ...]) -> dict[str, Any]:
    return {
        "root": plan.root,
        "base": {path: [hashlib.sha256(data).hexdigest(), len(data)] for path, data in plan.base.items()},
        "trusted": sorted(plan.trusted),
        "allow": [pattern(glob) for glob in plan.allow],
        "deny": [HOOKS, *(f"{re.escape(path)}/.*" for path in _libraries(plan))],
        "suspects": [regex for _, regex in SUSPECTS],
        "words": WORDS,
        "canary": plan.canary,
        "search": search,
        "files": plan.limits.files,
        "size": plan.limits.size,
        "entries": _ENTRIES,
    }


def _read(said: Any, plan: Plan) -> Diff:
    """Checks what came, as if the agent had written it."""
    found = cast("dict[str, Any]", said)
    if found["full"]:
        raise DiffError(f"the agent's box has more than {_ENTRIES} files")
    files: dict[str, bytes] = {}
    modes: dict[str, int] = {}
    allow = [re.compile(pattern(glob), re.DOTALL) for glob in plan.allow]
    for path, (text, mode) in found["files"].items():
        if (
            not is_path(path)
            or not path.isprintable()
            or not any(regex.fullmatch(path) for regex in allow)
            or path in plan.trusted
        ):
            raise InfrastructureError(f"the agent's box gave a file that was not asked for: {path[:200]!r}")
        files[path], modes[path] = base64.b64decode(text, validate=True), int(mode) & 0o777
    if found["count"] > plan.limits.files or found["size"] > plan.limits.size:
        raise DiffError(f"the diff has more than {plan.limits.files} files or {plan.limits.size} bytes")
    if len(files) > plan.limits.files or sum(map(len, files.values())) > plan.limits.size:
        raise InfrastructureError("the agent's box gave more files than were asked for")
    known = set(found["same"]) | set(found["gone"])
    changed = {path for path in plan.base if path in plan.trusted and path not in known}
    gone = [path for path in found["gone"] if path in plan.base]
    return Diff(
        files=files,
        gone=tuple(path for path in gone if any(regex.fullmatch(path) for regex in allow)),
        left_out=tuple(LeftOut(printable(str(path)), printable(str(why))) for path, why in found["left"]),
        more_left_out=int(found["more"]),
        tampered=tuple(sorted(changed | (set(gone) & set(plan.trusted)))),
        leaks=tuple(printable(str(path)) for path in found["leaks"]),
        mentions=tuple((printable(str(path)), printable(str(word))) for path, word in found["mentions"]),
        elsewhere=tuple(printable(str(path)) for path in found["elsewhere"]),
        modes=modes,
    )


async def prepare(box: RemoteBox, capabilities: Capabilities, plan: Plan) -> Diff:
    """Freezes a box, ends its processes and reads its diff.

    Raises:
        DiffError: It is more than the plan allows.
        SandboxError: The box is gone, or could not be read.
    """
    await freeze(box, capabilities)
    await thaw_and_kill(box, capabilities)
    return await export(box, plan)
