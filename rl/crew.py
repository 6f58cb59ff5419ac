"""The processes of a run at work together: opened at once, replaced one by one, closed in any case."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl import build
from rl.actors import Cluster, Process
from rl.colocated import open_colocated
from rl.controller import Publisher as Publish
from rl.environments import keeps_state
from rl.helpers import Helpers
from rl.launch.config import Launcher, RunConfig
from rl.launch.run import RunFolder
from rl.placement import Bundle
from rl.publish import Publisher
from rl.replicas import Replica, Replicas
from rl.restarts import Restarts
from rl.trainers.learner import open_learner
from rl.watch.watch import Watch

_STOP_S = 6.0
_BOTH, _LEARNER = "learner and generator", "learner"

Sides = tuple[Any, Any, Publish]
"""Learner and generator, all of whose methods are awaitable, and how weights get from one to the other."""


def fleet_state() -> Path:
    """Returns the folder of this user's sandbox node: `$TEMPERING_HOME/node`, else in the home folder."""
    home = os.environ.get("TEMPERING_HOME") or "~/.tempering"
    return Path(home).expanduser() / "node"


def owner(config: RunConfig, folder: RunFolder) -> str:
    """Returns the name under which sandboxes are held: the run's where they outlive an attempt."""
    if keeps_state(config):
        return str(folder.path)
    return f"{folder.path}/attempt-{folder.attempt}"


def generator_roles(launcher: Launcher) -> list[str]:
    """Returns the names of the generator processes."""
    if launcher.replicas == 1:
        return ["generator"]
    return [f"generator-{i}" for i in range(launcher.replicas)]


def helper_roles(launcher: Launcher) -> list[str]:
    """Returns the names of the processes that help the generators."""
    counts = {"prefill": launcher.prefill_replicas, "encode": launcher.encode_replicas}
    return [f"{kind}-{i}" for kind, count in counts.items() for i in range(count)]


def crew_bundles(launcher: Launcher) -> list[Bundle]:
    """Returns what each process of a run reserves."""
    learner = _resources(launcher.learner_cpus, launcher.learner_gpus)
    replica = _resources(launcher.replica_cpus, launcher.replica_gpus)
    if launcher.placement == "colocated":
        return [Bundle(_BOTH, {k: max(learner.get(k, 0), replica.get(k, 0)) for k in learner | replica})]
    roles = [*generator_roles(launcher), *helper_roles(launcher)]
    return [Bundle(_LEARNER, learner), *(Bundle(role, replica) for role in roles)]


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


@dataclass(frozen=True, slots=True)
class Crew:
    """Opens the processes of one run, as often as it takes."""

    config: RunConfig
    folder: RunFolder
    watch: Watch
    cluster: Cluster
    restarts: Restarts

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[Sides]:
        """Starts all processes, and stops those that are there in the end."""
        started: list[Process] = []
        pools: list[Replicas] = []
        try:
            if self.config.launcher.placement == "colocated":
                both = await self._colocated(started)
                yield both.remote, both.remote, both.remote.publish
            else:
                yield await self._apart(started, pools)
        finally:
            for pool in pools:
                await pool.stop()
                started += [replica.process for replica in pool.replicas]
            await asyncio.gather(*(self._stop(process) for process in dict.fromkeys(started)))

    async def _apart(self, started: list[Process], pools: list[Replicas]) -> Sides:
        """Starts every process that there is and joins them; what did start is in `started` or `pools`."""
        launcher, note = self.config.launcher, self.watch.note
        processes = await self._split(started)
        del started[1:]
        replicas = Replicas(processes[: launcher.replicas], self._replica, self.restarts, note)
        pools.append(replicas)
        learner, helpers = started[0], None
        if launcher.prefill_replicas:
            helping = processes[launcher.replicas :]
            helpers = Helpers(helping, launcher.prefill_replicas, replicas, self._helper, self.restarts, note)
            pools.append(helpers)
        publisher = Publisher(learner, pools, launcher.weights, launcher.weights_deadline_s)

        async def prepare(replica: Replica) -> None:
            await publisher.catch_up(replica)
            if helpers is not None:
                await helpers.introduce(replica)

        replicas.prepare_successors(prepare)
        if helpers is None:
            return learner.remote, replicas, publisher
        helpers.prepare_successors(publisher.catch_up)
        await helpers.begin()
        replicas.before_collect(helpers.check)
        return learner.remote, replicas, publisher

    async def _colocated(self, started: list[Process]) -> Process:
        self.watch.phase("start the process that trains and generates", 0, 1)
        (bundle,) = crew_bundles(self.config.launcher)
        folder = self.folder
        where = (self.config, folder.checkpoints, folder.token_log, fleet_state(), owner(self.config, folder))
        started.append(await self.cluster.open("colocated", bundle, open_colocated, *where))
        return started[0]

    async def _split(self, started: list[Process]) -> list[Process]:
        """Starts the learner and all replicas at the same time; `started` gets those that did, in order."""
        config, count = self.config, self.config.launcher.replicas
        helpers = len(helper_roles(config.launcher))
        self.watch.phase("start the learner and the generator", 0, 1 + count + helpers)
        bundle = crew_bundles(config.launcher)[0]
        opening = await asyncio.gather(
            self.cluster.open(_LEARNER, bundle, open_learner, config, self.folder.checkpoints),
            *(self._replica(i) for i in range(count)),
            *(self._helper(i) for i in range(helpers)),
            return_exceptions=True,
        )
        started += [process for process in opening if isinstance(process, Process)]
        for failure in opening:
            if isinstance(failure, BaseException):
                raise failure
        return started[1:]

    async def _replica(self, index: int) -> Process:
        """Starts a replica on its own token log, which holds what a process before it left."""
        launcher, folder = self.config.launcher, self.folder
        role = generator_roles(launcher)[index]
        log = folder.token_log if launcher.replicas == 1 else folder.token_log / role
        return await self.cluster.open(
            role,
            crew_bundles(launcher)[1 + index],
            build.open_generator,
            self.config,
            log,
            fleet_state(),
            owner(self.config, folder),
        )

    async def _helper(self, index: int) -> Process:
        """Starts an engine of one role."""
        launcher = self.config.launcher
        role = helper_roles(launcher)[index]
        bundle = crew_bundles(launcher)[1 + launcher.replicas + index]
        return await self.cluster.open(role, bundle, build.open_helper, self.config, role.partition("-")[0])

    async def _stop(self, process: Process) -> None:
        try:
            async with asyncio.timeout(_STOP_S):
                await process.stop()
        except Exception as error:
            self.watch.note(f"the {process.role} did not stop cleanly ({type(error).__name__}: {error})")
            with suppress(Exception):
                await process.kill()  # its successor is to have its place and its token log
