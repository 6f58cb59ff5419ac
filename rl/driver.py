"""The driver: starts the processes of a run, lets the recipe use them, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from rl import build
from rl.actors import Cluster, Process, publish, start_ray, stop_ray
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.launch.config import RunConfig
from rl.launch.run import RunFolder
from rl.recipe import Outcome, Recipe
from rl.trainers.learner import open_learner
from rl.watch.watch import Watch
from sandbox.backends.registry import choose
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
    await _reclaim(watch)
    if build.environment(config).sandbox is not None:
        backend = await choose(config.sandbox.backend)
        watch.note(f"tools run in {backend.name} sandboxes")
    async with _processes(config, folder, watch, ray_actors) as (learner, generator):
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


async def _reclaim(watch: Watch) -> None:
    found = await Fleet.reclaim(fleet_state())
    if found.total:
        owners = ", ".join(f"{count} of {owner}" for owner, count in found.sandboxes.items())
        watch.note(f"removed {found.total} sandboxes that earlier runs had left ({owners})")


@contextlib.asynccontextmanager
async def _processes(
    config: RunConfig, folder: RunFolder, watch: Watch, ray_actors: bool
) -> AsyncIterator[tuple[Process, Process]]:
    owner = f"{folder.name}/attempt-{folder.attempt}"
    started: list[Process] = []
    if ray_actors:
        watch.phase("start Ray", 0, 1)
        start_ray(config.launcher.address, f"tempering-{owner}", config.launcher.object_store_bytes)
    try:
        cluster = Cluster(folder.logs, ray_actors)
        watch.phase("start the learner and the generator", 0, 2)
        sides = (
            ("learner", open_learner, config, folder.checkpoints),
            ("generator", build.open_generator, config, folder.token_log, fleet_state(), owner),
        )
        for opening in asyncio.as_completed([cluster.open(*side) for side in sides]):
            started.append(await opening)
        learner, generator = sorted(started, key=lambda process: process.role, reverse=True)
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
