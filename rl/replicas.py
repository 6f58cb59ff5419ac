"""Several generator processes as one: samples go to the least loaded, and outlive the process they run in.

Each replica has a token log of its own. When a replica dies, a successor opens the dead one's log: what had
finished is collected from there, what had not goes on at its next token, and what the log had not seen yet is
submitted again. So every sample comes out once, whoever dies, and no sample changes its replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from envs.types import Trajectory, TrajectoryKey
from rl.actors import Process
from rl.restarts import ProcessDiedError, Restarts
from rl.rollout.assignment import Assignment, Purpose
from rl.rollout.frames import Damage
from rl.rollout.resume import Recovered

OpenReplica = Callable[[int], Awaitable[Process]]
"""Starts the process of a replica, by its number, on that replica's token log."""

T = TypeVar("T")
_Sample = tuple[Purpose, TrajectoryKey]


@dataclass(slots=True, eq=False)
class Replica:
    """One generator process, its successors included; `running` are its samples (None: known to its log).

    `logged` are samples of its log that nobody goes on with yet.
    """

    index: int
    process: Process
    generation: int = 0
    running: dict[_Sample, Assignment | None] = field(default_factory=dict)
    logged: set[TrajectoryKey] = field(default_factory=set)
    recovered: list[Trajectory] = field(default_factory=list)
    poll: asyncio.Task[list[Trajectory]] | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def take(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """Notes that these samples have ended here."""
        for trajectory in trajectories:
            for sample in ((Purpose.TRAIN, trajectory.key), (Purpose.EVAL, trajectory.key)):
                if sample in self.running:
                    del self.running[sample]
                    break
        return list(trajectories)


class Replicas:
    """Implements the controller's and the recipe's generator over several processes.

    Args:
        processes: The replicas, just started, in order.
        reopen: Starts a successor of one.
        restarts: Bounds how often.
        note: Takes a line for the operator.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        reopen: OpenReplica,
        restarts: Restarts,
        note: Callable[[str], None],
    ) -> None:
        self.replicas = [Replica(i, process) for i, process in enumerate(processes)]
        self._reopen, self._restarts, self._note = reopen, restarts, note
        self._prepare: Callable[[Replica], Awaitable[None]] | None = None
        self._version = 0
        self.version_published = False
        self._check: Callable[[], None] | None = None

    def prepare_successors(self, prepare: Callable[[Replica], Awaitable[None]]) -> None:
        """Sets what a successor needs before it samples: the present weights."""
        self._prepare = prepare

    def before_collect(self, check: Callable[[], None]) -> None:
        """Sets what each `collect` asks first; its error is the caller's."""
        self._check = check

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Starts samples, each group on the replica that has the fewest: members share their prompt there."""
        shares: dict[int, list[Assignment]] = {}
        loads = {replica.index: len(replica.running) for replica in self._available()}
        homes: dict[tuple[Purpose, int], int] = {}
        for assignment in assignments:
            group = (assignment.purpose, assignment.key.group)
            home = homes.setdefault(group, min(loads, key=lambda i: (loads[i], i)))
            loads[home] += 1
            shares.setdefault(home, []).append(assignment)
        await at_once(self._submit(self.replicas[i], share) for i, share in shares.items())

    async def collect(self, max_wait_s: float) -> list[Trajectory]:
        """Returns finished samples of all replicas, waiting at most `max_wait_s` for the first."""
        if self._check is not None:
            self._check()
        for replica in self.replicas:
            if replica.poll is None:
                replica.poll = asyncio.create_task(self._poll(replica, max_wait_s))
        polls = [replica.poll for replica in self.replicas if replica.poll is not None]
        await asyncio.wait(polls, timeout=max_wait_s, return_when=asyncio.FIRST_COMPLETED)
        return [trajectory for replica in self.replicas for trajectory in self._polled(replica)]

    async def interrupt(self) -> list[Trajectory]:
        """Stops all samples at a token boundary and returns those that had finished."""
        await at_once(self._interrupt(replica) for replica in self.replicas)
        polls = [replica.poll for replica in self.replicas if replica.poll is not None]
        if polls:
            await asyncio.wait(polls)
        return [trajectory for replica in self.replicas for trajectory in self._polled(replica)]

    async def recover(self, version: int) -> Recovered:
        """Returns what all logs of earlier processes hold, and remembers which log holds what."""
        self._version = version
        parts: list[Recovered] = await self._all("recover", version)
        for replica, part in zip(self.replicas, parts, strict=True):
            replica.logged = set(part.unfinished)
        return Recovered(
            tuple(t for part in parts for t in part.finished),
            tuple(key for part in parts for key in part.unfinished),
            sum(part.lost_tokens for part in parts),
            _together([part.damage for part in parts]),
        )

    async def resubmit(self, keys: Sequence[TrajectoryKey]) -> None:
        """Goes on with recovered samples, each in the replica whose log holds it."""

        async def go_on(replica: Replica) -> None:
            async with replica.lock:
                own = [key for key in keys if key in replica.logged]
                replica.logged.clear()
                replica.running |= {(Purpose.TRAIN, key): None for key in own}
                await self._under_lock(replica, "resubmit", own)

        await at_once(go_on(replica) for replica in self.replicas)

    async def consumed(self, keys: Sequence[TrajectoryKey]) -> None:
        """Lets all token logs forget samples."""
        await self._all("consumed", list(keys))

    async def stats(self) -> dict[str, float]:
        """Counters of all replicas: sums, but the worst lag and the mean of shares and of busy seconds."""
        parts: list[dict[str, float]] = await self._all("stats")
        merged = {name: [p[name] for p in parts if name in p] for name in {n for p in parts for n in p}}
        totals = {name: _total(name, values) for name, values in sorted(merged.items())}
        loads = [float(len(replica.running)) for replica in self.replicas]
        return totals | {
            "sys/replicas.count": float(len(loads)),
            "sys/replicas.restarts": float(self._restarts.total),
            "sys/replicas.load_max": max(loads),
            "sys/replicas.load_min": min(loads),
        }

    async def alarms(self) -> list[str]:
        """What held the replicas' event loops up."""
        return [text for part in await self._all("alarms") for text in part]

    async def each(self, ask: Callable[[Replica], Awaitable[Any]]) -> list[Any]:
        """Asks every replica; one that dies of it is replaced: its successor is prepared, not asked.

        Its place in the answer is None.
        """

        async def one(replica: Replica) -> Any:
            async with replica.lock:
                try:
                    return await ask(replica)
                except ProcessDiedError as death:
                    if death.role != replica.process.role:
                        raise
                    await self._succeed(replica, death)
                    return None

        return await at_once(one(replica) for replica in self.replicas)

    async def stop(self) -> None:
        """Ends the polls; the processes stay their owner's to stop."""
        polls = [replica.poll for replica in self.replicas if replica.poll is not None]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)

    def _available(self) -> list[Replica]:
        """The replicas that are not being replaced; all when there is no other."""
        return [r for r in self.replicas if not r.lock.locked()] or self.replicas

    async def _all(self, name: str, *args: Any) -> list[Any]:
        return await at_once(self._ask(replica, name, *args) for replica in self.replicas)

    async def _ask(self, replica: Replica, name: str, *args: Any) -> Any:
        """Calls a method that may be called again; a dead replica's successor answers."""
        while True:
            generation = replica.generation
            try:
                return await replica.process.call(name, *args)
            except ProcessDiedError as death:
                await self._replace(replica, generation, death)

    async def _submit(self, replica: Replica, assignments: list[Assignment]) -> None:
        async with replica.lock:
            replica.running |= {(a.purpose, a.key): a for a in assignments}
            await self._under_lock(replica, "submit", assignments)

    async def _under_lock(self, replica: Replica, name: str, *args: Any) -> None:
        """Calls a method whose samples are noted as running: a successor takes them up by itself."""
        try:
            await replica.process.call(name, *args)
        except ProcessDiedError as death:
            await self._succeed(replica, death)

    async def _interrupt(self, replica: Replica) -> None:
        """Stops its samples, those of a successor that is just being made too; one that follows has none."""
        async with replica.lock:
            while True:
                try:
                    ended = await replica.process.call("interrupt")
                    break
                except ProcessDiedError as death:
                    await self._succeed(replica, death)
            replica.recovered += replica.take(ended)
            replica.running.clear()

    async def _poll(self, replica: Replica, max_wait_s: float) -> list[Trajectory]:
        generation = replica.generation
        try:
            found = await replica.process.call("collect", max_wait_s)
        except ProcessDiedError as death:
            await self._replace(replica, generation, death)
            return []
        # Noted at once, as a successor takes over what is not; it has what comes from the dead only now.
        return replica.take(found) if replica.generation == generation else []

    def _polled(self, replica: Replica) -> list[Trajectory]:
        """What a replica has given since, and what its successor found in the log."""
        found, replica.recovered = replica.recovered, []
        if replica.poll is not None and replica.poll.done():
            poll, replica.poll = replica.poll, None
            found = [*poll.result(), *found]
        if found:
            self._restarts.progress(replica.process.role)
        return found

    async def _replace(self, replica: Replica, generation: int, death: BaseException) -> None:
        """Replaces the process of `generation`, unless that has been done."""
        async with replica.lock:
            if replica.generation == generation:
                await self._succeed(replica, death)

    async def _succeed(self, replica: Replica, death: BaseException) -> None:
        """Starts a successor and gives it the dead one's samples; the caller holds the lock."""
        while True:
            role = replica.process.role
            self._restarts.spend(role, death)
            self._note(f"{death}: a successor takes over its {len(replica.running)} samples")
            with suppress(Exception):
                await replica.process.kill()
            try:
                replica.process = await self._reopen(replica.index)
                replica.generation += 1  # with the process: who still asks the dead one finds it replaced
                if self._prepare is not None:
                    await self._prepare(replica)
                await self._take_over(replica)
                return
            except ProcessDiedError as again:
                if again.role != role:
                    raise  # it waits for another that is dead: that one's owner sees to it
                death = again

    async def _take_over(self, replica: Replica) -> None:
        call, running = replica.process.call, replica.running
        found: Recovered = await call("recover", self._version)
        finished = [t for t in found.finished if (Purpose.TRAIN, t.key) in running]
        unfinished = [key for key in found.unfinished if (Purpose.TRAIN, key) in running]
        logged = {(Purpose.TRAIN, key) for key in [*(t.key for t in finished), *unfinished]}
        fresh = [assignment for sample, assignment in running.items() if sample not in logged]
        known = [assignment for assignment in fresh if assignment is not None]
        assert len(known) == len(fresh), "a sample that came from the log is in the log"
        await call("resubmit", unfinished)
        await call("submit", known)
        replica.recovered += replica.take(finished)
        self._note(
            f"the new {replica.process.role} goes on with {len(unfinished)} samples at their next token, "
            f"found {len(finished)} finished and begins {len(known)}"
        )

    def published(self, version: int) -> None:
        """Notes the newest version, up to which a successor believes what its log says of versions."""
        self._version, self.version_published = version, True


async def at_once(work: Iterable[Awaitable[T]]) -> list[T]:
    """Does work at once; when a part fails, the others come to their end first: none goes on unseen."""
    results: list[T] = []
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


def _total(name: str, values: Sequence[float]) -> float:
    if "loop_lag" in name or name.endswith("pause_seconds"):
        return max(values)
    if name.startswith("quant/") or name.endswith("busy_seconds"):
        return sum(values) / len(values)
    return sum(values)


def _together(parts: Sequence[Damage]) -> Damage:
    return Damage(
        sum(part.damaged_bytes for part in parts),
        sum(part.torn_bytes for part in parts),
        sum(part.places for part in parts),
        [name for part in parts for name in part.unreadable_segments],
    )
