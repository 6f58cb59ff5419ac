import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import envs.registry
from envs.plugins import PluginError
from envs.types import Group, Missing, Score, Status, StopReason, Trajectory, TrajectoryKey
from rl.rollout.curriculum import (
    CurriculumError,
    CurriculumStream,
    TaskRate,
    frontier,
    load_curriculum,
)
from rl.rollout.mixture import Interleave, MixedStream


def stream(function=frontier, tasks: int = 5, efforts: tuple[int, ...] = (50,)) -> CurriculumStream:
    return CurriculumStream(envs.registry.load("calc"), "train", 0, efforts, function, tasks)


def ended(made: CurriculumStream, number: int, rewards: Sequence[float | None]) -> Group:
    task, effort = made.draw(number)
    members = tuple(
        Trajectory(
            TrajectoryKey(task.id, effort, "tools", number, index),
            (),
            Status.FINISHED,
            StopReason.ANSWER,
            Missing("lost") if reward is None else Score(reward),
        )
        for index, reward in enumerate(rewards)
    )
    return Group(number, task, effort, "tools", members)


def test_the_function_sees_pass_rates_and_its_weights_decide() -> None:
    seen: list[list[TaskRate]] = []

    def solved_never(rates: Sequence[TaskRate]) -> list[float]:
        seen.append([TaskRate(r.task, r.groups, r.samples, r.passed, r.last) for r in rates])
        return [0.0 if rate.passed else 1.0 for rate in rates]

    made = stream(solved_never, tasks=3)
    for number in range(3):
        made.observe(number, ended(made, number, (1.0, 0.0, None)))
    assert Counter((r.groups, r.samples, r.passed, r.pass_rate) for r in made.rates.values()) == {
        (1, 2, 1, 0.5): 3
    }
    assert [r.pass_rate for r in seen[0]] == [None] * 3
    with pytest.raises(CurriculumError, match=r"3 weights for 3 tasks.*not all of them 0"):
        made.draw(3)


def test_a_function_may_pick_a_task_itself() -> None:
    made = stream(lambda rates: rates[2].task)
    assert {made.draw(number)[0].id for number in range(6)} == {list(made.rates)[2]}
    with pytest.raises(CurriculumError, match="chose 'calc/0', which is no task of"):
        stream(lambda rates: "calc/0").draw(0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, -1.0, 1.0], [float("nan")] * 3, [0.0] * 3])
def test_unusable_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(CurriculumError, match="one finite weight of at least 0 for each"):
        stream(lambda rates: weights, tasks=3).draw(0)


def test_every_effort_gets_the_task_and_asking_again_gives_the_same() -> None:
    made = stream(efforts=(25, 75))
    first, second = made.draw(0), made.draw(1)
    assert (first[0], first[1], second[1]) == (second[0], 25, 75)
    made.observe(0, ended(made, 0, (1.0, 1.0)))
    assert made.draw(1) == second


def test_choices_and_rates_survive_a_checkpoint() -> None:
    made = stream(efforts=(25, 75))
    drawn = [made.draw(number) for number in range(6)]
    for number in (0, 1, 2):
        made.observe(number, ended(made, number, (1.0, 0.0)))
    back = stream(efforts=(25, 75))
    back.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert back.rates == made.rates
    assert [back.draw(number) for number in range(2, 6)] == drawn[2:]
    assert [back.draw(number) for number in (6, 8)] == [made.draw(number) for number in (6, 8)]


def test_samples_in_the_log_keep_their_task_whatever_the_function_would_choose_now() -> None:
    made = stream()
    tasks = list(made.rates)
    mixed = MixedStream({"calc": made}, Interleave({"calc": 1.0}))
    mixed.pin([TrajectoryKey(tasks[4], 50, "tools", 7, 0)])
    assert mixed.draw(7)[0].id == tasks[4]
    with pytest.raises(CurriculumError, match="not in the curriculum's pool"):
        mixed.pin([TrajectoryKey("calc/0", 50, "tools", 8, 0)])


def test_the_built_in_prefers_tasks_solved_half_the_time() -> None:
    rates = [TaskRate("new"), TaskRate("half", 1, 8, 4), TaskRate("easy", 1, 8, 8), TaskRate("hard", 1, 8, 0)]
    assert frontier(rates) == [0.25, 0.25, 0.01, 0.01]


def test_a_function_is_found_by_name_path_and_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def flat(rates):\n    return [1.0] * len(rates)\n\ndef two(a, b):\n    return []\n")
    assert load_curriculum("frontier") is load_curriculum("rl.rollout.curriculum:frontier") is frontier
    assert load_curriculum(f"{file}:flat")([TaskRate("a")]) == [1.0]
    with pytest.raises(CurriculumError, match="a function of one argument"):
        load_curriculum(f"{file}:two")
    with pytest.raises(CurriculumError, match="None"):
        load_curriculum(f"{file}:flatt")
    with pytest.raises(PluginError, match="Did you mean 'frontier'"):
        load_curriculum("fronteer")
    with pytest.raises(PluginError, match="there is no file"):
        load_curriculum(f"{tmp_path / 'none.py'}:flat")
