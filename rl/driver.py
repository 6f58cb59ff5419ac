"""The driver: starts the processes of a run, lets the recipe use them, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Set
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rl import build
from rl.actors import Cluster, Process, publish, start_ray, stop_ray
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.launch.config import RunConfig
from rl.launch.run import RunFolder
from rl.leftovers import end_leftovers
from rl.recipe import Outcome, Recipe
from rl.rollout.sandboxes import LastingFleet, stateless
from rl.trainers.learner import open_learner
from rl.watch.watch import Watch
from sandbox.client import Fleet

_STOP_S = 6.0


async def drive(config: RunConfig, folder: RunFolder, watch: Watch, *, ray_actors: bool = True) -> Outcome:
    """Runs the recipe of `config` in `folder`; when cancelled, stops everything at a token boundary.

    With `ray_actors` False both sides run in this process, one after the other.

    Raises:
        SandboxError: No sandbox is to be had.
        CheckpointError: A run is to be resumed and all its checkpoints are damaged.
    """
    checkpoint = _checkpoint(config, folder, watch)
    if ended := end_leftovers():
        watch.note(f"ended {len(ended)} processes that a killed run had left ({', '.join(sorted(ended))})")
    if config.sandbox.url == "local":
        await _reclaim(watch, {_owner(config, folder)} if config.run.resume else set())
    async with AsyncExitStack() as stack:
        if build.environment(config).sandbox is not None:
            await stack.enter_async_context(_node(config, folder, watch))
        learner, generator = await stack.enter_async_context(_processes(config, folder, watch, ray_actors))
        recipe = Recipe(config, learner.remote, generator.remote, lambda: publish(learner, generator), watch)
        return await recipe.run(checkpoint)


def fleet_state() -> Path:
    """Returns the folder of this user's sandbox node: `$TEMPERING_HOME/node`, else in the home folder."""
    home = os.environ.get("TEMPERING_HOME") or "~/.tempering"
    return Path(home).expanduser() / "node"


def _checkpoint(config: RunConfig, folder: RunFolder, watch: Watch) -> Checkpoint | None:
    if not config.run.resume:
        return None
    checkpoint = CheckpointStore(folder.checkpoints).latest()
    if checkpoint is None:
        watch.note("there is no checkpoint yet: the run starts from its beginning")
        return None
    for reason in checkpoint.skipped:
        watch.note(f"a damaged checkpoint is passed over: {reason}")
    return checkpoint


async def _reclaim(watch: Watch, keep_owners: Set[str]) -> None:
    found = await Fleet.reclaim(fleet_state(), keep_owners)
    if found.total:
        owners = ", ".join(f"{count} of {owner}" for owner, count in found.sandboxes.items())
        watch.note(f"removed {found.total} sandboxes that earlier runs had left ({owners})")


@asynccontextmanager
async def _node(config: RunConfig, folder: RunFolder, watch: Watch) -> AsyncIterator[None]:
    """Starts the sandbox node, or finds it, before anything else: a run without its sandboxes is no run.

    At the end the run's sandboxes end. Those of samples under way in a run that goes on later stay.
    """
    fleet = LastingFleet(lambda: build.connect_fleet(config, fleet_state(), _owner(config, folder)))
    watch.note(f"tools run in {(await fleet.get()).backend} sandboxes ({config.sandbox.url})")
    release = stateless(build.environment(config))
    try:
        yield
        release = True
    finally:
        await fleet.close(release=release)


def _owner(config: RunConfig, folder: RunFolder) -> str:
    """Returns the name under which sandboxes are held: the run's where they outlive an attempt."""
    if stateless(build.environment(config)):
        return f"{folder.path}/attempt-{folder.attempt}"
    return str(folder.path)


@asynccontextmanager
async def _processes(
    config: RunConfig, folder: RunFolder, watch: Watch, ray_actors: bool
) -> AsyncIterator[tuple[Process, Process]]:
    started: list[Process] = []
    if ray_actors:
        watch.phase("start Ray", 0, 1)
        namespace = f"tempering-{folder.name}-{folder.attempt}"
        start_ray(config.launcher.address, namespace, config.launcher.object_store_bytes)
    try:
        cluster = Cluster(folder.logs, ray_actors)
        watch.phase("start the learner and the generator", 0, 2)
        owner = _owner(config, folder)
        sides = [
            cluster.open("learner", open_learner, config, folder.checkpoints),
            cluster.open("generator", build.open_generator, config, folder.token_log, fleet_state(), owner),
        ]
        for opening in asyncio.as_completed(sides):
            started.append(await opening)
        generator, learner = sorted(started, key=lambda process: process.role)
        yield learner, generator
    finally:
        await _stop(started, watch)
        if ray_actors:
            stop_ray()


async def _stop(processes: list[Process], watch: Watch) -> None:
    for process in processes:
        try:
            async with asyncio.timeout(_STOP_S):
                await process.stop()
        except Exception as error:
            watch.note(f"the {process.role} did not stop cleanly ({type(error).__name__}: {error})")
