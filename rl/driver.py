"""The driver: starts the processes of a run, lets the recipe use them, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Set
from contextlib import AsyncExitStack, asynccontextmanager

from rl.actors import Cluster
from rl.checkpoint import Checkpoint, CheckpointStore
from rl.crew import Crew, crew_bundles, fleet_state, owner
from rl.environments import connect_fleet, keeps_state, needs_sandbox
from rl.launch.config import RunConfig
from rl.launch.run import RunFolder
from rl.leftovers import end_leftovers
from rl.placement import reserve
from rl.ray_session import start_ray, stop_ray
from rl.recipe import Outcome, Recipe
from rl.restarts import ProcessDiedError, Restarts
from rl.rollout.sandboxes import LastingFleet
from rl.watch.watch import Watch
from sandbox.client import Fleet


async def drive(config: RunConfig, folder: RunFolder, watch: Watch, *, ray_actors: bool = True) -> Outcome:
    """Runs the recipe of `config` in `folder`; when cancelled, stops everything at a token boundary.

    With `ray_actors` False both sides run in this process, one after the other.

    When a generator dies, a successor takes over its samples; when the learner dies, all processes start
    again from the newest checkpoint, and the run goes on.

    Raises:
        SandboxError: No sandbox is to be had.
        PlacementError: The cluster has no room for a process.
        RestartsExhaustedError: A process dies again and again.
        CheckpointError: A run is to be resumed and all its checkpoints are damaged.
    """
    checkpoint = _checkpoint(config, folder, watch)
    if ended := end_leftovers():
        watch.note(f"ended {len(ended)} processes that a killed run had left ({', '.join(sorted(ended))})")
    if config.sandbox.url == "local":
        await _reclaim(watch, {owner(config, folder)} if config.run.resume else set())
    async with AsyncExitStack() as stack:
        if needs_sandbox(config):
            await stack.enter_async_context(_node(config, folder, watch))
        cluster = await stack.enter_async_context(_cluster(config, folder, watch, ray_actors))
        crew = Crew(config, folder, watch, cluster, Restarts(config.launcher.restarts))
        while True:
            try:
                async with crew.at_work() as (learner, generator, publish):
                    recipe = Recipe(config, learner, generator, publish, watch, folder.path)
                    return await recipe.run(checkpoint)
            except ProcessDiedError as death:
                checkpoint = _after(death, checkpoint, folder, crew.restarts, watch)


def _after(
    death: ProcessDiedError, before: Checkpoint | None, folder: RunFolder, restarts: Restarts, watch: Watch
) -> Checkpoint | None:
    """Returns the checkpoint to go on from after the death of a process that holds the run's state."""
    newest = CheckpointStore(folder.checkpoints).latest()
    if newest is not None and (before is None or newest.step > before.step):
        restarts.progress(death.role)
    restarts.spend(death.role, death)
    where = f"the checkpoint of step {newest.step}" if newest is not None else "the beginning"
    watch.note(f"{death}: all processes start again from {where}; samples go on from their token logs")
    return newest


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
    fleet = LastingFleet(lambda: connect_fleet(config, fleet_state(), owner(config, folder)))
    watch.note(f"tools run in {(await fleet.get()).backend} sandboxes ({config.sandbox.url})")
    release = not keeps_state(config)
    try:
        yield
        release = True
    finally:
        await fleet.close(release=release)


@asynccontextmanager
async def _cluster(
    config: RunConfig, folder: RunFolder, watch: Watch, ray_actors: bool
) -> AsyncIterator[Cluster]:
    """Starts or joins Ray, and reserves what the processes need."""
    if not ray_actors:
        yield Cluster(folder.logs)
        return
    watch.phase("start Ray", 0, 1)
    bundles, launcher = crew_bundles(config.launcher), config.launcher
    cpus = sum(bundle.resources.get("CPU", 0.0) for bundle in bundles)
    start_ray(
        launcher.address, f"tempering-{folder.name}-{folder.attempt}", launcher.object_store_bytes, cpus
    )
    try:
        placement = await reserve(bundles, launcher.strategy, launcher.placement_deadline_s)
        try:
            yield Cluster(folder.logs, placement)
        finally:
            placement.release()
    finally:
        stop_ray()
