from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rl.distil.mix import Mix, MixError, mix_from_json, read_mix, write_mix
from rl.distil.versions import MixVersions
from rl.trainers.opd import TeacherConfig

CALC, SORT = TeacherConfig(path="a", envs=("calc",)), TeacherConfig(path="b", envs=("sort",))


def mix(calc: float = 0.5, **changed: object) -> Mix:
    fields = {"teachers": {"calc": CALC, "sort": SORT}, "shares": {"calc": calc, "sort": 1 - calc}}
    return Mix(**{"max_in_flight": 16, **fields, **changed})  # type: ignore[arg-type]


def test_a_teacher_is_chosen_by_task_then_by_environment_then_as_the_one_for_the_rest() -> None:
    hard, rest = TeacherConfig(path="c", tasks=("calc/9*",)), TeacherConfig(path="d")
    found = mix(teachers={"rest": rest, "calc": CALC, "hard": hard})
    assert found.teacher_of("calc", "calc/97*12") == "hard"
    assert found.teacher_of("calc", "calc/12*97") == "calc"
    assert found.teacher_of("sort", "sort/ab") == "rest"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teachers": {"calc": CALC}}, "no teacher for task .* of environment sort"),
        ({"shares": {"calc": 1.0}}, "give one to each of calc, sort"),
        ({"shares": {"calc": 1.0, "sort": 0.0}}, "numbers above 0"),
        ({"shares": {"calc": 1.0, "sort": float("nan")}}, "numbers above 0"),
        ({"max_in_flight": 3}, "max_in_flight: 3 has no room for a group of 4"),
        ({"caps": {"calc": 1}}, "calc: 1 has no room"),
        ({"caps": {"clac": 8}}, "caps name clac; there are calc, sort"),
        ({"teachers": {"x": TeacherConfig(path="a", envs=("clac",))}}, "teacher x teaches clac"),
    ],
)
def test_a_mix_that_cannot_work_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(MixError, match=message):
        mix(**changed).check(["calc", "sort"], 4)


def test_a_mix_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "distillation.yaml"
    write_mix(path, mix(caps={"calc": 8}))
    assert read_mix(path) == mix(caps={"calc": 8})
    assert path.read_text().startswith("# Teachers, shares and concurrency")


@pytest.mark.parametrize(
    "text", ["", "- 1", "teachers: [", "teachers: {}\nshares: {}\nmax_in_flight: 1", "techers: {}"]
)
def test_a_file_that_is_no_mix_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "distillation.yaml"
    path.write_text(text)
    with pytest.raises(MixError):
        read_mix(path)


def test_an_unknown_key_of_a_teacher_is_named() -> None:
    data = mix().to_json()
    data["teachers"]["calc"]["wieght"] = 2
    with pytest.raises(MixError, match=r"teachers\.calc\.wieght"):
        mix_from_json(data)


def test_earlier_groups_keep_their_places_when_shares_change() -> None:
    versions = MixVersions(["calc", "sort"])
    versions.add(mix(0.5), 0)
    before = [versions.at(group) for group in range(10)]
    assert versions.add(mix(0.9), 10) == 2
    assert [versions.at(group) for group in range(10)] == before
    assert [versions.version_of(group) for group in (0, 9, 10, 99)] == [1, 1, 2, 2]
    after = [versions.at(group) for group in range(10, 30)]
    assert Counter(name for name, _ in after) == {"calc": 18, "sort": 2}


def test_every_environment_counts_on_without_a_gap_and_without_a_double() -> None:
    versions = MixVersions(["calc", "sort"])
    versions.add(mix(0.5), 0)
    versions.add(mix(0.2), 7)
    versions.add(mix(0.8), 7)
    versions.add(mix(0.3), 20)
    seen: dict[str, list[int]] = {"calc": [], "sort": []}
    for group in range(40):
        name, number = versions.at(group)
        seen[name].append(number)
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


def test_versions_survive_a_restart() -> None:
    versions, again = MixVersions(["calc", "sort"]), MixVersions(["calc", "sort"])
    versions.add(mix(0.5), 0)
    versions.add(mix(0.9, caps={"sort": 4}), 5)
    again.add(mix(0.1), 0)
    again.load_state_dict(versions.state_dict())
    assert [again.at(group) for group in range(30)] == [versions.at(group) for group in range(30)]
    assert (again.version, again.current) == (2, versions.current)
