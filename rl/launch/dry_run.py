"""`temper train --dry-run`: what a run would do, with one task of its environment, and nothing started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from envs.base import Environment
from envs.types import Task
from rl.launch.config import RunConfig
from rl.launch.run import as_plain, check_name


def plan(config: RunConfig) -> Iterator[str]:
    """Yields the resolved configuration, the arithmetic of a batch, the processes, and one task.

    Raises:
        ValueError: The environment, its split, the scaffold or the reward cannot be had.
    """
    check_name(config)
    yield yaml.safe_dump(as_plain(config), sort_keys=False)
    yield from arithmetic(config)
    yield from _processes(config)
    yield from first_tasks(config)


def arithmetic(config: RunConfig) -> Iterator[str]:
    """Yields how many samples and tokens the stages take."""
    groups, size = config.rollout.groups_per_step, config.algorithm.group_size
    samples = groups * size
    yield f"warm start: {config.sft.steps} steps x {config.sft.batch_size} demonstrations"
    levels = len(config.effort.levels)
    stage, steps = "distillation" if config.opd.teachers else "reinforcement", config.learning_steps
    yield (
        f"{stage}: {steps} steps x {groups} groups x {size} samples = "
        f"{steps * samples} samples ({samples} a step), at most "
        f"{samples * config.engine.max_tokens} tokens a step"
    )
    kind = config.effort.distribution.kind
    how = "each task at one after the other" if kind == "ladder" else f"drawn {kind}, {levels} a task"
    yield f"efforts: {', '.join(map(str, config.effort.levels))}, {how}"
    evaluation = config.eval.tasks * (1 + config.eval.samples)
    yield (
        f"evaluation: {config.eval.tasks} tasks, once greedy and {config.eval.samples} times sampled = "
        f"{evaluation} samples, twice"
    )
    at_most = (config.rollout.staleness + 1) * samples + config.rollout.extra_groups * size
    in_flight = min(config.rollout.max_in_flight, at_most)
    yield f"in flight: at most {in_flight} samples, {config.rollout.staleness} steps old at most"


def _processes(config: RunConfig) -> Iterator[str]:
    launcher = config.launcher
    where = (
        f"the Ray cluster at {launcher.address}"
        if launcher.address
        else "a private Ray cluster on this machine"
    )
    yield (
        f"processes: driver, learner ({launcher.trainer_threads} threads) and generator "
        f"({launcher.generator_threads} threads) on {where}"
    )
    yield f"policy: trained on {config.trainer_device}, sampled from on {config.engine_device}"
    yield str(config.exactness)
    yield f"sandboxes: {config.sandbox.backend}, {config.rollout.pool_size} pooled for stateless tools"


def first_tasks(config: RunConfig) -> Iterator[str]:
    """Loads all that a run names, and yields the first task of each split.

    Raises:
        ValueError: The environment, its split, the scaffold, the reward, the model or a teacher cannot be
            had.
    """
    import envs.scaffolds
    from rl.distil.stage import check_teachers
    from rl.environments import load_environments, open_stream

    envs.scaffolds.load(config.scaffold.name)
    _check_model(config)
    if config.opd.teachers:
        check_teachers(config)
    for env in load_environments(config).values():
        yield from _first_of(config, env)
    if config.rollout.curriculum is not None:
        task, _ = open_stream(config).draw(0)
        yield f"first task of the curriculum {config.rollout.curriculum.function}: {task.id}"


def _first_of(config: RunConfig, env: Environment) -> Iterator[str]:
    """Yields the first task of each split of one environment."""
    import rewards

    if env.reward_name:
        rewards.load(env.reward_name)
    for split in (config.env.train_split, config.env.eval_split):
        task = next(iter(env.tasks(split, config.run.seed)), None)
        if task is None:
            raise ValueError(
                f"environment {env.name!r} has no task in split {split!r}; it has {', '.join(env.splits)}"
            )
        _check_room(config, env, task, split)
        yield f"first task of {env.name}, {split}: {task.id}: {' / '.join(m.content for m in task.prompt)!r}"


def _check_model(config: RunConfig) -> None:
    if not config.model.path:
        if config.policy.kind == "native":
            config.model.fresh()
    elif not Path(config.model.path).expanduser().exists():
        raise ValueError(f"model.path={config.model.path}: there is no such folder; check the path")


def _check_room(config: RunConfig, env: Environment, task: Task, split: str) -> None:
    """Refuses a prompt after which not one token could be sampled: the run would learn from nothing."""
    from rl import build
    from rl.rollout.messages import to_chat, tool_to_chat

    messages, tools = [to_chat(m) for m in task.prompt], [tool_to_chat(tool) for tool in env.tools]
    prompt = build.chat_format(config).render_prompt(messages, tools=tools, effort=config.effort.levels[0])
    if len(prompt) >= config.rollout.max_total_tokens:
        raise ValueError(
            f"the prompt of {task.id} (split {split}) has {len(prompt)} tokens, which leaves none to sample "
            f"under rollout.max_total_tokens={config.rollout.max_total_tokens}; raise it and "
            "engine.max_tokens"
        )
