from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from envs.check import check_environment
from envs.definition import Definition
from envs.registry import ENVIRONMENTS
from rl.launch.cli import parse
from rl.launch.compose import load_config
from rl.launch.reference import reference

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return ["\n".join(line.removeprefix(indent) for line in text.splitlines()) for indent, text in found]


def commands() -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("temper ")})


PROGRAMS = [
    pytest.param(text, id=f"{page.name}-{number}")
    for page in PAGES
    for number, text in enumerate(blocks(page, "python"))
]


def wrong_with(definition: Definition) -> list[str]:
    """Returns what is unsound; an example need not be importable, and may reward brevity in passing."""
    env = definition()
    if env.reward_name:
        return []
    report = asyncio.run(check_environment(env, 2))
    excused = {"picklable"} | ({"garbage scores nothing"} if env.name.startswith("docs/") else set())
    return [
        f"{check.name}: {check.detail}"
        for check in report.checks
        if not check.passed and check.name not in excused
    ]


@pytest.mark.parametrize("text", PROGRAMS)
def test_every_program_runs_and_its_environments_are_sound(text: str, tmp_path: Path):
    before = dict(ENVIRONMENTS.registered)
    try:
        space: dict[str, object] = {"__name__": "example"}
        exec(compile(text, "example.py", "exec"), space)
        for value in space.values():
            if isinstance(value, Definition):
                assert wrong_with(value) == []
    finally:
        ENVIRONMENTS.registered.clear()
        ENVIRONMENTS.registered.update(before)


@pytest.mark.parametrize("line", commands())
def test_every_command_is_understood_and_its_settings_are_valid(line: str):
    parsed, rest = parse(shlex.split(line)[1:])
    if parsed.command == "train":
        load_config([*parsed.settings, *rest])


def test_there_is_something_to_test():
    assert len(commands()) > 15
    assert len(PROGRAMS) >= 2


def test_the_reference_of_settings_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == "\n".join(reference()) + "\n", "run: python -m rl.launch.reference > docs/configuration.md"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_shortest_environment_has_at_most_fifteen_lines():
    (text,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in text.splitlines() if line.strip()]) <= 15
