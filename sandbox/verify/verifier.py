"""The protocol: freeze, kill, export a diff, fresh box, trusted tests over it, run, read the parent's report.

The verdict has three states. What the candidate does (hang, exit, fill its disk, use up its memory) is a
failure; a box that is refused, does not start, dies or has no room for our own files is infrastructure, which
is tried again and then must become no score.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from sandbox.client import Fleet
from sandbox.errors import BackendMissingError, PolicyError, SandboxError, SandboxOomError
from sandbox.remote import RemoteBox
from sandbox.types import Verdict
from sandbox.verify import flags
from sandbox.verify.diff import Diff, DiffError, export, freeze, merge, thaw_and_kill
from sandbox.verify.plan import Plan, is_path
from sandbox.verify.report import Flag, Report
from sandbox.verify.run import Ran, run

_OURS = (PolicyError, BackendMissingError)
"""Errors of whoever asked: trying again is no use, and no verdict hides them."""


async def verify(fleet: Fleet, box: RemoteBox, plan: Plan, *, commands: Iterable[str] = ()) -> Report:
    """Judges what an agent left in its box. All processes in it are ended; closing it is the caller's.

    Args:
        fleet: Where the verifier's box is made.
        box: The agent's.
        plan: What counts, and how it is tested.
        commands: What the agent ran, where that is known: for flags only.

    Raises:
        PolicyError: This fleet has no users of their own for candidate and parent (capability
            `separate_users`: run the node as root, or use docker), or does not offer what the plan asks for.
        BackendMissingError: It has no such backend.
    """
    begin = time.monotonic()
    _check(fleet)
    suspicions = flags.of_commands(commands)
    try:
        suspicions += await _denied(box)
        await freeze(box, fleet.capabilities)
        await thaw_and_kill(box, fleet.capabilities)
        diff = await export(box, plan)
    except (DiffError, SandboxOomError) as error:
        report = Report(Verdict.FAIL, str(error), flags=(*suspicions, Flag("resources", str(error))))
    except _OURS:
        raise
    except SandboxError as error:
        report = Report(Verdict.INFRASTRUCTURE, f"the agent's box: {type(error).__name__}: {error}")
    else:
        report = await _judge(fleet, diff, plan, suspicions)
    return replace(report, duration_s=time.monotonic() - begin)


async def verify_files(fleet: Fleet, files: Mapping[str, bytes], plan: Plan) -> Report:
    """Judges files that came another way than from a box, as a policy's answer does.

    Raises:
        ValueError: A path is none, or not among those that the plan allows.
        PolicyError: As for `verify`.
        BackendMissingError: As for `verify`.
    """
    begin = time.monotonic()
    _check(fleet)
    if wrong := [path for path in files if not is_path(path) or path in plan.trusted]:
        raise ValueError(f"a candidate cannot have the file {wrong[0]!r}")
    size = sum(map(len, files.values()))
    if len(files) > plan.limits.files or size > plan.limits.size:
        reason = f"{len(files)} files and {size} bytes are more than the plan allows"
        return Report(Verdict.FAIL, reason, flags=(Flag("resources", reason),))
    report = await _judge(fleet, Diff(files), plan, [])
    return replace(report, duration_s=time.monotonic() - begin)


async def _judge(fleet: Fleet, diff: Diff, plan: Plan, suspicions: list[Flag]) -> Report:
    files, gave_way = merge(plan, diff)
    of_diff = await asyncio.to_thread(flags.of_diff, plan, diff)
    ran, attempts = await _attempts(fleet, plan, files)
    found = [*suspicions, *of_diff, *flags.of_run(ran.tests, ran.output)]
    found += [Flag("tests", f"{left.path} is a trusted file's place") for left in gave_way]
    unique = flags.unique(found)
    fatal = [flag for flag in unique if flag.kind in plan.fatal_kinds]
    verdict, reason = ran.verdict, ran.reason
    if fatal and verdict is Verdict.PASS:
        verdict, reason = Verdict.FAIL, f"{fatal[0].kind}: {fatal[0].detail}"
    return Report(
        verdict,
        reason,
        tests=ran.tests,
        flags=unique,
        changed=tuple(sorted({*diff.files, *diff.gone})),
        left_out=(*diff.left_out, *gave_way),
        more_left_out=diff.more_left_out,
        output=ran.output,
        attempts=attempts,
    )


async def _attempts(fleet: Fleet, plan: Plan, files: Mapping[str, bytes]) -> tuple[Ran, int]:
    why, spec = "", replace(plan.spec, ttl_s=min(plan.spec.ttl_s, 2 * plan.start_s + plan.timeout_s + 120))
    for attempt in range(1, plan.attempts + 1):
        try:
            async with await fleet.create(spec, wait_s=plan.start_s) as box:
                return await run(box, plan, files), attempt
        except _OURS:
            raise
        except SandboxError as error:
            why = f"the verifier's box: {type(error).__name__}: {error}"
    return Ran(Verdict.INFRASTRUCTURE, why), plan.attempts


async def _denied(box: RemoteBox) -> list[Flag]:
    """Flags what the agent tried to reach and was not let."""
    try:
        denials = await box.denials()
    except PolicyError:  # it has no network
        return []
    return [Flag("network", f"was denied {denial.host} ({denial.reason})") for denial in denials]


def _check(fleet: Fleet) -> None:
    if not fleet.capabilities.separate_users:
        raise PolicyError(
            "a verification needs users of their own for the candidate and its judge (separate_users): "
            "run the node as root, or use the docker backend"
        )
