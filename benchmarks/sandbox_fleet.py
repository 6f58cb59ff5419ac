"""What the fleet's sandboxes cost, against plain Docker and SWE-ReX on the same engine in the same run.

    python -m benchmarks.sandbox_fleet [--parts exec,claim,light,live,burst,pause] [--calls 60] [--live 300]

| part | what |
|---|---|
| exec | a command's round trip; ours, `docker exec` and SWE-ReX take turns of ten |
| claim | a warm sandbox and its first command, against plain Docker (create, start, first exec) and SWE-ReX |
| light | until a sandbox of the light tier is ready |
| live | many sandboxes at once: memory each, exec against that of a single one, processor time |
| burst | creates all at once, also beyond what the warm pool holds, against plain Docker's start rate |
| pause | to pause a sandbox, and to fork a light one |

Ratios are measured side by side, under whatever load there is. Times that have a bound of their own are
measured once more at real-time priority where that is permitted: what they take on a quiet machine. The last
line holds the figures; the exit status is 1 when one misses its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sandbox_exec import realtime
from benchmarks.sandbox_figures import Figure, p50, p95, table, timed
from benchmarks.sandbox_peers import PlainDocker, SweRex
from sandbox.client import Fleet, RemoteBox
from sandbox.errors import RefusedError
from sandbox.types import SandboxSpec

SPEC = SandboxSpec(journal=False)
GROUP = 8
TURN, SETTLE_S = 10, 0.2
_MIB = 1 << 20


@asynccontextmanager
async def fleet_of(backend: str) -> AsyncGenerator[Fleet]:
    """A fleet on a node of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with await Fleet.connect(state_dir=Path(folder), owner="bench", backend=backend) as fleet:
            yield fleet


