"""The environments of a run: one, or a mixture; what each side of the run makes of them stands here once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import envs.registry
import rewards
from envs import scaffolds
from envs.agents import inside
from envs.base import Environment
from model.chat import ChatFormat
from rewards import unit_tests
from rl.engines.base import Engine
from rl.launch.config import RunConfig
from rl.rollout.config import RolloutConfigError
from rl.rollout.curriculum import CurriculumStream, load_curriculum
from rl.rollout.dispatch import GroupPlan
from rl.rollout.episode import Door
from rl.rollout.latency import Delays
from rl.rollout.mixture import Interleave, MixedStream, Source, interleaved
from rl.rollout.sandboxes import FleetSandboxes, LastingFleet, stateless
from rl.rollout.stream import TaskStream
from rl.rollout.wal import TokenLog
from rl.rollout.worker import Worker
from rl.trainers.data import Sample, demonstration_samples
from sandbox.client import DEFAULT_LEASE_S, Fleet


def load_environments(config: RunConfig) -> dict[str, Environment]:
    """Returns the environments by their names in this run.

    Raises:
        PluginError: One is unknown or broken, or takes no such option.
    """
    if not config.env.mixture:
        env = envs.registry.load(config.env.name, **config.env.options)
        return {env.name: env}
    return {
        label: envs.registry.load(member.name or label, **member.options)
        for label, member in config.env.mixture.items()
    }


def shares(config: RunConfig, environments: Mapping[str, Environment]) -> dict[str, float]:
    """Returns each environment's share of the groups, in proportion to the others'."""
    mixture = config.env.mixture
    return {name: mixture[name].share if mixture else 1.0 for name in environments}


def open_stream(config: RunConfig) -> MixedStream:
    """Returns the tasks of a run by group number.

    Raises:
        PluginError: An environment or the curriculum cannot be had.
        EmptySplitError: A curriculum has no task to choose from.
    """
    return MixedStream(sources(config), Interleave(shares(config, load_environments(config))))


def sources(config: RunConfig) -> dict[str, Source]:
    """Returns the tasks of each environment by its own count of groups. Raises as `open_stream` does."""
    return {name: _source(config, env) for name, env in load_environments(config).items()}


def _source(config: RunConfig, env: Environment) -> Source:
    split, seed = config.env.train_split, config.run.seed
    efforts = config.effort.draws(seed)
    curriculum = config.rollout.curriculum
    if curriculum is None:
        return TaskStream(env, split, seed, efforts)
    function = load_curriculum(curriculum.function)
    return CurriculumStream(env, split, seed, efforts, function, curriculum.tasks)


def group_plan(config: RunConfig, stream: MixedStream, group: int) -> GroupPlan:
    """Returns the size and the environment of group number `group`."""
    return GroupPlan(config.algorithm.group_size, stream.environment(group))


def demonstrations(config: RunConfig, chat: ChatFormat) -> Iterator[Sample]:
    """Yields demonstrations of all environments that have some, by their shares."""
    environments = load_environments(config)
    efforts = config.effort.draws(config.run.seed).pool()
    parts = {
        name: demonstration_samples(env, chat, config.env.train_split, config.run.seed, efforts=efforts)
        for name, env in environments.items()
    }
    return interleaved(parts, shares(config, environments))


def needs_sandbox(config: RunConfig) -> bool:
    """Whether a tool of some environment runs in a sandbox."""
    return any(env.sandbox is not None for env in load_environments(config).values())


def keeps_state(config: RunConfig) -> bool:
    """Whether some sample has a sandbox of its own, which outlives an attempt at the run."""
    return not all(stateless(env) for env in load_environments(config).values())


async def connect_fleet(config: RunConfig, fleet_state: Path, owner: str) -> Fleet:
    """Connects to the run's sandboxes; those of samples under way outlive a killed run by their lease.

    Raises:
        SandboxError: There is none.
    """
    sandbox = config.sandbox
    lease_s = sandbox.lease_s if keeps_state(config) else DEFAULT_LEASE_S
    return await Fleet.connect(
        sandbox.url, state_dir=fleet_state, owner=owner, backend=sandbox.backend, lease_s=lease_s
    )


async def open_workers(
    config: RunConfig,
    engine: Engine,
    chat: ChatFormat,
    log: TokenLog,
    stack: AsyncExitStack,
    *,
    fleet_state: Path,
    owner: str,
    pool: str,
    door: Door | None = None,
) -> dict[tuple[str, str], Worker]:
    """Returns a worker for each environment, by (environment, scaffold); `stack` closes what they hold.

    A process that takes over from a dead one has the same `pool` of sandboxes for stateless tools.

    Raises:
        SandboxError: No sandbox is to be had.
    """
    environments = load_environments(config)
    fleet: LastingFleet | None = None
    if any(env.sandbox is not None or env.reward_name == "unit_tests" for env in environments.values()):
        fleet = LastingFleet(lambda: connect_fleet(config, fleet_state, owner), unit_tests.judge_in)
        stack.push_async_callback(fleet.close, release=not keeps_state(config))
        await fleet.get()
    latency = config.env.latency
    delays = None if latency is None else Delays(latency, config.run.seed)
    return {
        (name, config.scaffold.name): _worker(
            config, env, engine, chat, log, fleet, f"{pool}/{name}", delays, door
        )
        for name, env in environments.items()
    }


def _worker(
    config: RunConfig,
    env: Environment,
    engine: Engine,
    chat: ChatFormat,
    log: TokenLog,
    fleet: LastingFleet | None,
    pool: str,
    delays: Delays | None,
    door: Door | None,
) -> Worker:
    rollout, sandboxes = config.rollout, None
    if inside(getattr(env, "agent", None)) and config.sandbox.url != "local":
        raise RolloutConfigError(
            f"the agent of {env.name!r} runs in a sandbox, which asks for the model on its own machine: set "
            f"sandbox.url=local, not {config.sandbox.url}; or let it run on the host"
        )
    if fleet is not None and env.sandbox is not None:
        lease_s = rollout.deadline_s + rollout.score_deadline_s + 60.0
        sandboxes = FleetSandboxes(
            fleet, env.sandbox, rollout.pool_size, lease_s, rollout.unknown_commands, pool
        )
    return Worker(
        env,
        scaffolds.load(config.scaffold.name),
        engine,
        chat,
        sandboxes,
        rewards.load(env.reward_name) if env.reward_name else None,
        log,
        rollout,
        max_turns=config.scaffold.max_turns,
        delays=delays,
        door=door,
    )
