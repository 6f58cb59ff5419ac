"""How long new weights hold an engine up: `python -m benchmarks.weight_updates [--width N] [--updates N]`.

A learner in a process of its own publishes versions of the weights to an engine that decodes all the time, by
each medium. For every update the gap between the last token before the swap and the first after it is taken,
less one decode step: the pause. The last line is

    weights pause P ms bound B ms bytes N M.MM GB/s

with the longest pause of shared memory and its bound, one decode step and 50 ms; exit status 1 when it is
beyond it, or when an update did not reach the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import torch

from model.config import PolicyConfig
from model.engine.sampler import SamplingParams
from model.policy import Policy
from rl.collective import CollectiveInbox, CollectiveOutbox
from rl.engines.base import GenerateRequest, StepFrame
from rl.engines.native import NativeEngine
from rl.publish import outbox
from rl.transports import Inbox, Medium, Rendezvous

_MEDIA: tuple[Medium, ...] = ("shared_memory", "object_store", "collective")
_REQUESTS, _CONTEXT, _ALLOWED_S, _DEADLINE_S = 16, 8192, 0.05, 120.0


def policy(width: int) -> Policy:
    """A nano policy whose layers are `width` wide."""
    config = replace(
        PolicyConfig.preset("nano"),
        hidden_size=width,
        moe_intermediate_size=width,
        max_position_embeddings=2 * _CONTEXT,
    )
    made = Policy(config)
    made.reset_parameters(0)
    return made


@dataclass(slots=True)
class Steps:
    """When each decode step gave its tokens, and the version that sampled them."""

    times: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def heard(self, frame: StepFrame) -> None:
        """The engine's listener."""
        self.times.append(time.perf_counter())
        self.versions.append(frame.policy_version)

    def pauses(self) -> tuple[float, list[float]]:
        """The median decode step, and for each change of version the gap around it less one step."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        changed = [i for i in range(len(gaps)) if self.versions[i] != self.versions[i + 1]]
        step = statistics.median(gap for i, gap in enumerate(gaps) if i not in set(changed))
        return step, [max(gaps[i] - step, 0.0) for i in changed]


@dataclass(frozen=True, slots=True)
class Result:
    """What the updates by one medium took; `gb_per_s` counts from packing to the swap."""

    medium: Medium
    step_s: float
    pauses_s: list[float]
    swap_s: list[float]
    size: int
    gb_per_s: float


def learner(line: Connection, medium: Medium, width: int) -> None:
    """The learner's process: packs and hands out a version for each word it hears."""
    torch.set_num_threads(1)
    net, version = policy(width), 0
    box = outbox(medium, lambda: (net.state_dict(), version))

    async def serve() -> None:
        nonlocal version
        if isinstance(box, CollectiveOutbox):
            address = box.meet(_DEADLINE_S)
            line.send(address)
            await box.join(Rendezvous(address, 0, 2, _DEADLINE_S))
        while line.recv():
            version += 1
            box.offer()
            line.send(box.parcel())
            await box.deliver(_DEADLINE_S)

    asyncio.run(serve())


async def measure(medium: Medium, width: int, updates: int) -> Result:
    """Decodes while updates arrive."""
    context = multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    process = context.Process(target=learner, args=(other, medium, width))
    process.start()
    steps, net = Steps(), policy(width)
    engine = NativeEngine(net, max_requests=_REQUESTS, max_tokens=_CONTEXT, on_step=steps.heard)
    inbox = Inbox(engine) if medium != "collective" else CollectiveInbox(engine, torch.device("cpu"))
    if isinstance(inbox, CollectiveInbox):
        address = await asyncio.to_thread(line.recv)
        await inbox.join(Rendezvous(address, 1, 2, _DEADLINE_S))
    sampling = SamplingParams(max_tokens=_CONTEXT - 8, stop_ids=frozenset({net.config.vocab_size}))
    turns = [
        asyncio.create_task(engine.generate(GenerateRequest(f"s{i}", 0, (1, 2, i % 60), sampling)))
        for i in range(_REQUESTS)
    ]
    reports, seconds = [], []
    for _ in range(updates):
        target = len(steps.times) + 10
        while len(steps.times) < target:  # noqa: ASYNC110  steps have no event to wait for
            await asyncio.sleep(0.005)
        started = time.perf_counter()
        line.send(True)
        reports.append(await inbox.receive(await asyncio.to_thread(line.recv)))
        seconds.append(time.perf_counter() - started)
    line.send(False)
    await asyncio.to_thread(process.join)
    await engine.close()
    for turn in await asyncio.gather(*turns):
        assert list(turn.policy_versions) == sorted(turn.policy_versions), "versions only grow"
    step, pauses = steps.pauses()
    size = int(reports[0]["bytes"])
    rate = size / statistics.median(seconds) / 1e9
    return Result(medium, step, pauses, [report["pause_s"] for report in reports], size, rate)


def main() -> int:
    """Measures every medium and prints the longest pause."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_updates", description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{'medium':<14} {'bytes':>12} {'step ms':>8} {'pause ms: median':>17} {'max':>7} {'swap ms':>8} GB/s"
    )
    results = {}
    for medium in _MEDIA:
        result = asyncio.run(measure(medium, arguments.width, arguments.updates))
        results[medium] = result
        print(
            f"{medium:<14} {result.size:>12,} {1e3 * result.step_s:>8.1f} "
            f"{1e3 * statistics.median(result.pauses_s):>17.1f} {1e3 * max(result.pauses_s):>7.1f} "
            f"{1e3 * statistics.median(result.swap_s):>8.1f} {result.gb_per_s:.2f}"
        )
    one = results["shared_memory"]
    longest, bound = max(one.pauses_s), one.step_s + _ALLOWED_S
    print(
        f"weights pause {1e3 * longest:.1f} ms bound {1e3 * bound:.1f} ms bytes {one.size} "
        f"{one.gb_per_s:.2f} GB/s"
    )
    return int(longest > bound or len(one.pauses_s) != arguments.updates)


if __name__ == "__main__":
    sys.exit(main())