async def exec_ratio(calls: int, peer: SweRex | None) -> list[Figure]:
    """Round trips of ours, plain Docker's and the peer's in turns."""
    plain, ours, engine, theirs = PlainDocker(), list[float](), list[float](), list[float]()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(fleet_of("docker"))
        box = await stack.enter_async_context(await fleet.create(SPEC))
        container = stack.enter_context(plain.one())
        runtime = await stack.enter_async_context(peer.box()) if peer else None
        turns: list[tuple[list[float], Callable[[], Awaitable[object]]]] = [
            (ours, lambda: box.exec(["true"])),
            (engine, lambda: asyncio.to_thread(plain.exec, container)),
        ]
        if peer:
            turns.append((theirs, lambda: peer.exec(runtime)))
        for _ in range(max(calls // TURN, 3)):
            for times, call in turns:
                await call()
                times += [await timed(call) for _ in range(TURN)]
                await asyncio.sleep(SETTLE_S)  # what one leaves to be done is not the next one's
    figures = [
        Figure("exec", "docker exec p50 / ours", p50(engine) / p50(ours), "x", least=25),
        Figure("exec", "ours beside them p50", p50(ours), "ms"),
        Figure("exec", "docker exec p50", p50(engine), "ms"),
    ]
    if theirs:
        figures += [
            Figure("exec", "SWE-ReX execute p50 / ours", p50(theirs) / p50(ours), "x"),
            Figure("exec", "SWE-ReX execute p50", p50(theirs), "ms"),
        ]
    return figures


async def exec_alone(calls: int) -> list[Figure]:
    """Round trips of ours, one after the other, and with a pause between."""
    figures: list[Figure] = []
    for backend in ("docker", "bubblewrap"):
        async with fleet_of(backend) as fleet, await fleet.create(SPEC) as box:
            await asyncio.sleep(SETTLE_S)  # what a start leaves to be done
            for pause_s, how, most in ((0.0, "", 2.0), (0.004, " after a pause", None)):
                times = list[float]()
                await box.exec(["true"])
                for _ in range(3 * calls):
                    times.append(await timed(lambda box=box: box.exec(["true"])))
                    await asyncio.sleep(pause_s)
                figures.append(Figure("exec", f"{backend}{how} p50", p50(times), "ms", most=most))
                figures.append(Figure("exec", f"{backend}{how} p95", p95(times), "ms"))
    return figures


async def claim_times(fleet: Fleet, count: int, times: int) -> list[float]:
    """Claims `count` warm sandboxes again and again, each with its first command; milliseconds."""
    found: list[float] = []
    deadline = time.monotonic() + 120
    while len(found) < times:
        start = time.perf_counter()
        try:
            boxes = await fleet.claim(SPEC, count, fallback="refuse", wait_s=0)
        except RefusedError:  # the pool is being filled again
            assert time.monotonic() < deadline, "the pool does not fill"
            await asyncio.sleep(0.05)
            continue
        await asyncio.gather(*(box.exec(["true"]) for box in boxes))
        found.append(1e3 * (time.perf_counter() - start))
        await asyncio.gather(*(box.close() for box in boxes))
        await asyncio.sleep(SETTLE_S)
    return found


async def claim_ratio(calls: int, peer: SweRex | None) -> list[Figure]:
    """A warm sandbox against one started for the purpose, in turns."""
    plain, ours, engine, theirs = PlainDocker(), list[float](), list[float](), list[float]()
    rounds = max(calls // 5, 8)
    async with fleet_of("docker") as fleet:
        await fleet.warm(SPEC, GROUP)
        for _ in range(rounds):
            ours += await claim_times(fleet, 1, 1)
            start = time.perf_counter()
            container = await asyncio.to_thread(plain.ready)
            engine.append(1e3 * (time.perf_counter() - start))
            await asyncio.to_thread(container.remove, force=True)
            if peer:
                start = time.perf_counter()
                async with peer.box() as runtime:
                    await peer.exec(runtime)
                    theirs.append(1e3 * (time.perf_counter() - start))
        groups = await claim_times(fleet, GROUP, max(rounds // 3, 3))
    figures = [
        Figure("claim", "plain Docker ready p50 / warm claim", p50(engine) / p50(ours), "x", least=8),
        Figure("claim", "warm claim and first command p50", p50(ours), "ms"),
        Figure("claim", "plain Docker create, start, first exec p50", p50(engine), "ms"),
        Figure("claim", f"a group of {GROUP}, whole, p50", p50(groups), "ms"),
    ]
    if theirs:
        figures.append(Figure("claim", "SWE-ReX ready and first command p50", p50(theirs), "ms"))
    return figures


async def claim_alone(calls: int) -> list[Figure]:
    """Claims while nothing else runs."""
    async with fleet_of("docker") as fleet:
        await fleet.warm(SPEC, GROUP)
        times = await claim_times(fleet, 1, max(calls // 3, 8))
    return [Figure("claim", "claim and first command p50", p50(times), "ms", most=40)]


async def light_alone(calls: int) -> list[Figure]:
    """Starts of the light tier, one after the other."""
    times = list[float]()
    async with fleet_of("bubblewrap") as fleet:
        await (await fleet.create(SPEC)).close()  # the first builds the toolkit
        for _ in range(calls):
            start = time.perf_counter()
            box = await fleet.create(SPEC)
            times.append(1e3 * (time.perf_counter() - start))
            await box.close()
    return [
        Figure("light", "ready p50", p50(times), "ms", most=25),
        Figure("light", "ready p95", p95(times), "ms"),
    ]


def processes_of(fleet: Fleet) -> list[psutil.Process]:
    """Returns the node and all it started."""
    node = psutil.Process(fleet.node_pid)
    return [node, *node.children(recursive=True)]


def memory_bytes(processes: list[psutil.Process]) -> int:
    """Returns the memory of processes, with shared pages divided among those that share them."""
    total = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # a fork that waited and was let go
            total += process.memory_full_info().pss
    return total


def cpu_s(processes: list[psutil.Process]) -> float:
    """Returns the processor time of processes and of their children that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


async def live(count: int, calls: int) -> list[Figure]:
    """Many light sandboxes at once.

    The one and the many are compared after the first command of each, which has a figure of its own.
    """
    async with fleet_of("bubblewrap") as fleet:
        first = await fleet.create(SPEC)
        single = [await timed(lambda: first.exec(["true"])) for _ in range(3 * calls)]
        before, spent = memory_bytes(processes_of(fleet)), cpu_s(processes_of(fleet))
        start = time.perf_counter()
        boxes = [first, *await made(fleet, count - 1)]
        seconds = time.perf_counter() - start
        there = processes_of(fleet)
        each = (memory_bytes(there) - before) / (count - 1) / _MIB
        creation = (cpu_s(there) - spent) / (count - 1)
        firsts = [await timed(lambda box=box: box.exec(["true"])) for box in boxes[1:]]
        draw = random.Random(0)
        many = [await timed(lambda: draw.choice(boxes).exec(["true"])) for _ in range(3 * calls)]
        idle = cpu_s(there)
        await asyncio.sleep(5)
        idle = (cpu_s(there) - idle) / 5 / count
        alive = await asyncio.gather(*(box.exec(["true"]) for box in boxes))
        assert len(alive) == count and all(result.exit_code == 0 for result in alive)
    return [
        Figure("live", f"{count} live: memory each", each, "MiB", most=10),
        Figure("live", f"exec p95 with {count} / with one", p95(many) / p95(single), "x", most=2),
        Figure("live", f"exec p95 with {count} live", p95(many), "ms"),
        Figure("live", "first command of each p50", p50(firsts), "ms"),
        Figure("live", "processor time of a creation", 1e3 * creation, "ms"),
        Figure("live", "processor time of an idle sandbox", 1e3 * idle, "ms/s"),
        Figure("live", "created a second", (count - 1) / seconds, "/s"),
    ]


async def made(fleet: Fleet, count: int) -> list[RemoteBox]:
    """Creates `count` sandboxes at once; those refused for the rate of starts ask again."""
    return await asyncio.gather(*(fleet.create(SPEC, wait_s=300) for _ in range(count)))


async def plain_starts(count: int, bare: bool = False) -> float:
    """Returns how many containers plain Docker creates and starts a second, 16 at once."""
    plain, limit, running = PlainDocker(), asyncio.Semaphore(16), list[Any]()

    async def one() -> None:
        async with limit:
            running.append(await asyncio.to_thread(plain.start, bare))

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    rate = count / (time.perf_counter() - start)
    await asyncio.gather(*(asyncio.to_thread(container.remove, force=True) for container in running))
    return rate


async def burst(count: int) -> list[Figure]:
    """Creates all at once on Docker: from nothing, and with a pool that is soon exhausted.

    Plain Docker's starts are what `docker run --detach --init --network none` does: create and start. Ours
    are counted when the agent has answered and the lease is on disk, under all limits. Docker's own part of
    a network, which it prepares even for `none`, is what ours do without; so the rate of plain containers
    that do without it too stands beside it.
    """
    some, figures = min(count, 60), list[Figure]()
    async with fleet_of("docker") as fleet:
        for name, pool in (("without a pool", 0), (f"with a pool of {GROUP}", GROUP)):
            plain_rate, bare_rate = await plain_starts(some), await plain_starts(some, bare=True)
            if pool:
                await fleet.warm(SPEC, pool)
                await asyncio.sleep(pool)  # a second each is more than a start takes
            start = time.perf_counter()
            outcomes = await asyncio.gather(*(outcome(fleet, bool(pool)) for _ in range(count)))
            seconds = time.perf_counter() - start
            said = Counter(o if isinstance(o, str) else "made" for o in outcomes)
            boxes = [o for o in outcomes if isinstance(o, RemoteBox)]
            untyped = sum(n for what, n in said.items() if what.startswith("!"))
            rate = len(boxes) / seconds
            told = ", ".join(f"{n} {what}" for what, n in sorted(said.items()))
            figures += [
                Figure("burst", "plain Docker starts, 16 at once", plain_rate, "/s"),
                Figure("burst", "the same without its part of the network", bare_rate, "/s"),
                Figure(
                    "burst",
                    f"{count} {name}: made or refused in kind",
                    count - untyped,
                    "",
                    least=count,
                    note=told,
                ),
                Figure("burst", f"{name}: starts against plain Docker's", rate / plain_rate, "x", least=1.0),
                Figure("burst", f"{name}: against those without a network", rate / bare_rate, "x"),
            ]
            await asyncio.gather(*(box.close() for box in boxes))
    return figures


async def outcome(fleet: Fleet, claimed: bool) -> RemoteBox | str:
    """Returns a sandbox, or in a word why there is none; a word with `!` is not a refusal."""
    try:
        if claimed:
            return (await fleet.claim(SPEC, 1, fallback="create", wait_s=300))[0]
        return await fleet.create(SPEC, wait_s=300)
    except RefusedError as error:
        return f"refused ({error.reason})"
    except Exception as error:  # whatever it is, it is counted against us
        return f"!{type(error).__name__}"


async def pause_alone(calls: int) -> list[Figure]:
    """Pauses of both tiers, forks of the light one."""
    figures: list[Figure] = []
    for backend in ("docker", "bubblewrap"):
        times = list[float]()
        async with fleet_of(backend) as fleet, await fleet.create(SPEC) as box:
            for _ in range(calls):
                times.append(await timed(box.pause))
                await box.resume()
        figures.append(Figure("pause", f"{backend} p50", p50(times), "ms", most=20))
    forks = list[float]()
    async with fleet_of("bubblewrap") as fleet, await fleet.create(SPEC) as box:
        await box.write_file("/workspace/data", os.urandom(_MIB))
        for _ in range(calls):
            start = time.perf_counter()
            (child,) = await box.fork(1)
            forks.append(1e3 * (time.perf_counter() - start))
            await child.close()
    return [*figures, Figure("pause", "fork of a light sandbox with 1 MiB p50", p50(forks), "ms", most=50)]


def alone(arguments: argparse.Namespace) -> list[Figure]:
    """Runs the parts whose times have bounds of their own, in a child at real-time priority."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.sandbox_fleet",
        "--alone",
        "--parts",
        ",".join(arguments.parts),
    ]
    done = subprocess.run([*command, "--calls", str(arguments.calls)], stdout=subprocess.PIPE, check=True)
    return [Figure(**figure) for figure in json.loads(done.stdout.splitlines()[-1])]


async def measured_alone(arguments: argparse.Namespace) -> list[Figure]:
    """Returns the figures of the child."""
    parts: dict[str, Callable[[int], Awaitable[list[Figure]]]] = {
        "exec": exec_alone, "claim": claim_alone, "light": light_alone, "pause": pause_alone,
    }  # fmt: skip
    note = "" if realtime() else "not at real-time priority"
    found = [
        figure
        for name, part in parts.items()
        if name in arguments.parts
        for figure in await part(arguments.calls)
    ]
    return [Figure(**{**asdict(figure), "note": note}) for figure in found]


async def measured(arguments: argparse.Namespace) -> list[Figure]:
    """Runs the parts and prints as it goes."""
    peer = None if arguments.no_peer else SweRex()
    parts: dict[str, Callable[[], Awaitable[list[Figure]]]] = {
        "exec": lambda: exec_ratio(arguments.calls, peer),
        "claim": lambda: claim_ratio(arguments.calls, peer),
        "live": lambda: live(arguments.live, arguments.calls),
        "burst": lambda: burst(arguments.burst),
    }
    figures: list[Figure] = []
    for name, part in parts.items():
        if name in arguments.parts:
            found = await part()
            table(found)
            figures += found
    return figures


def main() -> None:
    """Measures and prints."""
    every = ["exec", "claim", "light", "live", "burst", "pause"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=every)
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--live", type=int, default=300)
    parser.add_argument("--burst", type=int, default=200)
    parser.add_argument("--no-peer", action="store_true", help="leave SWE-ReX out")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(every):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    if arguments.alone:
        print(json.dumps([asdict(figure) for figure in asyncio.run(measured_alone(arguments))]))
        return
    figures = asyncio.run(measured(arguments))
    quiet = alone(arguments)
    table(quiet)
    figures += quiet
    bounded = [figure for figure in figures if figure.most is not None or figure.least is not None]
    held = sum(figure.holds for figure in bounded)
    values = "; ".join(
        f"{figure.part} {figure.name} {figure.value:.3g} {figure.unit}".strip() for figure in bounded
    )
    print(f"load {os.getloadavg()[0]:.1f}; {values}; held {held}/{len(bounded)}")
    raise SystemExit(0 if held == len(bounded) else 1)


if __name__ == "__main__":
    main()
